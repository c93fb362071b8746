//! Executes commands on a rail.

use std::fmt;

use tokenyard_core::abi;
use tokenyard_core::transport::Command;

use super::datum::{Datum, Mailbox};
use super::instance::{Instance, STAGING_REGION, window_region};
use super::queue::Own;
use super::rail::{Attempt, State, Transfer};
use super::shared::{Failure, LocalWindow, RECORD_STRIDE, Record};

/// The reason why a command could not be posted. It is small, because the hot path returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Op,
    Peer,
    Window,
    Signal,
    NoGet,
    GivenUp,
    Fabric(i32),
}

/// The outcome of posting a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// It is in flight: its completion will come.
    UnderWay,
    Done,
    /// It is not accepted now.
    Full,
}

/// A command to post.
struct Job<'a> {
    command: &'a Command,
    slot: u32,
    /// Whether another write follows at once.
    more: bool,
}

impl Instance {
    /// Posts the first n of `batch` on one rail and returns n.
    ///
    /// # Safety
    /// Core's guarantees of the transport contract hold: ranges are inside the windows, sources
    /// stay until their command is done.
    pub(super) unsafe fn post_batch(
        &self,
        own: &mut Own,
        state: &mut State,
        batch: &[Command],
    ) -> usize {
        for (index, command) in batch.iter().enumerate() {
            let Some(slot) = own.take(&self.shared.slots, command) else { return index };
            let next = batch.get(index + 1).filter(|next| !own.waits_for(next.peer));
            let more = own.has_room()
                && state.outbound.may_hold_back()
                && next.is_some_and(|next| self.follows(next, command));
            let job = Job { command, slot, more };
            // SAFETY: by this function's contract.
            let taken = !own.waits_for(command.peer) && unsafe { self.start(own, state, &job) };
            if !taken && !own.defer(slot, command) {
                own.give_back(slot);
                return index;
            }
        }
        batch.len()
    }

    /// Retries up to this many commands that wait for their peers: for each peer until it refuses
    /// one.
    pub(super) fn retry(&self, own: &mut Own, state: &mut State, most: usize) {
        let mut refusals = 0;
        for _ in 0..most {
            let Some(backlog) = own.backlog().filter(|backlog| refusals < backlog.peers()) else {
                return;
            };
            let Some((place, command)) = backlog.first() else { return };
            let job = Job { command: &command, slot: own.slot(place), more: false };
            // SAFETY: `post` has accepted the command, and its contract holds until the command ends.
            let taken = unsafe { self.start(own, state, &job) };
            let Some(backlog) = own.backlog() else { return };
            if taken {
                backlog.pop();
            } else {
                backlog.pass();
                refusals += 1;
            }
        }
    }

    /// Posts a command to the provider, or ends it; `false` if its peer accepts nothing now.
    ///
    /// # Safety
    /// As [`Instance::post_batch`].
    unsafe fn start(&self, own: &mut Own, state: &mut State, job: &Job<'_>) -> bool {
        // SAFETY: by this function's contract.
        match unsafe { self.execute(state, job) } {
            Ok(Outcome::UnderWay) => self.shared.slots.start(job.slot),
            Ok(Outcome::Done) => own.end(job.slot, abi::TY_OK),
            Ok(Outcome::Full) => return false,
            Err(fault) => {
                self.fail(state, fault, job.command);
                own.end(job.slot, abi::TY_TRANSPORT);
            }
        }
        true
    }

    /// Whether a command becomes a write with a completion: only these end a batch.
    #[inline]
    fn is_write(&self, command: &Command) -> bool {
        matches!(command.op, abi::TY_OP_PUT | abi::TY_OP_PUT_SIGNAL)
            && command.bytes > self.inject_bytes
            && !self.is_local(command.peer)
    }

    /// Whether `next` ends the batch of `command` that the provider holds back. Under a layer over
    /// connections, each connection has its own batch.
    #[inline]
    fn follows(&self, next: &Command, command: &Command) -> bool {
        self.is_write(next) && (next.peer == command.peer || !self.layered)
    }

    /// Whether the peer is this rank, and plain copies reach its windows.
    #[inline]
    fn is_local(&self, peer: u32) -> bool {
        peer == self.shared.team.me && self.host_only
    }

