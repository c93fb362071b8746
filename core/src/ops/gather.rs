//! All-gather: each rank gets the shards of all ranks.
//!
//! A shard is the bytes of one tensor. A call takes several, so that small ones share a round. All ranks make the same
//! calls, and their halves, in the same order, with as many shards of the same lengths. Where a rank's input is
//! refused, or lengths differ, the call is an error on all ranks, and the gather goes on. Any other error closes it.
//!
//! One thread uses a gather at a time. Each rank takes window memory for `in_flight * ranks` times `max_bytes` and a
//! record of 256 bytes.

use std::sync::Arc;

use crate::abi;
use crate::bootstrap::World;
use crate::communicator::memory::{Argument, check_memory};
use crate::communicator::{BringUpReport, TensorMut, TensorRef};
use crate::kernels::KernelShape;
use crate::session::opening::{OpenedUser, UserSpec};
use crate::session::reporter::InCall;
use crate::session::standing::Standing;
use crate::session::user::User;
use crate::{Error, ErrorKind, Result};

/// The names of the operations.
const NAMES: &[&str] = &["all-gather"];

/// A caller's options for a gather; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherOptions {
    /// Most bytes of a rank's shards in one call, 1 to 2^40.
    pub max_bytes: u64,
    /// Calls that may be sent and not yet received, 1 to 32.
    pub in_flight: u32,
}

impl GatherOptions {
    /// Options with 2 calls in flight.
    pub fn new(max_bytes: u64) -> Self {
        Self { max_bytes, in_flight: 2 }
    }

    pub(super) fn spec(self, ranks: u32) -> Result<UserSpec> {
        let Self { max_bytes, in_flight } = self;
        super::check_range("open gather", "max_bytes", max_bytes, super::MOST_BYTES)?;
        super::check_range("open gather", "in_flight", in_flight.into(), 32)?;
        let shape = KernelShape {
            in_flight,
            runs: abi::TY_RUNS_GATHER,
            message_bytes: max_bytes,
            ..super::no_shape(ranks)
        };
        Ok(UserSpec {
            name: "gather",
            shape,
            capability: abi::TY_KERNELS_CAP_GATHER,
            operations: NAMES,
            agreement: super::agreement([
                ("max_bytes", max_bytes),
                ("in_flight", in_flight.into()),
            ]),
        })
    }
}

/// See the [module](self).
pub struct Gather {
    standing: Standing,
    user: User,
    options: GatherOptions,
    report: BringUpReport,
    next_operation: u64,
    /// Slots (operation number modulo `in_flight`) whose call was sent and not received: one bit each.
    open_slots: u32,
    /// Its address names this gather.
    identity: Arc<()>,
    /// Dropped last: the goodbye to the other ranks comes behind the end of the transports.
    _world: Arc<World>,
}

/// A call that was sent. Finish it with [`Gather::all_gather_recv`]: a call that is dropped holds its slot for ever.
#[derive(Debug)]
#[must_use = "a call that is never received leaves the other ranks waiting"]
pub struct PendingGather {
    /// The identity of its gather.
    identity: Arc<()>,
    operation: u64,
    /// Bytes of each shard.
    lengths: Vec<u64>,
}

super::user_of_a_session!(Gather, GatherOptions);

impl Gather {
    /// The gather of a user that was opened.
    pub(super) fn made(opened: OpenedUser, options: GatherOptions) -> Self {
        let OpenedUser { user, standing, report, .. } = opened;
        let _world = Arc::clone(&standing.world);
        let identity = Arc::default();
        Self { standing, user, options, report, next_operation: 0, open_slots: 0, identity, _world }
    }

