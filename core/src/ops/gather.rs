//! All-gather: each rank gets the shards of all ranks. [`reduce`] has the sums: reduce-scatter and all-reduce.
//!
//! A shard is the bytes of one tensor. A call takes several, so that small ones share a round. All ranks make the same
//! calls, with as many shards of the same lengths. Calls and halves come in any order which all ranks share. Where a
//! rank's input is refused, or lengths or calls differ, the call is an error on all ranks, and the gather goes on. Any
//! other error closes it.
//!
//! One thread uses a gather at a time. Each rank takes window memory for `in_flight * ranks` times `max_bytes` and a
//! record of 256 bytes, and two to four times as much where it reduces: `docs/pipes.md` has the sizes.

pub mod reduce;

use std::sync::Arc;

use crate::abi;
use crate::bootstrap::World;
use crate::communicator::memory::{Argument, check_memory};
use crate::communicator::{BringUpReport, Stream, TensorMut, TensorRef};
use crate::kernels::KernelShape;
use crate::session::opening::{OpenedUser, UserSpec};
use crate::session::reporter::InCall;
use crate::session::standing::Standing;
use crate::session::user::User;
use crate::{Error, ErrorKind, Result};

/// The names of the operations.
const NAMES: &[&str] = &["all-gather"];
const REDUCING: &[&str] = &["all-gather", "reduce-scatter", "all-reduce"];
/// The place of an all-gather among them.
const ALL_GATHER: usize = 0;

/// A caller's options for a gather; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherOptions {
    /// Most bytes of a rank's shards in one call, 1 to 2^40.
    pub max_bytes: u64,
    /// Calls that may be sent and not yet received, 1 to 32.
    pub in_flight: u32,
    /// Whether it takes reduce-scatters and all-reduces, too.
    pub reduces: bool,
}

impl GatherOptions {
    /// Options with 2 calls in flight, for all-gathers alone.
    pub fn new(max_bytes: u64) -> Self {
        Self { max_bytes, in_flight: 2, reduces: false }
    }

    /// Rounds of a call, each with a slot of its own: an all-reduce is a reduce-scatter and a gather of the sums.
    fn rounds(self) -> u32 {
        if self.reduces { 2 } else { 1 }
    }

