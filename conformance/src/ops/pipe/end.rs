//! The end of a rank of a pipe.

use std::sync::Arc;

use anyhow::{Context, Result};
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::config::Config;
use tokenyard_core::ops::pipe::{Pipe, PipeOptions};

use super::rules::{self, MessageWay};

/// Fills the memory for a message before it comes, so that bytes that do not come show.
const FILLER: u8 = 0xa5;

/// A pipe that numbers the messages of each pair, and checks them.
pub(crate) struct PipeEnd {
    pipe: Pipe,
    pub(super) world: Arc<World>,
    pub(super) config: Config,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) domains: u32,
    /// The ranks that a link joins with this one.
    pub(super) peers: Vec<u32>,
    lengths: &'static [usize],
    /// Messages so far, by rank.
    sent: Vec<u64>,
    received: Vec<u64>,
}

impl PipeEnd {
    /// Opens a pipe. Messages have these lengths in turn. Returns the reason in its place where the components of the
    /// config have no pipes. Collective.
    ///
    /// # Errors
    /// As [`Pipe::open`].
    pub(crate) fn open(
        world: &Arc<World>,
        config: &Config,
        options: PipeOptions,
        lengths: &'static [usize],
    ) -> Result<std::result::Result<Self, String>> {
        let pipe = match Pipe::open(world, config, options) {
            Ok(pipe) => pipe,
            Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(Err(error.detail())),
            Err(error) => return Err(error.into()),
        };
        let (rank, ranks) = (world.rank(), world.ranks());
        // Without scale-up one transport reaches all ranks, so it is as one domain.
        let domains = config.domains.filter(|_| config.scale_up.is_some()).unwrap_or(1);
        let peers = rules::linked(rank, ranks, domains);
        let (sent, received) = (vec![0; ranks as usize], vec![0; ranks as usize]);
        let (world, config) = (Arc::clone(world), config.clone());
        Ok(Ok(Self { pipe, world, config, rank, ranks, domains, peers, lengths, sent, received }))
    }

    /// The options of the pipe.
    pub(super) fn options(&self) -> PipeOptions {
        self.pipe.options()
    }

    /// The length of a message.
    fn length(&self, way: MessageWay, number: u64) -> usize {
        let turn = number + u64::from(way.from) + 3 * u64::from(way.to);
        self.lengths[turn as usize % self.lengths.len()]
    }

    /// Sends the next message to a rank.
    pub(super) fn send(&mut self, to: u32) -> Result<()> {
        let way = MessageWay { from: self.rank, to };
        let number = self.sent[to as usize];
        let message = rules::bytes(way, number, self.length(way, number));
        self.send_bytes(&message, to).with_context(|| format!("send message {number} to rank {to}"))
    }

    /// Sends these bytes as the next message to a rank.
    pub(super) fn send_bytes(&mut self, bytes: &[u8], to: u32) -> tokenyard_core::Result<()> {
        self.sent[to as usize] += 1;
        self.pipe.send(TensorRef::from_slice(bytes, 1, bytes.len())?, to)
    }

    /// Receives the next message of a rank, and checks it.
    pub(super) fn recv(&mut self, from: u32) -> Result<()> {
        let way = MessageWay { from, to: self.rank };
        let number = self.received[from as usize];
        let found = self.recv_bytes(self.length(way, number), from);
        let found = found.with_context(|| format!("receive message {number} of rank {from}"))?;
        rules::check(way, number, &found)
    }

    /// Receives the next message of a rank, which has this length.
    pub(super) fn recv_bytes(
        &mut self,
        length: usize,
        from: u32,
    ) -> tokenyard_core::Result<Vec<u8>> {
        self.received[from as usize] += 1;
        let mut found = vec![FILLER; length];
        self.pipe.recv(TensorMut::from_slice(&mut found, 1, length)?, from)?;
        Ok(found)
    }

    /// Sends `count` messages to each peer and receives as many of each, while `in_flight` are on their way.
    pub(super) fn stream(&mut self, count: u64) -> Result<()> {
        let ahead = u64::from(self.options().in_flight) - 1;
        for turn in 0..count + ahead {
            for at in 0..self.peers.len() {
                if turn < count {
                    self.send(self.peers[at])?;
                }
            }
            for at in 0..self.peers.len() {
                if turn >= ahead {
                    self.recv(self.peers[at])?;
                }
            }
        }
        Ok(())
    }

    /// Waits until all messages of this rank are taken.
    pub(super) fn flush(&mut self) -> tokenyard_core::Result<()> {
        self.pipe.flush()
    }

    /// Whether an error has closed the pipe.
    pub(super) fn is_closed(&self) -> bool {
        self.pipe.is_closed()
    }

    /// Closes the pipe on all ranks together.
    pub(super) fn close(self) -> Result<()> {
        self.pipe.close().context("close the pipe")
    }
}
