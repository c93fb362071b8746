//! A pipe: messages between pairs of ranks, such as the activations of one pipeline stage for the next.
//!
//! A message is the bytes of one tensor. Messages from one rank to another arrive in the order in which they were sent.
//! A send returns once its tensor may be changed. It waits while [`PipeOptions::in_flight`] messages to that rank are
//! not taken, so two ranks that send more to each other before either receives wait until `late_ms`.
//!
//! Only the two ranks of a message take part, so ranks may call in any order. A tensor that cannot be sent or received
//! is an error on both: on the other rank it is [`ErrorKind::Refused`] or [`ErrorKind::Mismatch`], for a sender at the
//! send to that rank that needs the slot again, or at [`Pipe::flush`]. The pipe goes on after these. Any other error
//! closes it.
//!
//! One thread uses a pipe at a time. Each rank takes window memory for `ranks * in_flight` messages, and for as many
//! again where the transport cannot store to peers.

use std::sync::Arc;
use std::time::Duration;

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
const NAMES: &[&str] = &["message"];

/// The side of a message that this rank is.
#[derive(Clone, Copy)]
enum Side {
    Send,
    Recv,
}

/// A caller's options for a pipe; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipeOptions {
    /// Most bytes of a message, 1 to 2^40.
    pub max_bytes: u64,
    /// Messages from one rank to another that may be sent and not yet received, 1 to 16.
    pub in_flight: u32,
}

impl PipeOptions {
    /// Options with 4 messages in flight.
    pub fn new(max_bytes: u64) -> Self {
        Self { max_bytes, in_flight: 4 }
    }

    pub(super) fn spec(self, ranks: u32) -> Result<UserSpec> {
        let Self { max_bytes, in_flight } = self;
        super::check_range("open pipe", "max_bytes", max_bytes, super::MOST_BYTES)?;
        super::check_range("open pipe", "in_flight", in_flight.into(), 16)?;
        let shape = KernelShape {
            in_flight,
            runs: abi::TY_RUNS_PIPE,
            message_bytes: max_bytes,
            ..super::no_shape(ranks)
        };
        let numbers = [("max_bytes", max_bytes), ("in_flight", in_flight.into())];
        Ok(UserSpec {
            name: "pipe",
            shape,
            capability: abi::TY_KERNELS_CAP_PIPE,
            operations: NAMES,
            agreement: super::agreement(numbers),
        })
    }
}

/// See the [module](self).
pub struct Pipe {
    standing: Standing,
    user: User,
    options: PipeOptions,
    report: BringUpReport,
    /// Calls so far, of this rank alone.
    calls: u64,
    /// Dropped last: the goodbye to the other ranks comes behind the end of the transports.
    _world: Arc<World>,
}

super::user_of_a_session!(Pipe, PipeOptions);

impl Pipe {
    /// The pipe of a user that was opened.
    pub(super) fn made(opened: OpenedUser, options: PipeOptions) -> Self {
        let OpenedUser { user, standing, report, .. } = opened;
        let _world = Arc::clone(&standing.world);
        Self { standing, user, options, report, calls: 0, _world }
    }

    /// The total time that calls have waited for each rank, by rank.
    pub fn waited(&self) -> Vec<Duration> {
        let watched = self.user.watchdog().watched();
        (0..self.standing.world.ranks()).map(|rank| watched.waited(rank)).collect()
    }

    /// Sends a contiguous tensor to a rank. It may be changed afterwards.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a tensor that cannot be sent, or a rank that is this one or none; where the
    /// rank is another one, it learns of the refusal as this message. [`ErrorKind::Refused`] and
    /// [`ErrorKind::Mismatch`]: an earlier message was not taken as it was sent, and nothing is sent now.
    /// [`ErrorKind::Unsupported`]: no link leads to that rank.
    pub fn send(&mut self, tensor: TensorRef<'_>, to: u32) -> Result<()> {
        self.pass(Side::Send, tensor, to)
    }

    /// Waits for the next message of a rank, and writes it to a contiguous tensor of its length.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] as for [`send`](Self::send); the message is dropped then.
    /// [`ErrorKind::Refused`]: the sender's tensor was refused. [`ErrorKind::Mismatch`]: the message has another
    /// length, and is dropped.
    pub fn recv(&mut self, tensor: TensorMut<'_>, from: u32) -> Result<()> {
        self.pass(Side::Recv, tensor.as_ref(), from)
    }

    /// Waits until all messages of this rank are taken.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] and [`ErrorKind::Mismatch`]: one of them was not taken as it was sent. Each is reported
    /// once: call again.
    pub fn flush(&mut self) -> Result<()> {
        self.standing.check_open()?;
        self.standing.recorder.0.track.pass(self.calls, 0, false);
        let in_call = InCall::new(&self.standing.recorder);
        let flushed = self.user.kernels().flush();
        drop(in_call);
        flushed.map_err(|error| self.ended(error))
    }

