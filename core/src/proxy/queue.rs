//! One queue between its poster and its proxy thread: commands go to the thread, events return.
//!
//! **Room.** A command takes room from its post until its event was read, or until it is done if it has
//! no event (INV-5). So commands in flight and unread events together never exceed the capacity of a
//! queue, and the ring of events cannot overflow: a command in flight becomes at most one event.

use super::bell::Bell;
use super::in_flight::{InFlight, Posted};
use super::ring::{Consumer, Producer, ring};
use super::sync::Arc;
use crate::abi;
use crate::transport::{Command, Event, NO_COMMAND, NO_EVENT};

/// The two ends of queue `queue`, with room for at least `depth` commands. `bell` wakes the thread of
/// the server's end.
pub(super) fn queue(queue: u32, depth: usize, bell: Arc<Bell>) -> (Queue, Server) {
    let depth = depth.max(1).next_power_of_two();
    let (to_server, commands) = ring(depth, NO_COMMAND);
    let (events, to_poster) = ring(depth, NO_EVENT);
    let server = Server { queue, commands, events, in_flight: InFlight::new(depth), ended: 0 };
    (Queue { commands: to_server, events: to_poster, bell }, server)
}

/// The poster's end.
#[derive(Debug)]
pub(super) struct Queue {
    commands: Producer<Command>,
    events: Consumer<Event>,
    bell: Arc<Bell>,
}

impl Queue {
    /// Accepts the first n of `commands`, as many as there is room for, and returns n.
    pub(super) fn post(&mut self, commands: &[Command]) -> usize {
        if self.room() < commands.len() {
            // In this order: where a command is seen to be done, its event is seen, too.
            self.commands.refresh();
            self.events.refresh();
        }
        let count = commands.len().min(self.room());
        for command in &commands[..count] {
            let staged = self.commands.stage(*command);
            debug_assert!(staged, "the ring has more room than the queue");
        }
        if count > 0 {
            self.commands.publish();
            self.bell.ring();
        }
        count
    }

    fn room(&self) -> usize {
        self.commands.room().saturating_sub(self.events.waiting())
    }

    /// Moves the oldest events to the front of `events` and returns their number.
    pub(super) fn poll(&mut self, events: &mut [Event]) -> usize {
        let count = self.events.peek(events);
        if count > 0 {
            self.events.take(count);
            self.events.free(count);
        } else {
            // A caller that polls waits, perhaps for a signal that the thread must fetch.
            self.bell.nudge();
        }
        count
    }
}

/// The proxy thread's end.
#[derive(Debug)]
pub(super) struct Server {
    queue: u32,
    commands: Consumer<Command>,
    events: Producer<Event>,
    in_flight: InFlight,
    /// Commands that ended since the last `publish`.
    ended: usize,
}

impl Server {
    pub(super) fn queue(&self) -> u32 {
        self.queue
    }

    /// Copies the oldest commands that no share has accepted to the front of `batch`, with tickets in
    /// place of their tags, and returns their number. They stay until `accepted`.
    pub(super) fn pick(&mut self, batch: &mut [Command]) -> usize {
        let count = self.commands.peek(batch);
        self.in_flight.prepare(&mut batch[..count])
    }

    /// Records that the share has accepted the first `count` of the commands picked last.
    pub(super) fn accepted(&mut self, count: usize) {
        self.in_flight.add(count);
        self.commands.take(count);
    }

    /// True if a command waits to be picked.
    pub(super) fn has_waiting(&mut self) -> bool {
        self.commands.refresh();
        self.commands.waiting() > 0
    }

    /// True if no command waits and none is in flight.
    pub(super) fn is_idle(&mut self) -> bool {
        self.in_flight.len() == 0 && !self.has_waiting()
    }

    /// Ends the command of `ticket`, with success or a status; `false` if it is not in flight. The
    /// poster sees it from `publish` on.
    pub(super) fn end(&mut self, ticket: u64, result: Result<(), i32>) -> bool {
        let posted = self.in_flight.remove(ticket);
        if let Some(posted) = posted {
            self.report(posted, result);
        }
        posted.is_some()
    }

    fn report(&mut self, posted: Posted, result: Result<(), i32>) {
        self.ended += 1;
        let (kind, status) = match result {
            Ok(()) if !posted.notify => return,
            Ok(()) => (abi::TY_EVENT_DONE, abi::TY_OK),
            Err(status) => (abi::TY_EVENT_ERROR, status),
        };
        let Posted { tag, peer, .. } = posted;
        let staged = self.events.stage(Event { kind, queue: self.queue, peer, status, tag });
        debug_assert!(staged, "every command in flight has room for its event");
    }

    /// Shows the ended commands to the poster.
    pub(super) fn publish(&mut self) {
        if self.ended > 0 {
            // Events first: see `Queue::post`.
            self.events.publish();
            self.commands.free(self.ended);
            self.ended = 0;
        }
    }

    /// Ends all commands that are in flight or wait, with an error (INV-7).
    #[cold]
    pub(super) fn fail_all(&mut self, status: i32) {
        for entry in 0..self.in_flight.capacity() {
            if let Some(posted) = self.in_flight.remove_entry(entry) {
                self.report(posted, Err(status));
            }
        }
        self.publish();
        let mut next = [NO_COMMAND];
        while self.pick(&mut next) > 0 {
            self.accepted(1);
            self.end(next[0].tag, Err(status));
            self.publish();
        }
    }
}
