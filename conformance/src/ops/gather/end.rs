//! The end of a rank of a gather.

use std::collections::VecDeque;

use anyhow::{Context, Result, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::Stream;
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
        let shards = self.place.memory.tensors(shards)?;
        let pending = self.gather.all_gather_send(&shards.refs()?);
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
        let mut outs = self.place.memory.tensors(outs(self.place.ranks, lengths))?;
        let received = self.gather.all_gather_recv(pending, &mut outs.muts()?);
        received.with_context(|| format!("receive call {number}"))?;
        rules::check(self.place.ranks, number, lengths, &outs.into_bytes()?)
    }

    /// The next call, both halves at once.
    pub(super) fn pass(&mut self) -> Result<()> {
        let (ranks, call) = (self.place.ranks, self.sent);
        let lengths = self.lengths(call);
        let memory = &self.place.memory;
        let shards = memory.tensors(rules::shards(self.place.rank, call, lengths))?;
        let mut outs = memory.tensors(outs(ranks, lengths))?;
        let passed = self.gather.all_gather(&shards.refs()?, &mut outs.muts()?);
        passed.with_context(|| format!("call {call}"))?;
        self.sent += 1;
        rules::check(ranks, call, lengths, &outs.into_bytes()?)
    }

    /// The next call, in the order of a stream: other work there writes the shards before it, and again between its
    /// halves, and reads the outputs behind it. A kernel set of host memory must refuse the stream.
    pub(super) fn pass_in_order(&mut self) -> Result<()> {
        let (ranks, call) = (self.place.ranks, self.sent);
        let (lengths, memory) = (self.lengths(call), &self.place.memory);
        let Some(stream) = memory.stream()? else {
            // SAFETY: no call queues work there.
            let stream = unsafe { Stream::new(std::ptr::null_mut()) };
            let refused = self.gather.on(stream).all_gather(&[], &mut []);
            return expect(ErrorKind::InvalidInput, None, refused);
        };
        let right = memory.tensors(rules::shards(self.place.rank, call, lengths))?;
        let wrong = memory.tensors(outs(1, lengths))?;
        let shards = memory.tensors(outs(1, lengths))?;
        let mut all = memory.tensors(outs(ranks, lengths))?;
        let found = memory.tensors(outs(ranks, lengths))?;
        let passed = (|| {
            // SAFETY: the tensors are dropped behind the stream, as is every error.
            unsafe { stream.copy(&shards, &right)? };
            let pending = self.gather.on(stream.name()).all_gather_send(&shards.refs()?)?;
            // SAFETY: as above.
            unsafe { stream.copy(&shards, &wrong)? };
            self.gather.all_gather_recv(pending, &mut all.muts()?)?;
            // SAFETY: as above.
            unsafe { stream.copy(&found, &all) }
        })();
        drop(stream);
        passed.with_context(|| format!("call {call} in the order of a stream"))?;
        self.sent += 1;
        rules::check(ranks, call, lengths, &found.into_bytes()?)
    }

    /// A call with shards of these lengths, which must end with an error of this kind, about this rank, and write
    /// nothing.
    pub(super) fn fail(
        &mut self,
        kind: ErrorKind,
        about: Option<u32>,
        lengths: &[usize],
    ) -> Result<()> {
        let memory = &self.place.memory;
        let shards = memory.tensors(rules::shards(self.place.rank, 0, lengths))?;
        let mut outs = memory.tensors(outs(self.place.ranks, lengths))?;
        let result = self.gather.all_gather(&shards.refs()?, &mut outs.muts()?);
        expect(kind, about, result).with_context(|| format!("call with shards of {lengths:?}"))?;
        let wrote = outs.into_bytes()?.iter().flatten().any(|byte| *byte != FILLER);
        ensure!(!wrote, "call with shards of {lengths:?}: it failed; expected no bytes written");
        Ok(())
    }
}

/// Room for the shards of all ranks.
fn outs(ranks: u32, lengths: &[usize]) -> Vec<Vec<u8>> {
    lengths.iter().map(|length| vec![FILLER; ranks as usize * length]).collect()
}
