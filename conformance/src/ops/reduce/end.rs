//! The end of a rank of a gather that sums.

use std::collections::VecDeque;

use anyhow::{Context, Result, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::moe::DType;
use tokenyard_core::ops::gather::reduce::{PendingReduce, Spread, Sum};
use tokenyard_core::ops::gather::{Gather, GatherOptions};
use tokenyard_core::ops::{SessionOptions, SessionUsers};

use super::rules::{self, Form};
use crate::ops::drawn::FILLER;
use crate::ops::end::{OperationEnd, WorldPlace};
use crate::ops::expect;

/// A gather that numbers its sums, and checks what each rank gets.
pub(crate) struct ReduceEnd {
    pub(super) gather: Gather,
    pub(super) place: WorldPlace,
    /// The calls, in turn.
    forms: &'static [Form],
    /// Calls so far.
    sent: u64,
    pending: VecDeque<OpenSum>,
}

/// A call that is not received.
struct OpenSum {
    number: u64,
    form: Form,
    pending: PendingReduce,
    /// The tensors that were sent: each second all-reduce writes there.
    tensors: Vec<Vec<u8>>,
}

impl OperationEnd for ReduceEnd {
    const WORD: &'static str = "reduce";
    type Options = GatherOptions;
    type Length = Form;

    fn ask(session: &mut SessionOptions, options: GatherOptions) {
        session.gathers.push(options);
    }

    fn take(users: &mut SessionUsers, place: WorldPlace, forms: &'static [Form]) -> Option<Self> {
        let gather = users.gathers.pop()?;
        Some(Self { gather, place, forms, sent: 0, pending: VecDeque::new() })
    }

    fn place(&self) -> &WorldPlace {
        &self.place
    }

    fn in_flight(&self) -> u32 {
        self.gather.options().in_flight
    }

    fn send_next(&mut self) -> Result<()> {
        self.send_form(self.form(self.sent))
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

impl ReduceEnd {
    fn form(&self, call: u64) -> Form {
        self.forms[call as usize % self.forms.len()]
    }

    /// Sends the next call in this form.
    pub(in crate::ops) fn send_form(&mut self, form: Form) -> Result<()> {
        let (number, rank, ranks) = (self.sent, self.place.rank, self.place.ranks);
        let tensors = rules::tensors(rank, ranks, number, &form);
        let given = refs(&tensors, &form, ranks)?;
        let pending = self.gather.reduce_send(form.spread, &given, form.sum());
        let pending = pending.with_context(|| format!("send call {number}"))?;
        self.sent += 1;
        self.pending.push_back(OpenSum { number, form, pending, tensors });
        Ok(())
    }

    /// Calls that are not received.
    pub(super) fn open_calls(&self) -> usize {
        self.pending.len()
    }

    /// Receives the call at a place among those that are not received, and checks it.
    pub(super) fn recv_at(&mut self, at: usize) -> Result<()> {
        let call = self.pending.remove(at).context("find a call that was sent")?;
        let OpenSum { number, form, pending, tensors } = call;
        let WorldPlace { rank, ranks, .. } = self.place;
        let in_place = number % 2 == 1 && form.spread == Spread::All;
        let mut outs = if in_place { tensors } else { outs(ranks, &form) };
        let received = self.gather.reduce_recv(pending, &mut muts(&mut outs, &form, ranks)?);
        received.with_context(|| format!("receive call {number}"))?;
        rules::check([rank, ranks], number, &form, &outs)
    }

    /// The next call, both halves at once.
    pub(super) fn pass(&mut self) -> Result<()> {
        let (call, form) = (self.sent, self.form(self.sent));
        let WorldPlace { rank, ranks, .. } = self.place;
        let (tensors, mut outs) = (rules::tensors(rank, ranks, call, &form), outs(ranks, &form));
        let passed = self.call(&form, &tensors, &mut outs)?;
        passed.with_context(|| format!("call {call}"))?;
        self.sent += 1;
        rules::check([rank, ranks], call, &form, &outs)
    }

    /// A call in this form, which must end with an error of this kind, about this rank, and write nothing.
    pub(super) fn fail(&mut self, kind: ErrorKind, about: Option<u32>, form: &Form) -> Result<()> {
        let WorldPlace { rank, ranks, .. } = self.place;
        let (tensors, mut outs) = (rules::tensors(rank, ranks, 0, form), outs(ranks, form));
        let result = self.call(form, &tensors, &mut outs)?;
        expect(kind, about, result).with_context(|| format!("call of {form:?}"))?;
        let wrote = outs.iter().flatten().any(|byte| *byte != FILLER);
        ensure!(!wrote, "call of {form:?}: it failed; expected no bytes written");
        Ok(())
    }

    fn call(
        &mut self,
        form: &Form,
        tensors: &[Vec<u8>],
        outs: &mut [Vec<u8>],
    ) -> Result<tokenyard_core::Result<()>> {
        let ranks = self.place.ranks;
        let (given, mut room) = (refs(tensors, form, ranks)?, muts(outs, form, ranks)?);
        let sum: Sum = form.sum();
        Ok(match form.spread {
            Spread::Scatter => self.gather.reduce_scatter(&given, &mut room, sum),
            Spread::All => self.gather.all_reduce(&given, &mut room, sum),
        })
    }
}

/// Room for the sums of a rank.
fn outs(ranks: u32, form: &Form) -> Vec<Vec<u8>> {
    let room = |tensor: &(DType, usize)| {
        let (dtype, elements) = rules::out(form.spread, ranks, *tensor);
        vec![FILLER; dtype.bytes() * elements]
    };
    form.tensors.iter().map(room).collect()
}

fn refs<'a>(data: &'a [Vec<u8>], form: &Form, ranks: u32) -> Result<Vec<TensorRef<'a>>> {
    let tensor = |(data, (dtype, part)): (&'a Vec<u8>, &(DType, usize))| {
        Ok(TensorRef::from_bytes(data, *dtype, ranks as usize, *part)?)
    };
    data.iter().zip(form.tensors).map(tensor).collect()
}

fn muts<'a>(data: &'a mut [Vec<u8>], form: &Form, ranks: u32) -> Result<Vec<TensorMut<'a>>> {
    let tensor = |(data, of): (&'a mut Vec<u8>, &(DType, usize))| {
        let (dtype, elements) = rules::out(form.spread, ranks, *of);
        Ok(TensorMut::from_bytes(data, dtype, 1, elements)?)
    };
    data.iter_mut().zip(form.tensors).map(tensor).collect()
}