    /// Gives each rank the shards of all ranks: `outs[i]` is contiguous, and gets `shards[i]` of rank 0, then that of
    /// rank 1, and so on. Collective.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for tensors that cannot be gathered, [`ErrorKind::Refused`] on the other ranks.
    /// [`ErrorKind::Mismatch`] on all ranks where lengths differ. Nothing is written then.
    pub fn all_gather(
        &mut self,
        shards: &[TensorRef<'_>],
        outs: &mut [TensorMut<'_>],
    ) -> Result<()> {
        let checked = self.lengths(shards).and_then(|lengths| self.check_outs(&lengths, outs));
        let pending = self.send(shards, checked)?;
        self.all_gather_recv(pending, outs)
    }

    /// The first half of [`all_gather`](Self::all_gather): sends the shards, which may be changed afterwards.
    ///
    /// # Errors
    /// As there, for the shards of this rank. [`ErrorKind::InvalidInput`] on this rank alone where `in_flight` calls
    /// are not received: all ranks make the same calls, so all get it.
    pub fn all_gather_send(&mut self, shards: &[TensorRef<'_>]) -> Result<PendingGather> {
        self.send(shards, Ok(()))
    }

    /// The second half: waits for the shards of all ranks, and writes them.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather). Outputs that cannot be written are an error on this rank alone: the call
    /// has ended then, and its shards are lost here.
    pub fn all_gather_recv(
        &mut self,
        pending: PendingGather,
        outs: &mut [TensorMut<'_>],
    ) -> Result<()> {
        self.standing.check_open()?;
        let PendingGather { identity, operation, lengths } = pending;
        if !Arc::ptr_eq(&identity, &self.identity) {
            let text = format!("call {operation} was sent by another gather");
            return Err(Error::new(ErrorKind::InvalidInput, "receive gather", text)
                .with_fix("receive it on the gather that sent it"));
        }
        let checked = self.check_outs(&lengths, outs);
        let parts: Vec<_> = match &checked {
            Ok(()) => outs.iter().map(|out| super::part(out.as_ref())).collect(),
            Err(_) => Vec::new(),
        };
        let received = self.recv(operation, &parts);
        if self.is_closed() { received } else { checked.and(received) }
    }

    /// Closes the gather on all ranks together. Collective.
    ///
    /// # Errors
    /// A call that was sent and not received; a lost rank.
    pub fn close(mut self) -> Result<()> {
        self.standing.check_open()?;
        if self.open_slots != 0 {
            let text = "a call was sent and not received; expected none";
            let error = Error::new(ErrorKind::InvalidInput, "close gather", text)
                .with_fix("receive every call before the gather is closed");
            return Err(self.standing.end(error));
        }
        let flushed = self.user.kernels().flush();
        flushed.map_err(|error| self.standing.fail(error))?;
        self.standing.world.barrier("close gather")
    }

    /// `checked`: whether the caller may go on.
    fn send(&mut self, shards: &[TensorRef<'_>], checked: Result<()>) -> Result<PendingGather> {
        self.standing.check_open()?;
        let operation = self.begin()?;
        let checked = checked.and_then(|()| self.check_shards(shards));
        let refusal = checked.as_ref().map_or_else(super::reason, |_| String::new());
        let parts: Vec<_> = match &checked {
            Ok(_) => shards.iter().map(|shard| super::part(*shard)).collect(),
            Err(_) => Vec::new(),
        };
        let gather = abi::TyGather {
            size: size_of::<abi::TyGather>(),
            operation,
            parts: parts.as_ptr(),
            count: parts.len(),
            refusal: abi::TyStr { data: refusal.as_ptr(), bytes: refusal.len() },
        };
        let in_call = InCall::new(&self.standing.recorder);
        // SAFETY: the shards are borrowed for the call, and lie in memory that the kernel set works on, as was checked.
        let sent = unsafe { self.user.kernels().gather_send(&gather) };
        drop(in_call);
        sent.map_err(|error| self.standing.fail(error))?;
        match checked {
            Ok(lengths) => {
                let identity = Arc::clone(&self.identity);
                Ok(PendingGather { identity, operation, lengths })
            }
            Err(why) => match self.recv(operation, &[]) {
                Err(error) if self.is_closed() => Err(error),
                _ => Err(why),
            },
        }
    }

    fn begin(&mut self) -> Result<u64> {
        let (operation, in_flight) = (self.next_operation, u64::from(self.options.in_flight));
        let bit = 1 << (operation % in_flight);
        if self.open_slots & bit != 0 {
            let text = format!(
                "call {} was sent and not received; expected that before call {operation}, because in_flight = \
                 {in_flight}",
                operation - in_flight
            );
            return Err(Error::new(ErrorKind::InvalidInput, "start gather", text)
                .with_fix("receive each call; or open the gather with a larger in_flight"));
        }
        self.next_operation += 1;
        self.user.watchdog().begin(self.next_operation);
        self.open_slots |= bit;
        self.standing.recorder.0.track.send(operation, 0);
        Ok(operation)
    }

    fn recv(&mut self, operation: u64, parts: &[abi::TyPart]) -> Result<()> {
        self.standing.recorder.0.track.receive(operation);
        let in_call = InCall::new(&self.standing.recorder);
        let mut gather = abi::TyGather {
            size: size_of::<abi::TyGather>(),
            operation,
            parts: parts.as_ptr(),
            count: parts.len(),
            refusal: abi::TyStr { data: std::ptr::null(), bytes: 0 },
        };
        // SAFETY: the outputs are borrowed exclusively for the call, have room for the shards of all ranks, and lie in
        // memory that the kernel set works on, as was checked.
        let received = unsafe { self.user.kernels().gather_recv(&mut gather) };
        drop(in_call);
        self.open_slots &= !(1 << (operation % u64::from(self.options.in_flight)));
        received.map_err(|error| match error.kind() {
            ErrorKind::Refused | ErrorKind::Mismatch => error,
            _ => self.standing.fail(error),
        })
    }

    /// Bytes of each shard.
    fn lengths(&self, shards: &[TensorRef<'_>]) -> Result<Vec<u64>> {
        shards.iter().map(|shard| super::contiguous_bytes("shard", *shard)).collect()
    }

    fn check_shards(&self, shards: &[TensorRef<'_>]) -> Result<Vec<u64>> {
        let arguments = shards.iter().map(|shard| Argument::other("shard", Some(*shard)));
        check_memory(&arguments.collect::<Vec<_>>(), self.user.device)?;
        let lengths = self.lengths(shards)?;
        let (bytes, most) = (lengths.iter().sum::<u64>(), self.options.max_bytes);
        if bytes <= most {
            return Ok(lengths);
        }
        Err(refuse(format!("shards: found {bytes} bytes; expected at most {most}")))
    }

    fn check_outs(&self, lengths: &[u64], outs: &[TensorMut<'_>]) -> Result<()> {
        let arguments = outs.iter().map(|out| Argument::other("out", Some(out.as_ref())));
        check_memory(&arguments.collect::<Vec<_>>(), self.user.device)?;
        if lengths.len() != outs.len() {
            let (found, expected) = (outs.len(), lengths.len());
            return Err(refuse(format!("outs: found {found}; expected {expected}, one a shard")));
        }
        let ranks = u64::from(self.standing.world.ranks());
        for (out, shard) in outs.iter().zip(lengths) {
            let (found, expected) = (super::contiguous_bytes("out", out.as_ref())?, ranks * shard);
            if found != expected {
                return Err(refuse(format!(
                    "out: found {found} bytes; expected {expected}, the shard of {ranks} ranks"
                )));
            }
        }
        Ok(())
    }

    /// Takes part in the call that the other ranks make now, with a refusal, where this rank has no tensors for
    /// [`all_gather`](Self::all_gather) or its first half. For callers that read tensors before core can. Returns
    /// `why`, or the error that ended the call before.
    pub fn refuse_all_gather(&mut self, why: Error) -> Error {
        match self.send(&[], Err(why)) {
            Err(error) => error,
            Ok(_) => Error::new(ErrorKind::Internal, "refuse gather", "the call was sent"),
        }
    }
}

fn refuse(text: String) -> Error {
    Error::new(ErrorKind::InvalidInput, "check arguments", text).with_fix(
        "pass shards of at most max_bytes in all, and for each an output for those of all ranks",
    )
}
