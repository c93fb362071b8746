//! The memory of the queues: kernels or the host write requests, the engine carries them out.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokenyard_core::transport::{Command, Event};
use tokenyard_core::{Result, abi};
use tokenyard_gpu::driver::{Buffer, Context, Pinned};

/// Requests of a queue, a power of two.
pub(crate) const CAPACITY: u32 = 256;
const WINDOW_SHIFT: u32 = 48;

/// `Request` of `request.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Request {
    op: u32,
    peer: u32,
    src: u64,
    dst: u64,
    bytes: u64,
    signal: u32,
    add: u32,
    reserved: u64,
    posted: u64,
    sequence: u64,
}

/// `DeviceApi::Queue` of `paced.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct DeviceQueue {
    requests: u64,
    head: u64,
    done: u64,
    failed: u64,
}

/// `Line` of `jobs.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PacerQueue {
    requests: u64,
    done: u64,
    taken: u64,
}

/// Words of a queue of kernels, 128 bytes apart: `head`, `done`.
const WORDS_BYTES: u64 = 256;
const DONE: u64 = 128;

/// A queue that kernels fill.
#[derive(Debug)]
struct KernelQueue {
    requests: Buffer,
    words: Buffer,
}

/// A queue that the host fills: in pinned memory.
#[derive(Debug)]
pub(crate) struct HostQueue {
    requests: Pinned<Request>,
    done: Pinned<u64>,
    state: Mutex<Posted>,
}

/// The commands of a queue whose end is not reported yet.
#[derive(Debug, Default)]
struct Posted {
    head: u64,
    /// Each with the number of commands that are done before it is reported.
    events: VecDeque<(u64, Event)>,
}

impl Posted {
    /// Commands that the queue takes, where so many are done.
    fn room(&self, done: u64) -> usize {
        (u64::from(CAPACITY) - (self.head - done)) as usize
    }

    /// Counts a command. One that is refused has no number: its error is reported behind the commands before it.
    fn count(&mut self, command: &Command, is_right: bool) {
        self.head += u64::from(is_right);
        if !is_right || command.flags & abi::TY_FLAG_NOTIFY != 0 {
            self.events.push_back((self.head, event(command, is_right)));
        }
    }

    /// Moves the events that so many commands have to the front of `events`; how many.
    fn report(&mut self, done: u64, events: &mut [Event]) -> usize {
        let mut count = 0;
        while count < events.len()
            && let Some((number, event)) = self.events.front()
            && *number <= done
        {
            events[count] = *event;
            self.events.pop_front();
            count += 1;
        }
        count
    }
}

/// The numbers and places that commands of the host may name: the engine trusts them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bounds {
    pub(crate) peers: u32,
    /// Signals of a queue.
    pub(crate) signals: u32,
    /// Bytes of each window, on every rank.
    pub(crate) windows: Vec<u64>,
}

impl Bounds {
    /// Refuses a command that names what is not there. Lengths and offsets may be any.
    ///
    /// # Errors
    /// The part that was found, and the values that were expected.
    pub(crate) fn check(&self, command: &Command) -> std::result::Result<(), String> {
        let number = |name: &str, found: u64, count: u64| {
            let expected = format!("found {name} {found}; expected one below {count}");
            if found < count { Ok(()) } else { Err(expected) }
        };
        let place = |name: &str, window: u16, offset: u64, bytes: u64| {
            number(&format!("{name} window"), window.into(), self.windows.len() as u64)?;
            let all = self.windows[usize::from(window)];
            if offset.checked_add(bytes).is_some_and(|end| end <= all) {
                return Ok(());
            }
            Err(format!(
                "found {bytes} bytes at {name} offset {offset}; expected them within the window's {all}"
            ))
        };
        let Command { op, bytes, .. } = *command;
        let moves = matches!(op, abi::TY_OP_PUT | abi::TY_OP_PUT_SIGNAL | abi::TY_OP_GET);
        let raises = matches!(op, abi::TY_OP_PUT_SIGNAL | abi::TY_OP_SIGNAL);
        if !moves && !raises && op != abi::TY_OP_PUT_VALUE {
            return Err(format!("found op {op}; expected one of TY_OP_*"));
        }
        number("peer", command.peer.into(), self.peers.into())?;
        if raises {
            number("signal", command.signal.into(), self.signals.into())?;
        }
        if moves {
            place("source", command.src_window, command.src_offset, bytes)?;
        }
        if op == abi::TY_OP_PUT_VALUE && !command.dst_offset.is_multiple_of(8) {
            return Err(format!(
                "found a value at offset {}; expected a multiple of 8",
                command.dst_offset
            ));
        }
        if moves || op == abi::TY_OP_PUT_VALUE {
            let bytes = if moves { bytes } else { size_of::<u64>() as u64 };
            place("destination", command.dst_window, command.dst_offset, bytes)?;
        }
        Ok(())
    }
}