    /// # Safety
    /// As [`Instance::post_batch`].
    #[inline]
    unsafe fn execute(&self, state: &mut State, job: &Job<'_>) -> Result<Outcome, Fault> {
        let command = job.command;
        let datum = Datum::Signal { id: command.signal, add: command.add };
        // SAFETY: by this function's contract.
        unsafe {
            match command.op {
                abi::TY_OP_PUT => self.put(state, job, None),
                abi::TY_OP_PUT_SIGNAL => self.put(state, job, Some(datum)),
                abi::TY_OP_SIGNAL if self.is_local(command.peer) => self.raise(command),
                abi::TY_OP_SIGNAL => sent(state.outbound.send(command.peer, datum)),
                abi::TY_OP_PUT_VALUE => self.put_value(state, job),
                abi::TY_OP_GET => self.get(state, job),
                _ => Err(Fault::Op),
            }
        }
    }

    fn raise(&self, command: &Command) -> Result<Outcome, Fault> {
        match self.shared.raise(command.signal, command.add) {
            true => Ok(Outcome::Done),
            false => Err(Fault::Signal),
        }
    }

    fn window(&self, id: u16) -> Result<&LocalWindow, Fault> {
        self.shared.windows.get(id as usize).ok_or(Fault::Window)
    }

    /// # Safety
    /// As [`Instance::post_batch`].
    #[inline]
    unsafe fn put(
        &self,
        state: &mut State,
        job: &Job<'_>,
        datum: Option<Datum>,
    ) -> Result<Outcome, Fault> {
        let command = job.command;
        let source = self.window(command.src_window)?;
        let from = source.at(command.src_offset, command.bytes);
        if self.is_local(command.peer) {
            let to = self.window(command.dst_window)?.at(command.dst_offset, command.bytes);
            // SAFETY: both ranges are inside windows of this rank, which are host memory; they may
            // overlap.
            unsafe { std::ptr::copy(from, to, command.bytes as usize) };
            return if datum.is_some() { self.raise(command) } else { Ok(Outcome::Done) };
        }
        let transfer = Transfer {
            peer: command.peer,
            local: from,
            descriptor: state.outbound.objects.descriptor(window_region(command.src_window)),
            bytes: command.bytes as usize,
            window: command.dst_window as usize,
            offset: command.dst_offset,
            datum,
        };
        // An injected write copies its source, so it is done at once (INV-4).
        if command.bytes <= self.inject_bytes && source.is_host() {
            return sent(state.outbound.inject(&transfer));
        }
        posted(state.outbound.write(&transfer, self.shared.slots.context(job.slot), job.more))
    }

    /// A value goes to a mailbox of the receiver, whose CPU stores it: a byte stream may split even
    /// 8 bytes (INV-3). A CPU does not store into device memory; there a NIC writes 8 aligned bytes
    /// as a whole.
    ///
    /// # Safety
    /// As [`Instance::post_batch`].
    unsafe fn put_value(&self, state: &mut State, job: &Job<'_>) -> Result<Outcome, Fault> {
        let Command { peer, dst_window, dst_offset, value, .. } = *job.command;
        let window = self.window(dst_window)?;
        if self.is_local(peer) {
            // SAFETY: host memory; inside the window and aligned, by core's promise.
            unsafe { self.shared.store_value(window, dst_offset, value) };
            return Ok(Outcome::Done);
        }
        let record = self.staging.record(job.slot as usize);
        // SAFETY: the record belongs to the slot, and the slot to this command.
        unsafe {
            record.write(Record { value, offset: dst_offset, window: u64::from(dst_window) })
        };
        let mut transfer = Transfer {
            peer,
            local: record.cast(),
            descriptor: state.outbound.objects.descriptor(STAGING_REGION),
            bytes: size_of::<u64>(),
            window: dst_window as usize,
            offset: dst_offset,
            datum: None,
        };
        if !window.is_host() {
            return self.write_record(state, job, &transfer);
        }
        if !state.outbound.knows(peer) {
            return Err(Fault::Peer);
        }
        let slot = match state.outbound.take_mailbox(peer) {
            Ok(slot) => slot,
            Err(attempt) => return posted(attempt),
        };
        let place = Mailbox { peer: self.shared.team.me, slot };
        transfer.bytes = size_of::<Record>();
        transfer.window = self.shared.windows.len();
        transfer.offset = (self.shared.mailbox(state.index(), place) * RECORD_STRIDE) as u64;
        transfer.datum = Some(Datum::Value(place));
        let outcome = self.write_record(state, job, &transfer);
        if !matches!(outcome, Ok(Outcome::Done | Outcome::UnderWay)) {
            state.outbound.leave_mailbox(peer, slot);
        }
        outcome
    }

