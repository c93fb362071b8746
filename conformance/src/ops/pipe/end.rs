//! The end of a rank of a pipe.

use anyhow::{Context, Result};
use tokenyard_core::ErrorKind;
use tokenyard_core::ops::pipe::{Pipe, PipeOptions};
use tokenyard_core::ops::{SessionOptions, SessionUsers};

use super::rules::{self, MessageWay};
use crate::ops::drawn::FILLER;
use crate::ops::end::{OperationEnd, WorldPlace};

/// A pipe that numbers the messages of each pair, and checks them.
pub(crate) struct PipeEnd {
    pipe: Pipe,
    pub(super) place: WorldPlace,
    /// The ranks that a link joins with this one.
    pub(super) peers: Vec<u32>,
    lengths: &'static [usize],
    /// Messages so far, by rank.
    sent: Vec<u64>,
    received: Vec<u64>,
}

impl OperationEnd for PipeEnd {
    const WORD: &'static str = "pipe";
    type Options = PipeOptions;
    type Length = usize;

    fn ask(session: &mut SessionOptions, options: PipeOptions) {
        session.pipes.push(options);
    }

    fn take(
        users: &mut SessionUsers,
        place: WorldPlace,
        lengths: &'static [usize],
    ) -> Option<Self> {
        let pipe = users.pipes.pop()?;
        let peers = rules::linked(place.rank, place.ranks, place.domains);
        let none = vec![0; place.ranks as usize];
        Some(Self { pipe, place, peers, lengths, sent: none.clone(), received: none })
    }

    fn place(&self) -> &WorldPlace {
        &self.place
    }

    fn in_flight(&self) -> u32 {
        self.pipe.options().in_flight
    }

    fn send_next(&mut self) -> Result<()> {
        (0..self.peers.len()).try_for_each(|at| self.send(self.peers[at]))
    }

    /// Where a length differs, the first such error comes once the messages of all peers are taken.
    fn recv_next(&mut self) -> Result<()> {
        let mut taken = Ok(());
        for at in 0..self.peers.len() {
            match self.recv(self.peers[at]) {
                Err(error) if is_mismatch(&error) => taken = taken.and(Err(error)),
                received => received?,
            }
        }
        taken
    }

    fn is_closed(&self) -> bool {
        self.pipe.is_closed()
    }

    fn settle(&mut self) -> Result<()> {
        while let Err(error) = self.flush() {
            if error.kind() != ErrorKind::Mismatch {
                return Err(error.into());
            }
        }
        Ok(())
    }

    fn close(self) -> Result<()> {
        self.pipe.close().context("close the pipe")
    }
}

fn is_mismatch(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<tokenyard_core::Error>();
    error.is_some_and(|error| error.kind() == ErrorKind::Mismatch)
}

impl PipeEnd {
    /// The length of a message.
    fn length(&self, way: MessageWay, number: u64) -> usize {
        let turn = number + u64::from(way.from) + 3 * u64::from(way.to);
        self.lengths[turn as usize % self.lengths.len()]
    }

    /// Sends a message of this length to each peer.
    pub(in crate::ops) fn send_length(&mut self, length: usize) -> Result<()> {
        let message = vec![0; length];
        (0..self.peers.len()).try_for_each(|at| Ok(self.send_bytes(&message, self.peers[at])?))
    }

    /// Sends the next message to a rank.
    pub(super) fn send(&mut self, to: u32) -> Result<()> {
        let number = self.sent[to as usize];
        self.try_send(to).with_context(|| format!("send message {number} to rank {to}"))
    }

    /// As [`send`](Self::send), with the pipe's own error.
    pub(super) fn try_send(&mut self, to: u32) -> tokenyard_core::Result<()> {
        let way = MessageWay { from: self.place.rank, to };
        let number = self.sent[to as usize];
        let message = rules::bytes(way, number, self.length(way, number));
        self.send_bytes(&message, to)
    }

    /// Sends these bytes as the next message to a rank.
    pub(super) fn send_bytes(&mut self, bytes: &[u8], to: u32) -> tokenyard_core::Result<()> {
        let message = self.place.memory.tensors(vec![bytes.to_vec()])?;
        let sent = message.refs()?.into_iter().try_for_each(|tensor| self.pipe.send(tensor, to));
        // A tensor that is refused here is a message, too. An error of an earlier message takes its place.
        let error = sent.as_ref().err().map(tokenyard_core::Error::kind);
        let went = matches!(error, None | Some(ErrorKind::InvalidInput));
        self.sent[to as usize] += u64::from(went);
        sent
    }

    /// Receives the next message of a rank, and checks it.
    pub(super) fn recv(&mut self, from: u32) -> Result<()> {
        let way = MessageWay { from, to: self.place.rank };
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
        let mut found = self.place.memory.tensors(vec![vec![FILLER; length]])?;
        found.muts()?.into_iter().try_for_each(|tensor| self.pipe.recv(tensor, from))?;
        Ok(found.into_bytes()?.concat())
    }

    /// Waits until all messages of this rank are taken.
    pub(super) fn flush(&mut self) -> tokenyard_core::Result<()> {
        self.pipe.flush()
    }
}
