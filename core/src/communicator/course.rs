//! The course of a communicator's operations: their numbers, which of them are open, and the error that ended it.

use std::sync::Arc;

use super::abandoned::{Abandoned, Sent};
use super::components::Components;
use super::sort::Sort;
use super::stream::Stream;
use crate::bootstrap::World;
use crate::kernels::Trace;
use crate::session::reporter::InCall;
use crate::session::standing::Standing;
use crate::{Error, ErrorKind, Result};

/// The operations of a communicator, in step with those of the other ranks.
pub(crate) struct Course {
    pub(super) standing: Standing,
    pub(crate) components: Arc<Components>,
    in_flight: u32,
    next_operation: u64,
    /// Slots (operation number modulo `in_flight`, at most 16) whose operation was sent and not yet
    /// received: one bit each.
    open_slots: u32,
    /// Whether regions were taken back whose readers no [`release_after`](Self::release_after) has named since.
    took_back: bool,
    abandoned: Arc<Abandoned>,
    /// Dropped last: the goodbye to the other ranks comes behind the end of the transports.
    _world: Arc<World>,
}

impl Course {
    /// `in_flight` operations may be open at once.
    pub(super) fn new(standing: Standing, components: Arc<Components>, in_flight: u32) -> Self {
        let _world = Arc::clone(&standing.world);
        Self {
            standing,
            components,
            _world,
            in_flight,
            next_operation: 0,
            open_slots: 0,
            took_back: false,
            abandoned: Arc::default(),
        }
    }

    pub(super) fn rank(&self) -> u32 {
        self.standing.rank()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.standing.is_closed()
    }

    pub(super) fn has_open(&self) -> bool {
        self.open_slots != 0
    }

    /// Ranks that were lost since the communicator was opened, or absent then, in order.
    pub(super) fn lost_ranks(&self) -> Vec<u32> {
        self.components.user.watchdog().lost_ranks()
    }

    /// Starts an operation: the communicator is open, its slot is free, and dropped regions are
    /// returned.
    pub(super) fn begin(&mut self, sort: Sort) -> Result<(u64, InCall)> {
        self.check_open()?;
        let operation = self.next_operation;
        if self.open_slots & self.slot_bit(operation) != 0 {
            let in_flight = self.in_flight;
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "start operation",
                format!(
                    "operation {} was sent and not received; expected that before operation \
                     {operation}, because in_flight = {in_flight}",
                    operation - u64::from(in_flight),
                ),
            )
            .with_fix(
                "receive it first: call `recv` of what was sent, in deep_ep the hook that the earlier call \
                 returned; or open the communicator with a larger in_flight (deep_ep has 4)",
            ));
        }
        self.take_back_regions();
        self.next_operation += 1;
        self.components.user.watchdog().begin(self.next_operation);
        self.open_slots |= self.slot_bit(operation);
        self.standing.recorder.0.track.send(operation, sort as usize);
        Ok((operation, InCall::new(&self.standing.recorder)))
    }

    fn slot_bit(&self, operation: u64) -> u32 {
        1 << (operation % u64::from(self.in_flight))
    }

    pub(super) fn sent(&self, operation: u64) -> Sent {
        Sent::new(&self.components, operation, &self.abandoned)
    }

    /// Checks that an operation was sent here, and may still succeed.
    pub(super) fn check_sent(&mut self, sent: &Sent) -> Result<()> {
        if !Arc::ptr_eq(&sent.components, &self.components) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "receive operation",
                format!("operation {} was sent by another communicator", sent.operation),
            )
            .with_fix("receive it on the communicator that sent it"));
        }
        self.check_open()
    }

    /// The number of an operation that may be received here.
    pub(super) fn begin_receive(&mut self, sent: &Sent) -> Result<(u64, InCall)> {
        self.check_sent(sent)?;
        self.standing.recorder.0.track.receive(sent.operation);
        Ok((sent.operation, InCall::new(&self.standing.recorder)))
    }

    /// The operation has ended: its slot is free.
    pub(super) fn ended(&mut self, operation: u64) {
        self.open_slots &= !self.slot_bit(operation);
    }

    /// True if the operation is one of the last, which a kernel set remembers.
    pub(crate) fn is_recent(&self, operation: u64) -> bool {
        self.next_operation - operation <= u64::from(self.in_flight)
    }

    /// Returns dropped regions to the kernel set.
    pub(super) fn take_back_regions(&mut self) {
        while let Some(region) = self.components.claims.next_returned() {
            self.components.kernels().release(region);
            self.took_back = true;
        }
    }

    /// See [`Communicator::release_after`](super::Communicator::release_after).
    pub(super) fn release_after(&mut self, streams: &[Stream]) -> Result<()> {
        self.check_open()?;
        streams.iter().try_for_each(|stream| self.components.check_stream(Some(*stream)))?;
        self.take_back_regions();
        if !std::mem::take(&mut self.took_back) {
            return Ok(());
        }
        for stream in streams {
            // SAFETY: a stream of the device, by the contract of `Stream::new`.
            unsafe { self.components.kernels().release_after(stream.raw())? };
        }
        Ok(())
    }

    /// Decides whether the communicator survives a failure between operations.
    #[cold]
    pub(super) fn end_failed_now(&mut self, error: Error) -> Error {
        self.end_failed(self.next_operation, error)
    }

    /// See [`Communicator::flush`](super::Communicator::flush).
    pub(super) fn flush(&mut self) -> Result<()> {
        self.check_open()?;
        if self.open_slots != 0 {
            let text = "an operation was sent and not received; expected none";
            return Err(Error::new(ErrorKind::InvalidInput, "flush communicator", text)
                .with_fix("receive every operation first"));
        }
        self.take_back_regions();
        let flushed = self.components.kernels().flush();
        flushed.map_err(|error| self.end_failed_now(error))
    }

    /// See [`Communicator::trace`](super::Communicator::trace).
    pub(super) fn trace(&mut self, back: u64) -> Result<Trace> {
        self.flush()?;
        let in_flight = u64::from(self.in_flight);
        match self.next_operation.checked_sub(1 + back) {
            Some(operation) if back < in_flight => self.components.kernels().trace(operation),
            _ => {
                let text = format!(
                    "found {} operations back of {}; expected one of the last {in_flight}",
                    back, self.next_operation
                );
                Err(Error::new(ErrorKind::InvalidInput, "trace operation", text))
            }
        }
    }

    pub(crate) fn check_open(&mut self) -> Result<()> {
        self.standing.check_open()
    }
}