    fn write_record(
        &self,
        state: &mut State,
        job: &Job<'_>,
        transfer: &Transfer,
    ) -> Result<Outcome, Fault> {
        if transfer.bytes as u64 <= self.inject_bytes {
            return sent(state.outbound.inject(transfer));
        }
        posted(state.outbound.write(transfer, self.shared.slots.context(job.slot), job.more))
    }

    /// # Safety
    /// As [`Instance::post_batch`]; no other code uses the local destination until the command is
    /// done.
    unsafe fn get(&self, state: &mut State, job: &Job<'_>) -> Result<Outcome, Fault> {
        let command = job.command;
        if !self.get {
            return Err(Fault::NoGet);
        }
        let to = self.window(command.src_window)?.at(command.src_offset, command.bytes);
        if self.is_local(command.peer) {
            let from = self.window(command.dst_window)?.at(command.dst_offset, command.bytes);
            // SAFETY: as in `put`.
            unsafe { std::ptr::copy(from, to, command.bytes as usize) };
            return Ok(Outcome::Done);
        }
        let transfer = Transfer {
            peer: command.peer,
            local: to,
            descriptor: state.outbound.objects.descriptor(window_region(command.src_window)),
            bytes: command.bytes as usize,
            window: command.dst_window as usize,
            offset: command.dst_offset,
            datum: None,
        };
        posted(state.outbound.read(&transfer, self.shared.slots.context(job.slot)))
    }

    #[cold]
    fn fail(&self, state: &State, fault: Fault, command: &Command) {
        let why = match fault {
            Fault::Fabric(error) => self.library.strerror(error),
            other => other.to_string(),
        };
        self.shared.fail(Failure {
            // Of the others, the caller is to blame.
            peer: matches!(fault, Fault::GivenUp | Fault::Fabric(_)).then_some(command.peer),
            message: format!(
                "{why} (op {}, queue {}, peer {}, window {}, signal {}, tag {:#x})",
                command.op,
                command.queue,
                command.peer,
                command.dst_window,
                command.signal,
                command.tag
            ),
            interface: state.interface().to_owned(),
        });
    }
}

/// The outcome of a command that is done when it is posted.
#[inline]
fn sent(attempt: Attempt) -> Result<Outcome, Fault> {
    match posted(attempt)? {
        Outcome::UnderWay => Ok(Outcome::Done),
        other => Ok(other),
    }
}

/// The outcome of a command with a completion.
#[inline]
fn posted(attempt: Attempt) -> Result<Outcome, Fault> {
    match attempt {
        Attempt::Posted => Ok(Outcome::UnderWay),
        Attempt::Full => Ok(Outcome::Full),
        Attempt::Failed(error) => Err(Fault::Fabric(error)),
        Attempt::Unknown => Err(Fault::Peer),
        Attempt::GivenUp => Err(Fault::GivenUp),
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Op => f.write_str("the op is not known; expected one of TY_OP_*"),
            Self::Peer => f.write_str("the peer is not connected"),
            Self::Window => f.write_str("there is no such window"),
            Self::Signal => f.write_str("there is no such signal"),
            Self::NoGet => f.write_str("get = false in the table of the transport"),
            Self::GivenUp => f.write_str(
                "the peer took nothing for as long as the deadline: its process or host is gone, \
                 or it does not poll",
            ),
            Self::Fabric(error) => write!(f, "error {error} of libfabric"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::connected;
    use super::*;
    use tokenyard_core::transport::NO_COMMAND;

    #[test]
    fn under_a_layer_of_connections_a_batch_is_held_back_for_its_own_peer_only() {
        let mut rank = connected(3).remove(0);
        let write = |peer| Command { op: abi::TY_OP_PUT, peer, bytes: 4096, ..NO_COMMAND };
        let signal = Command { op: abi::TY_OP_SIGNAL, peer: 1, ..NO_COMMAND };
        for (layered, to_another) in [(false, true), (true, false)] {
            rank.instance.layered = layered;
            assert!(rank.instance.follows(&write(1), &write(1)));
            assert_eq!(rank.instance.follows(&write(2), &write(1)), to_another);
            assert!(!rank.instance.follows(&signal, &write(1)), "an injected write ends no batch");
        }
    }
}
