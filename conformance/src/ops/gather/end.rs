//! The end of a rank of a gather.

use std::collections::VecDeque;

use anyhow::{Context, Result, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::ops::gather::{Gather, GatherOptions, PendingGather};
use tokenyard_core::ops::{SessionOptions, SessionUsers};

use super::rules;
use crate::ops::drawn::FILLER;
use crate::ops::end::{OperationEnd, WorldPlace};
use crate::ops::expect;

/// A gather that numbers its calls, and checks what each rank gets.
pub(crate) struct GatherEnd {
    gather: Gather,
    pub(super) place: WorldPlace,
    /// The lengths of the shards of a call, in turn.
    lengths: &'static [&'static [usize]],
    /// Calls so far.
    sent: u64,
    pending: VecDeque<OpenCall>,
}

/// A call that is not received.
struct OpenCall {
    number: u64,
    lengths: &'static [usize],
    pending: PendingGather,
}

impl OperationEnd for GatherEnd {
    const WORD: &'static str = "gather";
    type Options = GatherOptions;
    type Length = &'static [usize];

    fn ask(session: &mut SessionOptions, options: GatherOptions) {
        session.gathers.push(options);
    }

    fn take(
        users: &mut SessionUsers,
        place: WorldPlace,
        lengths: &'static [&'static [usize]],
    ) -> Option<Self> {
        let gather = users.gathers.pop()?;
        Some(Self { gather, place, lengths, sent: 0, pending: VecDeque::new() })
    }

    fn place(&self) -> &WorldPlace {
        &self.place
    }

    fn in_flight(&self) -> u32 {
        self.gather.options().in_flight
    }

    fn send_next(&mut self) -> Result<()> {
        self.send_lengths(self.lengths(self.sent))
    }

    fn recv_next(&mut self) -> Result<()> {
        self.recv_at(0)
    }

    fn is_closed(&self) -> bool {
        self.gather.is_closed()
    }

    fn close(self) -> Result<()> {
        self.gather.close().context("close the gather")
    }
}

impl GatherEnd {
    fn lengths(&self, call: u64) -> &'static [usize] {
        self.lengths[call as usize % self.lengths.len()]
    }

    /// Sends shards of these lengths as the next call.
    pub(in crate::ops) fn send_lengths(&mut self, lengths: &'static [usize]) -> Result<()> {
        let number = self.sent;
        let shards = rules::shards(self.place.rank, number, lengths);
        let pending = self.gather.all_gather_send(&refs(&shards)?);
        let pending = pending.with_context(|| format!("send call {number}"))?;
        self.sent += 1;
        self.pending.push_back(OpenCall { number, lengths, pending });
        Ok(())
    }

    /// Calls that are not received.
    pub(super) fn open_calls(&self) -> usize {
        self.pending.len()
    }

    /// Receives the call at a place among those that are not received, and checks it.
    pub(super) fn recv_at(&mut self, at: usize) -> Result<()> {
        let call = self.pending.remove(at).context("find a call that was sent")?;
        let OpenCall { number, lengths, pending } = call;
        let mut outs = outs(self.place.ranks, lengths);
        let received = self.gather.all_gather_recv(pending, &mut muts(&mut outs)?);
        received.with_context(|| format!("receive call {number}"))?;
        rules::check(self.place.ranks, number, lengths, &outs)
    }

    /// The next call, both halves at once.
    pub(super) fn pass(&mut self) -> Result<()> {
        let (ranks, call) = (self.place.ranks, self.sent);
        let lengths = self.lengths(call);
        let (shards, mut outs) =
            (rules::shards(self.place.rank, call, lengths), outs(ranks, lengths));
        let passed = self.gather.all_gather(&refs(&shards)?, &mut muts(&mut outs)?);
        passed.with_context(|| format!("call {call}"))?;
        self.sent += 1;
        rules::check(ranks, call, lengths, &outs)
    }

    /// A call with shards of these lengths, which must end with an error of this kind, about this rank, and write
    /// nothing.
    pub(super) fn fail(
        &mut self,
        kind: ErrorKind,
        about: Option<u32>,
        lengths: &[usize],
    ) -> Result<()> {
        let (shards, mut outs) =
            (rules::shards(self.place.rank, 0, lengths), outs(self.place.ranks, lengths));
        let result = self.gather.all_gather(&refs(&shards)?, &mut muts(&mut outs)?);
        expect(kind, about, result).with_context(|| format!("call with shards of {lengths:?}"))?;
        let wrote = outs.iter().flatten().any(|byte| *byte != FILLER);
        ensure!(!wrote, "call with shards of {lengths:?}: it failed; expected no bytes written");
        Ok(())
    }
}

/// Room for the shards of all ranks.
fn outs(ranks: u32, lengths: &[usize]) -> Vec<Vec<u8>> {
    lengths.iter().map(|length| vec![FILLER; ranks as usize * length]).collect()
}

fn refs(data: &[Vec<u8>]) -> tokenyard_core::Result<Vec<TensorRef<'_>>> {
    data.iter().map(|one| TensorRef::from_slice(one, 1, one.len())).collect()
}

fn muts(data: &mut [Vec<u8>]) -> tokenyard_core::Result<Vec<TensorMut<'_>>> {
    let tensor = |one| {
        let one: &mut Vec<u8> = one;
        let length = one.len();
        TensorMut::from_slice(one.as_mut_slice(), 1, length)
    };
    data.iter_mut().map(tensor).collect()
}
