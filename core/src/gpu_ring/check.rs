//! Checks the promises on commands that transports rely on: core did not make these commands.

use crate::abi;
use crate::transport::{Command, NO_COMMAND};

/// The values that commands may name.
#[derive(Debug)]
pub(super) struct Limits {
    pub(super) peers: u32,
    pub(super) signals: u32,
    pub(super) largest_put: u64,
    /// Bytes of each window; equal on all ranks.
    pub(super) windows: Vec<u64>,
}

impl Limits {
    /// The transport command for a kernel's command, or nothing if it breaks the contract.
    pub(super) fn translate(&self, from: &abi::TyGpuRingCommand) -> Option<Command> {
        let op = u8::try_from(from.op).ok()?;
        let (puts, values, raises) = match op {
            abi::TY_OP_PUT => (true, false, false),
            abi::TY_OP_PUT_SIGNAL => (true, false, true),
            abi::TY_OP_PUT_VALUE => (false, true, false),
            abi::TY_OP_SIGNAL => (false, false, true),
            _ => return None,
        };
        let inside = |window: u32, offset: u64, bytes: u64| {
            let end = offset.checked_add(bytes);
            self.windows.get(window as usize).zip(end).is_some_and(|(size, end)| end <= *size)
        };
        let fits = from.peer < self.peers
            && (!puts
                || (from.bytes <= self.largest_put
                    && inside(from.src_window, from.src_offset, from.bytes)
                    && inside(from.dst_window, from.dst_offset, from.bytes)))
            && (!values
                || (from.dst_offset.is_multiple_of(8)
                    && inside(from.dst_window, from.dst_offset, 8)))
            && (!raises || (from.signal < self.signals && (1..=0xffff).contains(&from.add)));
        fits.then_some(Command {
            op,
            flags: abi::TY_FLAG_NOTIFY,
            peer: from.peer,
            signal: from.signal,
            add: from.add,
            src_window: from.src_window as u16,
            dst_window: from.dst_window as u16,
            src_offset: from.src_offset,
            dst_offset: from.dst_offset,
            bytes: from.bytes,
            value: from.value,
            ..NO_COMMAND
        })
    }
}