/// The memory of all queues of an instance.
#[derive(Debug)]
pub(crate) struct Queues {
    kernels: Vec<KernelQueue>,
    pub(crate) host: Vec<HostQueue>,
    /// `[queues]`: what earlier launches of the engine have taken.
    taken: Buffer,
    lines: Option<Buffer>,
}

impl Queues {
    /// Queues for kernels, or for the host.
    pub(crate) fn new(context: &Arc<Context>, count: u32, by_host: bool) -> Result<Self> {
        let [of_kernels, of_host] = if by_host { [0, count] } else { [count, 0] };
        let kernels = (0..of_kernels).map(|_| {
            Ok(KernelQueue {
                requests: Buffer::new(context, u64::from(CAPACITY) * size_of::<Request>() as u64)?,
                words: Buffer::new(context, WORDS_BYTES)?,
            })
        });
        let host = (0..of_host).map(|_| {
            Ok(HostQueue {
                requests: Pinned::new(context, CAPACITY as usize)?,
                done: Pinned::new(context, 1)?,
                state: Mutex::default(),
            })
        });
        let mut this = Self {
            kernels: kernels.collect::<Result<_>>()?,
            host: host.collect::<Result<_>>()?,
            taken: Buffer::new(context, 8 * u64::from(count.max(1)))?,
            lines: None,
        };
        this.lines = Some(Buffer::of(context, &this.for_engine())?);
        Ok(this)
    }

    /// The address of the table for the engine, `[queues]`.
    pub(crate) fn lines(&self) -> u64 {
        self.lines.as_ref().map_or(0, Buffer::address)
    }

    /// The number of queues.
    pub(crate) fn count(&self) -> u32 {
        (self.kernels.len() + self.host.len()) as u32
    }

    fn for_engine(&self) -> Vec<PacerQueue> {
        let of_kernels =
            self.kernels.iter().map(|q| (q.requests.address(), q.words.address() + DONE));
        let of_host = self.host.iter().map(|q| (q.requests.at(0) as u64, q.done.at(0) as u64));
        let taken = (0..).map(|index: u64| self.taken.address() + 8 * index);
        let queues = of_kernels.chain(of_host).zip(taken);
        queues.map(|((requests, done), taken)| PacerQueue { requests, done, taken }).collect()
    }

    /// The table for kernels, `[queues]`; `failed` is a word that tells them to give up.
    pub(crate) fn for_kernels(&self, context: &Arc<Context>, failed: u64) -> Result<Buffer> {
        let queues = self.kernels.iter().map(|queue| DeviceQueue {
            requests: queue.requests.address(),
            head: queue.words.address(),
            done: queue.words.address() + DONE,
            failed,
        });
        Buffer::of(context, &queues.collect::<Vec<_>>())
    }
}

impl HostQueue {
    fn done(&self) -> u64 {
        // SAFETY: an aligned word of pinned memory that lives as long as `self`; the engine and the host access it
        // whole.
        unsafe { AtomicU64::from_ptr(self.done.at(0)) }.load(Ordering::Acquire)
    }

    /// Writes as many of the commands as there is room for; how many. A command that `check` refuses is none of the
    /// engine's: it becomes an error event. A signal has this number in the engine.
    pub(crate) fn post(
        &self,
        commands: &[Command],
        check: impl Fn(&Command) -> bool,
        signal: impl Fn(u32) -> u32,
    ) -> usize {
        let mut posted = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let count = commands.len().min(posted.room(self.done()));
        for command in &commands[..count] {
            let is_right = check(command);
            if is_right {
                self.write(posted.head, command, signal(command.signal));
            }
            posted.count(command, is_right);
        }
        count
    }

