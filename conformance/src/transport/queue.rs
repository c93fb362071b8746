//! One queue of the rig: it posts and polls, and has the events that came.

use std::ops::RangeInclusive;
use std::time::Duration;

use anyhow::{Result, anyhow, bail, ensure};
use tokenyard_core::abi;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{Command, Event, NO_COMMAND, NO_EVENT};

use super::clock::Clock;
use super::headway::Headway;

/// The statuses of errors: `TY_MISMATCH` to `TY_UNAVAILABLE`.
pub(super) const STATUSES: RangeInclusive<i32> = abi::TY_MISMATCH..=abi::TY_UNAVAILABLE;

/// One queue, and the events that it gave and that no case has taken yet.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) id: u32,
    events: Vec<Event>,
    /// Whether the case expects error events.
    pub(super) expects_errors: bool,
    /// Times the calls of the queue, where they must not wait.
    pub(super) clock: Option<Clock>,
}

impl Queue {
    pub(super) fn new(id: u32) -> Self {
        Self { id, events: Vec::new(), expects_errors: false, clock: None }
    }

    /// Posts the commands that the queue accepts now, and returns their number.
    pub(super) fn try_post(
        &self,
        transport: &OpenTransport,
        commands: &[Command],
    ) -> Result<usize> {
        // A copy, which is scribbled over: what the transport needs of it behind the call, it must have copied.
        let mut given = commands.to_vec();
        // SAFETY: cases post commands inside their windows and needs, with one writing (peer, queue) per
        // signal, and do not change sources until they are done; the owner of the queue calls.
        let accepted = self.call("post", || unsafe { transport.post(self.id, &given) })?;
        scribble(&mut given, SCRIBBLED);
        accepted.map_err(|status| {
            anyhow!("post on queue {}: found status {status}; expected 0", self.id)
        })
    }

    /// Posts all commands; drives the queue while it is full. It may be full for `deadline` at a time.
    pub(super) fn post(
        &mut self,
        transport: &OpenTransport,
        commands: &[Command],
        deadline: Duration,
    ) -> Result<()> {
        let mut left = commands;
        let mut headway = Headway::new(deadline);
        while !left.is_empty() {
            let accepted = self.try_post(transport, left)?;
            left = &left[accepted..];
            if accepted == 0 {
                self.drive(transport)?;
                let done = commands.len() - left.len();
                ensure!(
                    !headway.is_over(done as u64),
                    "queue {} accepts nothing although it is polled: found {done} of {} commands \
                     accepted, and no more within {deadline:?}",
                    self.id,
                    commands.len()
                );
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Polls once and stores the events.
    pub(super) fn drive(&mut self, transport: &OpenTransport) -> Result<()> {
        let mut events = [NO_EVENT; 32];
        let polled = self.call("poll", || transport.poll(self.id, &mut events))?;
        let count = polled.map_err(|status| {
            anyhow!("poll of queue {}: found status {status}; expected 0", self.id)
        })?;
        for event in &events[..count] {
            ensure!(
                event.queue == self.id,
                "poll of queue {} gave {event:?}; expected the queue on which its command was posted",
                self.id
            );
            let failed = event.kind != abi::TY_EVENT_DONE;
            ensure!(
                if failed { STATUSES.contains(&event.status) } else { event.status == abi::TY_OK },
                "found {event:?}; expected status 0 of a done event, or one of the statuses {STATUSES:?} of an \
                 error event"
            );
            if failed && !self.expects_errors {
                let why =
                    transport.health().err().map_or("health is good".into(), |e| e.to_string());
                bail!("a command failed: found {event:?}; expected a done event ({why})");
            }
            self.events.push(*event);
        }
        Ok(())
    }

    /// Calls a slot, by the clock of the queue where it has one.
    pub(super) fn call<T>(&self, slot: &str, call: impl FnOnce() -> T) -> Result<T> {
        match &self.clock {
            Some(clock) => clock.time(slot, call),
            None => Ok(call()),
        }
    }

    /// Takes the events.
    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Events that were not taken yet.
    pub(super) fn events(&self) -> &[Event] {
        &self.events
    }
}

/// The content of commands that a transport must not look at any more.
const SCRIBBLED: Command = Command { op: u8::MAX, bytes: 8, ..NO_COMMAND };

/// Overwrites inputs of a call that has returned.
pub(super) fn scribble<T: Copy>(inputs: &mut [T], over: T) {
    inputs.fill(over);
    // The compiler would leave out what is not read.
    std::hint::black_box(inputs);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statuses_of_errors_are_the_list_of_the_header() {
        let header = include_str!("../../../abi/include/tokenyard_plugin.h");
        let status = |line: &str| {
            let (name, number) = line.strip_prefix("#define ")?.split_once(' ')?;
            name.starts_with("TY_").then(|| number.parse::<i32>().ok()).flatten()
        };
        let mut listed: Vec<i32> =
            header.lines().filter_map(status).filter(|number| *number < 0).collect();
        listed.sort_unstable();
        assert_eq!(listed, STATUSES.collect::<Vec<_>>());
    }
}