    pub(super) fn spec(self, ranks: u32) -> Result<UserSpec> {
        let Self { max_bytes, in_flight, reduces } = self;
        super::check_range("open gather", "max_bytes", max_bytes, super::MOST_BYTES)?;
        super::check_range("open gather", "in_flight", in_flight.into(), 32)?;
        let (runs, capability, operations) = match reduces {
            false => (abi::TY_RUNS_GATHER, abi::TY_KERNELS_CAP_GATHER, NAMES),
            true => (
                abi::TY_RUNS_REDUCE,
                abi::TY_KERNELS_CAP_GATHER | abi::TY_KERNELS_CAP_REDUCE,
                REDUCING,
            ),
        };
        let in_flight_rounds = in_flight * self.rounds();
        let no_shape = super::no_shape(ranks);
        Ok(UserSpec {
            name: if reduces { "gather with reduces = true" } else { "gather" },
            shape: KernelShape {
                in_flight: in_flight_rounds,
                runs,
                message_bytes: max_bytes,
                ..no_shape
            },
            capability,
            operations,
            agreement: super::agreement([
                ("max_bytes", max_bytes),
                ("in_flight", in_flight.into()),
                ("reduces", reduces.into()),
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
    stream: Option<Stream>,
}

/// A gather whose calls are in the order of a stream. See [`Gather::on`].
#[derive(Debug)]
pub struct GatherOnStream<'y> {
    gather: &'y mut Gather,
    stream: Stream,
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

    /// This gather, with calls in the order of a stream of its [`device`](Self::device): shards are read behind the
    /// work that is queued there, and outputs are written before work that is queued there later. The call does not
    /// wait for either. [`Stream::new`] says how long tensors must live.
    pub fn on(&mut self, stream: Stream) -> GatherOnStream<'_> {
        GatherOnStream { gather: self, stream }
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
        self.gather(shards, outs, None)
    }

    fn gather(
        &mut self,
        shards: &[TensorRef<'_>],
        outs: &mut [TensorMut<'_>],
        stream: Option<Stream>,
    ) -> Result<()> {
        let checked = self.lengths(shards).and_then(|lengths| self.check_outs(&lengths, outs));
        let pending = self.send(shards, checked, stream)?;
        self.all_gather_recv(pending, outs)
    }

    /// The first half of [`all_gather`](Self::all_gather): sends the shards, which may be changed afterwards.
    ///
    /// # Errors
    /// As there, for the shards of this rank. [`ErrorKind::InvalidInput`] on this rank alone where `in_flight` calls
    /// are not received: all ranks make the same calls, so all get it.
    pub fn all_gather_send(&mut self, shards: &[TensorRef<'_>]) -> Result<PendingGather> {
        self.send(shards, Ok(()), None)
    }

    /// The second half: waits for the shards of all ranks, and writes them. In the order of the stream of the first
    /// half, where that had one.
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
        let PendingGather { identity, operation, lengths, stream } = pending;
        self.check_own(&identity, operation)?;
        let checked = self.check_outs(&lengths, outs);
        let parts: Vec<_> = match &checked {
            Ok(()) => outs.iter().map(|out| super::part(out.as_ref())).collect(),
            Err(_) => Vec::new(),
        };
        let received = self.recv(operation, &parts, stream);
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
    fn send(
        &mut self,
        shards: &[TensorRef<'_>],
        checked: Result<()>,
        stream: Option<Stream>,
    ) -> Result<PendingGather> {
        self.standing.check_open()?;
        let operation = self.begin(ALL_GATHER)?;
        let taken = self.check_stream(stream);
        let stream = stream.filter(|_| taken.is_ok());
        let checked = taken.and(checked).and_then(|()| self.check_shards(shards));
        let refusal = checked.as_ref().map_or_else(super::reason, |_| String::new());
        let parts: Vec<_> = match &checked {
            Ok(_) => shards.iter().map(|shard| super::part(*shard)).collect(),
            Err(_) => Vec::new(),
        };
        self.submit(self.round(operation), &parts, &refusal, stream)?;
        match checked {
            Ok(lengths) => {
                let identity = Arc::clone(&self.identity);
                Ok(PendingGather { identity, operation, lengths, stream })
            }
            Err(why) => match self.recv(operation, &[], stream) {
                Err(error) if self.is_closed() => Err(error),
                _ => Err(why),
            },
        }
    }

    /// `kind`: the place of the operation's name.
    fn begin(&mut self, kind: usize) -> Result<u64> {
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
        self.standing.recorder.0.track.send(operation, kind);
        Ok(operation)
    }

    fn recv(
        &mut self,
        operation: u64,
        parts: &[abi::TyPart],
        stream: Option<Stream>,
    ) -> Result<()> {
        self.standing.recorder.0.track.receive(operation);
        let received = self.finish(self.round(operation), parts, stream);
        self.end(operation);
        received
    }

    /// The number of the first round of a call: the kernel set counts rounds.
    fn round(&self, operation: u64) -> u64 {
        operation * u64::from(self.options.rounds())
    }

    /// Gives the slot of a call back.
    fn end(&mut self, operation: u64) {
        self.open_slots &= !(1 << (operation % u64::from(self.options.in_flight)));
    }

    /// Sends shards, or a refusal, in a round.
    fn submit(
        &mut self,
        round: u64,
        parts: &[abi::TyPart],
        refusal: &str,
        stream: Option<Stream>,
    ) -> Result<()> {
        let gather = abi::TyGather {
            size: size_of::<abi::TyGather>(),
            operation: round,
            parts: parts.as_ptr(),
            count: parts.len(),
            refusal: abi::TyStr { data: refusal.as_ptr(), bytes: refusal.len() },
            flags: flags(stream),
            stream: stream.map_or(std::ptr::null_mut(), Stream::raw),
        };
        let in_call = InCall::new(&self.standing.recorder);
        // SAFETY: the shards are borrowed for the call, and lie in memory that the kernel set works on, as was checked.
        let sent = unsafe { self.user.kernels().gather_send(&gather) };
        drop(in_call);
        sent.map_err(|error| self.standing.fail(error))
    }

    /// Waits for the shards of a round, and writes them.
    fn finish(&mut self, round: u64, parts: &[abi::TyPart], stream: Option<Stream>) -> Result<()> {
        let in_call = InCall::new(&self.standing.recorder);
        let mut gather = abi::TyGather {
            size: size_of::<abi::TyGather>(),
            operation: round,
            parts: parts.as_ptr(),
            count: parts.len(),
            refusal: abi::TyStr { data: std::ptr::null(), bytes: 0 },
            flags: flags(stream),
            stream: stream.map_or(std::ptr::null_mut(), Stream::raw),
        };
        // SAFETY: the outputs are borrowed exclusively for the call, have room for the shards of all ranks, and lie in
        // memory that the kernel set works on, as was checked.
        let received = unsafe { self.user.kernels().gather_recv(&mut gather) };
        drop(in_call);
        self.judge(received)
    }

    /// Closes the gather unless the call ended on all ranks alike, or here with outputs that cannot be written.
    fn judge(&mut self, received: Result<()>) -> Result<()> {
        received.map_err(|error| match error.kind() {
            ErrorKind::Refused | ErrorKind::Mismatch | ErrorKind::InvalidInput => error,
            _ => self.standing.fail(error),
        })
    }

    fn check_stream(&self, stream: Option<Stream>) -> Result<()> {
        if stream.is_none() || self.user.takes(abi::TY_KERNELS_CAP_STREAMS) {
            return Ok(());
        }
        let text = "stream: found one; expected none, because the kernel set has no streams";
        Err(Error::new(ErrorKind::InvalidInput, "check arguments", text)
            .with_fix("call the gather itself, or use a kernel set of a device"))
    }

    /// Whether a call was sent by this gather.
    fn check_own(&self, identity: &Arc<()>, operation: u64) -> Result<()> {
        if Arc::ptr_eq(identity, &self.identity) {
            return Ok(());
        }
        let text = format!("call {operation} was sent by another gather");
        Err(Error::new(ErrorKind::InvalidInput, "receive gather", text)
            .with_fix("receive it on the gather that sent it"))
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
        match self.send(&[], Err(why), None) {
            Err(error) => error,
            Ok(_) => Error::new(ErrorKind::Internal, "refuse gather", "the call was sent"),
        }
    }
}

impl GatherOnStream<'_> {
    /// As [`Gather::all_gather`].
    ///
    /// # Errors
    /// As there. [`ErrorKind::InvalidInput`] where the kernel set has no streams, [`ErrorKind::Refused`] on the other
    /// ranks.
    pub fn all_gather(self, shards: &[TensorRef<'_>], outs: &mut [TensorMut<'_>]) -> Result<()> {
        self.gather.gather(shards, outs, Some(self.stream))
    }

    /// As [`Gather::all_gather_send`]. The second half is in the order of this stream, too.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_gather_send(self, shards: &[TensorRef<'_>]) -> Result<PendingGather> {
        self.gather.send(shards, Ok(()), Some(self.stream))
    }
}

/// Bits `TY_GATHER_*`.
fn flags(stream: Option<Stream>) -> u64 {
    stream.map_or(0, |_| abi::TY_GATHER_ON_STREAM)
}

fn refuse(text: String) -> Error {
    Error::new(ErrorKind::InvalidInput, "check arguments", text).with_fix(
        "pass shards of at most max_bytes in all, and for each an output for those of all ranks",
    )
}