    fn write(&self, number: u64, command: &Command, signal: u32) {
        let place = |window: u16, offset: u64| u64::from(window) << WINDOW_SHIFT | offset;
        let is_value = command.op == abi::TY_OP_PUT_VALUE;
        let request = Request {
            op: command.op.into(),
            peer: command.peer,
            src: place(command.src_window, command.src_offset),
            dst: place(command.dst_window, command.dst_offset),
            bytes: if is_value { command.value } else { command.bytes },
            signal,
            add: command.add,
            // The engine's clock is not the host's: the request counts from when it is seen.
            posted: 0,
            ..Request::default()
        };
        let slot = self.requests.at((number % u64::from(CAPACITY)) as usize);
        // SAFETY: a slot of the queue, whose last request is done; the engine reads it once its sequence is there.
        unsafe {
            slot.write_volatile(request);
            AtomicU64::from_ptr(&raw mut (*slot).sequence).store(number + 1, Ordering::Release);
        }
    }

    /// Moves the events of commands that are done to the front of `events`; how many.
    pub(crate) fn poll(&self, events: &mut [Event]) -> usize {
        let mut posted = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        posted.report(self.done(), events)
    }
}

/// The event of a command.
fn event(command: &Command, is_right: bool) -> Event {
    let (kind, status) = match is_right {
        true => (abi::TY_EVENT_DONE, abi::TY_OK),
        false => (abi::TY_EVENT_ERROR, abi::TY_TRANSPORT),
    };
    Event { kind, queue: command.queue, peer: command.peer, status, tag: command.tag }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_core::transport::NO_COMMAND;

    #[test]
    fn a_refused_command_takes_no_room_and_is_reported_behind_those_before_it() {
        let mut posted = Posted::default();
        let notified = |tag| Command { flags: abi::TY_FLAG_NOTIFY, tag, ..NO_COMMAND };
        posted.count(&notified(1), true);
        posted.count(&Command { tag: 2, ..NO_COMMAND }, true);
        posted.count(&Command { tag: 3, ..NO_COMMAND }, false);
        posted.count(&notified(4), true);
        assert_eq!((posted.head, posted.room(0), posted.room(2)), (3, 253, 255));
        let mut tags = |done, most: usize| {
            let mut events = vec![event(&NO_COMMAND, true); most];
            let count = posted.report(done, &mut events);
            events[..count].iter().map(|event| (event.tag, event.status)).collect::<Vec<_>>()
        };
        assert_eq!(tags(0, 8), []);
        assert_eq!(tags(1, 8), [(1, abi::TY_OK)]);
        assert_eq!(tags(2, 8), [(3, abi::TY_TRANSPORT)], "the second command is done");
        assert_eq!(tags(3, 0), []);
        assert_eq!(tags(3, 8), [(4, abi::TY_OK)]);
    }

    #[test]
    fn commands_that_name_what_is_not_there_are_refused_by_name_and_any_length_is_taken() {
        let bounds = Bounds { peers: 2, signals: 8, windows: vec![100, 1 << 20] };
        let put = Command { op: abi::TY_OP_PUT_SIGNAL, add: 1, bytes: 7, ..NO_COMMAND };
        let right =
            Command { peer: 1, signal: 7, src_offset: 93, dst_window: 1, dst_offset: 3, ..put };
        assert_eq!(bounds.check(&right), Ok(()));
        let value = Command { op: abi::TY_OP_PUT_VALUE, dst_offset: 88, ..NO_COMMAND };
        assert_eq!(bounds.check(&value), Ok(()));
        let refused = |command: Command| bounds.check(&command).unwrap_err();
        assert_eq!(refused(Command { op: 9, ..put }), "found op 9; expected one of TY_OP_*");
        assert_eq!(refused(Command { peer: 2, ..put }), "found peer 2; expected one below 2");
        assert_eq!(refused(Command { signal: 8, ..put }), "found signal 8; expected one below 8");
        let text = refused(Command { src_window: 2, ..put });
        assert_eq!(text, "found source window 2; expected one below 2");
        let text = refused(Command { src_offset: 94, ..put });
        assert_eq!(
            text,
            "found 7 bytes at source offset 94; expected them within the window's 100"
        );
        assert!(refused(Command { dst_offset: u64::MAX, ..put }).contains("destination offset"));
        assert!(refused(Command { dst_offset: 89, ..value }).contains("a multiple of 8"));
        assert!(refused(Command { dst_offset: 96, ..value }).contains("8 bytes at destination"));
    }
}
