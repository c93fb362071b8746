//! Reduce-scatter and all-reduce: sums over all ranks, of a [`Gather`] that was opened with `reduces`.
//!
//! A tensor has a part for each rank: its elements divided by R, in order of ranks. An element of the result is the sum
//! of those of all ranks, added in f32 in the order of ranks, multiplied by `scale`, and rounded once to the type of
//! the tensor. So its bits depend on the inputs alone: they are the same in every run, over every transport, and with
//! any number of domains. Rules of calls are those of [gathers](super).

use std::sync::Arc;

use super::Gather;
use crate::abi;
use crate::communicator::memory::{Argument, check_memory};
use crate::communicator::{TensorMut, TensorRef};
use crate::moe::DType;
use crate::ops::{contiguous_bytes, part, reason};
use crate::session::reporter::InCall;
use crate::{Error, ErrorKind, Result};

/// How parts travel to the rank that sums them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// As they are.
    #[default]
    Fp32,
    /// f32 as bf16, with stochastic rounding by a hash of the bits: half the bytes. The part that stays on its rank is
    /// not rounded. No change to bf16 tensors. The noise depends on elements and their places, not on ranks: equal
    /// tensors are rounded alike. A finite number above the largest bf16 may become infinite.
    Bf16,
}

impl Precision {
    fn code(self) -> u32 {
        match self {
            Self::Fp32 => abi::TY_PRECISION_FP32,
            Self::Bf16 => abi::TY_PRECISION_BF16,
        }
    }
}

/// A sum; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sum {
    /// How parts travel.
    pub precision: Precision,
    /// The factor of the sum, finite.
    pub scale: f32,
}

impl Default for Sum {
    fn default() -> Self {
        Self { precision: Precision::Fp32, scale: 1.0 }
    }
}

/// The ranks that get a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Each rank gets its part: a reduce-scatter.
    Scatter,
    /// All ranks get all parts: an all-reduce.
    All,
}

impl Spread {
    /// The place of its name among the operations of a gather that reduces.
    fn kind(self) -> usize {
        match self {
            Self::Scatter => 1,
            Self::All => 2,
        }
    }

    /// Bits `TY_REDUCE_*`.
    fn flags(self) -> u64 {
        match self {
            Self::Scatter => 0,
            Self::All => abi::TY_REDUCE_GATHERED,
        }
    }
}

/// A call that was sent. Finish it with [`Gather::reduce_recv`]: a call that is dropped holds its slot for ever.
#[derive(Debug)]
#[must_use = "a call that is never received leaves the other ranks waiting"]
pub struct PendingReduce {
    /// The identity of its gather.
    identity: Arc<()>,
    operation: u64,
    spread: Spread,
    /// Type and number of elements of each tensor.
    forms: Vec<(DType, u64)>,
}