    /// Closes the pipe on all ranks together, once all messages are taken. Collective.
    ///
    /// # Errors
    /// As [`flush`](Self::flush), and then the other ranks learn that this one did not close its pipe; a lost rank.
    pub fn close(mut self) -> Result<()> {
        match self.flush() {
            Ok(()) => self.standing.world.barrier("close pipe"),
            Err(error) if self.is_closed() => Err(error),
            Err(error) => Err(self.standing.end(error)),
        }
    }

    /// Takes part in the message that a rank expects, with a refusal, where this rank has no tensor to
    /// [`send`](Self::send). For callers that read tensors before core can. Returns `why`, or the error that ended the
    /// call before.
    pub fn refuse_send(&mut self, to: u32, why: Error) -> Error {
        self.refuse(Side::Send, to, why)
    }

    /// As [`refuse_send`](Self::refuse_send), for the next message of a rank. It waits for that, and drops it.
    pub fn refuse_recv(&mut self, from: u32, why: Error) -> Error {
        self.refuse(Side::Recv, from, why)
    }

    /// Closes the pipe on this rank, where its caller passes no more messages that other ranks wait for. They learn
    /// why. Returns `why`, with the report on it.
    pub fn fail(&mut self, why: Error) -> Error {
        self.standing.end(why)
    }

    fn pass(&mut self, side: Side, tensor: TensorRef<'_>, peer: u32) -> Result<()> {
        match self.check(tensor) {
            Ok(bytes) => self.take_part(side, peer, Ok((tensor, bytes))),
            Err(why) => Err(self.refuse(side, peer, why)),
        }
    }

    /// An error of the call goes first: the other rank did not learn of the refusal then.
    #[cold]
    fn refuse(&mut self, side: Side, peer: u32, why: Error) -> Error {
        self.take_part(side, peer, Err(&super::reason(&why))).err().unwrap_or(why)
    }

    /// `given`: a tensor that [`check`](Self::check) has passed, with its bytes; or why there is none.
    fn take_part(
        &mut self,
        side: Side,
        peer: u32,
        given: Result<(TensorRef<'_>, u64), &str>,
    ) -> Result<()> {
        self.standing.check_open()?;
        self.check_peer(peer)?;
        self.standing.recorder.0.track.pass(self.calls, 0, matches!(side, Side::Recv));
        self.calls += 1;
        let _in_call = InCall::new(&self.standing.recorder);
        let (data, bytes, refusal) = match given {
            Ok((tensor, bytes)) if bytes > 0 => (tensor.raw().data.cast(), bytes, ""),
            Ok(_) => (std::ptr::null_mut(), 0, ""),
            Err(why) => (std::ptr::null_mut(), 0, why),
        };
        let message = abi::TyMessage {
            size: size_of::<abi::TyMessage>(),
            data,
            bytes,
            peer,
            reserved: 0,
            refusal: abi::TyStr { data: refusal.as_ptr(), bytes: refusal.len() },
        };
        // SAFETY: the tensor is borrowed for the call, exclusively where it is written; it has so many bytes, of the
        // memory that the kernel set works on, as was checked.
        let passed = unsafe {
            match side {
                Side::Send => self.user.kernels().send(&message),
                Side::Recv => self.user.kernels().recv(&message),
            }
        };
        passed.map_err(|error| self.ended(error))
    }

    fn check_peer(&self, peer: u32) -> Result<()> {
        let ranks = self.standing.world.ranks();
        if peer < ranks && peer != self.rank() {
            return Ok(());
        }
        let text = format!("found rank {peer}; expected another rank than this one, below {ranks}");
        Err(Error::new(ErrorKind::InvalidInput, "pass message", text)
            .with_fix("name a rank of the world that the pipe was opened on"))
    }

    /// The length of a tensor that may be passed.
    fn check(&self, tensor: TensorRef<'_>) -> Result<u64> {
        check_memory(&[Argument::other("tensor", Some(tensor))], self.user.device)?;
        let (bytes, most) = (super::contiguous_bytes("tensor", tensor)?, self.options.max_bytes);
        if bytes <= most {
            return Ok(bytes);
        }
        let text = format!("tensor: found {bytes} bytes; expected at most {most}");
        Err(Error::new(ErrorKind::InvalidInput, "check arguments", text)
            .with_fix("open the pipe with a larger max_bytes, or send the tensor in parts"))
    }

    /// Decides whether the pipe survives a failed call.
    #[cold]
    fn ended(&mut self, error: Error) -> Error {
        match error.kind() {
            ErrorKind::Refused | ErrorKind::Mismatch | ErrorKind::Unsupported => error,
            _ => self.standing.fail(error),
        }
    }
}