impl Gather {
    /// Sums tensors over all ranks: `outs[i]` gets this rank's part of the sum of all `tensors[i]`, 1/R of its
    /// elements. Collective.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for tensors that cannot be summed, [`ErrorKind::Refused`] on the other ranks.
    /// [`ErrorKind::Mismatch`] on all ranks where lengths, types or sums differ, or the calls that ranks make. Nothing
    /// is written then. [`ErrorKind::InvalidInput`] on each rank for itself where the gather was opened without
    /// `reduces`.
    pub fn reduce_scatter(
        &mut self,
        tensors: &[TensorRef<'_>],
        outs: &mut [TensorMut<'_>],
        sum: Sum,
    ) -> Result<()> {
        self.reduce(Spread::Scatter, tensors, outs, sum)
    }

    /// Sums tensors over all ranks: `outs[i]` gets the sum of all `tensors[i]`, the same bits on all ranks. Collective.
    /// In place by its halves: what was sent may be written.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter), with one exception: where another rank makes the call by its
    /// halves, and its outputs cannot be written, [`ErrorKind::Refused`] comes from the second round. This rank's own
    /// part of `outs` has its sum by then, and the rest is as it was.
    pub fn all_reduce(
        &mut self,
        tensors: &[TensorRef<'_>],
        outs: &mut [TensorMut<'_>],
        sum: Sum,
    ) -> Result<()> {
        self.reduce(Spread::All, tensors, outs, sum)
    }

    fn reduce(
        &mut self,
        spread: Spread,
        tensors: &[TensorRef<'_>],
        outs: &mut [TensorMut<'_>],
        sum: Sum,
    ) -> Result<()> {
        let checked = self.forms(tensors).and_then(|forms| self.check_sums(spread, &forms, outs));
        let pending = self.send_parts(spread, tensors, sum, checked)?;
        self.reduce_recv(pending, outs)
    }

    /// The first half of [`reduce_scatter`](Self::reduce_scatter) or [`all_reduce`](Self::all_reduce): sends the parts
    /// of the tensors, which may be changed afterwards.
    ///
    /// # Errors
    /// As there, for the tensors of this rank, and as [`all_gather_send`](Self::all_gather_send).
    pub fn reduce_send(
        &mut self,
        spread: Spread,
        tensors: &[TensorRef<'_>],
        sum: Sum,
    ) -> Result<PendingReduce> {
        self.send_parts(spread, tensors, sum, Ok(()))
    }

    /// The second half: waits for the parts of all ranks, and writes the sums. That of an all-reduce then waits for the
    /// sums of all ranks, so for their second halves: `deadline_ms` counts anew in these waits.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter). Outputs that cannot be written are an error here: the call has
    /// ended then, and its sums are lost here. The other ranks of an all-reduce get [`ErrorKind::Refused`], because
    /// this rank's part is lacking. In their outputs their own part has its sum by then, and the rest is as it was.
    pub fn reduce_recv(
        &mut self,
        pending: PendingReduce,
        outs: &mut [TensorMut<'_>],
    ) -> Result<()> {
        self.standing.check_open()?;
        let PendingReduce { identity, operation, spread, forms } = pending;
        self.check_own(&identity, operation)?;
        let checked = self.check_sums(spread, &forms, outs);
        self.receive(operation, spread, checked, outs)
    }

    /// The second half where this rank has no outputs for [`reduce_recv`](Self::reduce_recv), and why. For callers that
    /// read tensors before core can. Returns `why`, or the error that ended the call before.
    ///
    /// # Errors
    /// Always.
    pub fn reduce_lost(&mut self, pending: PendingReduce, why: Error) -> Result<()> {
        self.standing.check_open()?;
        let PendingReduce { identity, operation, spread, .. } = pending;
        self.check_own(&identity, operation)?;
        self.receive(operation, spread, Err(why), &[])
    }

    /// `checked`: whether the outputs can be written.
    fn receive(
        &mut self,
        operation: u64,
        spread: Spread,
        checked: Result<()>,
        outs: &[TensorMut<'_>],
    ) -> Result<()> {
        let sums: Vec<_> = match &checked {
            Ok(()) => outs.iter().map(|out| self.own_part(spread, out)).collect(),
            Err(_) => Vec::new(),
        };
        let summed = self.recv_parts(operation, &sums);
        let received = match spread {
            Spread::All if summed.is_ok() => {
                let checked = checked.as_ref().map(|()| outs);
                self.share(self.round(operation) + 1, &sums, checked)
            }
            _ => summed,
        };
        self.end(operation);
        if self.is_closed() { received } else { checked.and(received) }
    }

    /// Takes part in the call that the other ranks make now, which this rank was to make as well, as
    /// [`refuse_all_gather`](Self::refuse_all_gather).
    pub fn refuse_reduce(&mut self, spread: Spread, why: Error) -> Error {
        match self.send_parts(spread, &[], Sum::default(), Err(why)) {
            Err(error) => error,
            Ok(_) => Error::new(ErrorKind::Internal, "refuse reduce", "the call was sent"),
        }
    }

    /// `checked`: whether the caller may go on.
    fn send_parts(
        &mut self,
        spread: Spread,
        tensors: &[TensorRef<'_>],
        sum: Sum,
        checked: Result<()>,
    ) -> Result<PendingReduce> {
        self.standing.check_open()?;
        if !self.options.reduces {
            let text = "found a gather for all-gathers alone; expected one with reduces = true";
            return Err(Error::new(ErrorKind::InvalidInput, "start reduce", text)
                .with_fix("open the gather with reduces = true on all ranks"));
        }
        let operation = self.begin(spread.kind())?;
        let checked = checked.and_then(|()| self.check_tensors(tensors, sum));
        let refusal = checked.as_ref().map_or_else(reason, |_| String::new());
        let parts: Vec<_> = match &checked {
            Ok(_) => tensors.iter().map(TensorRef::raw).collect(),
            Err(_) => Vec::new(),
        };
        let reduce = abi::TyReduce {
            size: size_of::<abi::TyReduce>(),
            operation: self.round(operation),
            tensors: parts.as_ptr(),
            count: parts.len(),
            precision: sum.precision.code(),
            scale: sum.scale,
            refusal: abi::TyStr { data: refusal.as_ptr(), bytes: refusal.len() },
            flags: spread.flags(),
        };
        let in_call = InCall::new(&self.standing.recorder);
        // SAFETY: the tensors are borrowed for the call, and lie in memory that the kernel set works on: that was
        // checked.
        let sent = unsafe { self.user.kernels().reduce_send(&reduce) };
        drop(in_call);
        sent.map_err(|error| self.standing.fail(error))?;
        match checked {
            Ok(forms) => {
                let identity = Arc::clone(&self.identity);
                Ok(PendingReduce { identity, operation, spread, forms })
            }
            Err(why) => {
                let ended = self.recv_parts(operation, &[]);
                self.end(operation);
                if self.is_closed() { Err(ended.err().unwrap_or(why)) } else { Err(why) }
            }
        }
    }

    /// Waits for the parts of all ranks, and writes their sums.
    fn recv_parts(&mut self, operation: u64, sums: &[abi::TyTensor]) -> Result<()> {
        self.standing.recorder.0.track.receive(operation);
        let in_call = InCall::new(&self.standing.recorder);
        let mut reduce = abi::TyReduce {
            size: size_of::<abi::TyReduce>(),
            operation: self.round(operation),
            tensors: sums.as_ptr(),
            count: sums.len(),
            precision: 0,
            scale: 0.0,
            refusal: abi::TyStr { data: std::ptr::null(), bytes: 0 },
            flags: 0,
        };
        // SAFETY: the outputs are borrowed exclusively for the call, have room for the sums, and lie in memory that the
        // kernel set works on, as was checked.
        let received = unsafe { self.user.kernels().reduce_recv(&mut reduce) };
        drop(in_call);
        self.judge(received)
    }

    /// Gathers the sums of all ranks into the outputs, where `sums` are those of this rank. `outs`: or why they cannot
    /// be written; the others then learn that these sums are lacking.
    fn share(
        &mut self,
        round: u64,
        sums: &[abi::TyTensor],
        outs: std::result::Result<&[TensorMut<'_>], &Error>,
    ) -> Result<()> {
        let refusal = outs.map_or_else(reason, |_| String::new());
        let bytes = |sum: &abi::TyTensor| {
            let bytes = sum.shape[0] * DType::from_code(sum.dtype).map_or(0, DType::bytes) as u64;
            let data = if bytes == 0 { std::ptr::null_mut() } else { sum.data.cast() };
            abi::TyPart { data, bytes }
        };
        let parts: Vec<_> = sums.iter().map(bytes).collect();
        let outs = outs.unwrap_or_default().iter().map(|out| part(out.as_ref()));
        let outs: Vec<_> = outs.collect();
        self.submit(round, &parts, &refusal, None)?;
        self.finish(round, &outs, None)
    }

    /// The part of an output that this rank sums: all of it where ranks get parts.
    fn own_part(&self, spread: Spread, out: &TensorMut<'_>) -> abi::TyTensor {
        let (raw, ranks) = (out.raw(), u64::from(self.standing.world.ranks()));
        let all = raw.shape[0] * raw.shape[1];
        let (elements, first) = match spread {
            Spread::Scatter => (all, 0),
            Spread::All => (all / ranks, all / ranks * u64::from(self.rank())),
        };
        let bytes = DType::from_code(raw.dtype).map_or(0, DType::bytes) as u64;
        let data = raw.data.wrapping_add((first * bytes) as usize);
        abi::TyTensor { data, shape: [elements, 1], stride: [1, 1], ..raw }
    }

    /// Type and number of elements of each tensor.
    fn forms(&self, tensors: &[TensorRef<'_>]) -> Result<Vec<(DType, u64)>> {
        tensors.iter().map(|tensor| form("tensor", *tensor)).collect()
    }

    fn check_tensors(&self, tensors: &[TensorRef<'_>], sum: Sum) -> Result<Vec<(DType, u64)>> {
        let arguments = tensors.iter().map(|tensor| Argument::other("tensor", Some(*tensor)));
        check_memory(&arguments.collect::<Vec<_>>(), self.user.device)?;
        if !sum.scale.is_finite() {
            return Err(refuse(format!("scale: found {}; expected a finite number", sum.scale)));
        }
        let (forms, ranks) = (self.forms(tensors)?, u64::from(self.standing.world.ranks()));
        for (_, elements) in &forms {
            if elements % ranks != 0 {
                return Err(refuse(format!(
                    "tensor: found {elements} elements; expected a multiple of the {ranks} ranks"
                )));
            }
        }
        let bytes = |(dtype, elements): &(DType, u64)| elements / ranks * dtype.bytes() as u64;
        let (found, most) = (forms.iter().map(bytes).sum::<u64>(), self.options.max_bytes);
        if found <= most {
            return Ok(forms);
        }
        Err(refuse(format!(
            "tensors: found {found} bytes for each rank; expected at most {most} (max_bytes)"
        )))
    }

    fn check_sums(
        &self,
        spread: Spread,
        forms: &[(DType, u64)],
        outs: &[TensorMut<'_>],
    ) -> Result<()> {
        let arguments = outs.iter().map(|out| Argument::other("out", Some(out.as_ref())));
        check_memory(&arguments.collect::<Vec<_>>(), self.user.device)?;
        if forms.len() != outs.len() {
            let (found, expected) = (outs.len(), forms.len());
            return Err(refuse(format!("outs: found {found}; expected {expected}, one a tensor")));
        }
        let parts = match spread {
            Spread::Scatter => u64::from(self.standing.world.ranks()),
            Spread::All => 1,
        };
        for (out, (dtype, elements)) in outs.iter().zip(forms) {
            let (found, expected) = (form("out", out.as_ref())?, (*dtype, elements / parts));
            if found != expected {
                return Err(refuse(format!(
                    "out: found {} elements of {}; expected {} of {dtype}",
                    found.1, found.0, expected.1
                )));
            }
        }
        Ok(())
    }
}

/// The type and the number of elements of a tensor that can be summed.
fn form(name: &str, tensor: TensorRef<'_>) -> Result<(DType, u64)> {
    contiguous_bytes(name, tensor)?;
    let elements = tensor.rows() as u64 * tensor.cols() as u64;
    match tensor.dtype() {
        Some(dtype @ (DType::Bf16 | DType::F32)) => Ok((dtype, elements)),
        other => {
            let found = other.map_or("an unknown type".to_owned(), |dtype| dtype.to_string());
            Err(refuse(format!("{name}: found {found}; expected bf16 or fp32")))
        }
    }
}

fn refuse(text: String) -> Error {
    Error::new(ErrorKind::InvalidInput, "check arguments", text).with_fix(
        "pass contiguous tensors of bf16 or fp32, whose elements the ranks divide, and outputs of the same types",
    )
}
