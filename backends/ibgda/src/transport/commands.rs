//! Converts commands to work requests.

use tokenyard_core::abi;
use tokenyard_core::transport::Command;
use tokenyard_sys_mlx5::wqe::{InlineData, Local, Remote, Request};
use tokenyard_verbs::connection::Region;
use tokenyard_verbs::endpoint::RemoteWindow;

/// A peer's memory.
#[derive(Debug)]
pub(super) struct RemoteMemory {
    pub(super) windows: Vec<RemoteWindow>,
    /// Address and key of its signals: 8 bytes each, by queue and id.
    pub(super) signals: (u64, u32),
    /// The address of its port.
    pub(super) gid: [u8; 16],
}

/// The inputs of a request besides the command.
#[derive(Clone, Copy)]
pub(super) struct RequestMaker<'a> {
    pub(super) remote: &'a RemoteMemory,
    pub(super) regions: &'a [Region],
    /// The place for the values that additions return.
    pub(super) sink: Local,
    /// The first signal of the queue.
    pub(super) first_signal: u64,
}

impl RequestMaker<'_> {
    /// The requests of a command: at most two, the last of which ends it. `None` for an unknown op.
    pub(super) fn requests(&self, command: &Command) -> Option<(Option<Request>, Request)> {
        let has_payload = command.bytes > 0;
        Some(match command.op {
            abi::TY_OP_PUT if has_payload => (None, self.write(command)),
            // Both are on one queue pair: the device of the peer adds after it has written (INV-1).
            abi::TY_OP_PUT_SIGNAL if has_payload => {
                (Some(self.write(command)), self.addition(command))
            }
            abi::TY_OP_PUT_SIGNAL | abi::TY_OP_SIGNAL => (None, self.addition(command)),
            abi::TY_OP_PUT_VALUE => (None, self.value(command)?),
            abi::TY_OP_GET if has_payload => (None, self.read(command)),
            abi::TY_OP_PUT | abi::TY_OP_GET => (None, Request::Nop),
            _ => return None,
        })
    }

    fn write(&self, command: &Command) -> Request {
        Request::Write { to: self.target(command, command.bytes), from: self.local(command) }
    }

    fn read(&self, command: &Command) -> Request {
        Request::Read { from: self.target(command, command.bytes), to: self.local(command) }
    }

    /// 8 aligned bytes in one packet: the device writes them as a whole (INV-3).
    fn value(&self, command: &Command) -> Option<Request> {
        debug_assert!(command.dst_offset.is_multiple_of(8));
        let data = InlineData::new(&command.value.to_ne_bytes())?;
        Some(Request::WriteInline { to: self.target(command, 8), data })
    }

    fn local(&self, command: &Command) -> Local {
        let region = &self.regions[command.src_window as usize];
        Local {
            address: region.at(command.src_offset, command.bytes),
            key: region.mr.lkey(),
            // A put has at most `largest_put` bytes, which is 2^30.
            bytes: command.bytes as u32,
        }
    }

    fn target(&self, command: &Command, bytes: u64) -> Remote {
        let window = &self.remote.windows[command.dst_window as usize];
        Remote { address: window.at(command.dst_offset, bytes), key: window.key.0 }
    }

    fn addition(&self, command: &Command) -> Request {
        let (address, key) = self.remote.signals;
        let at = address + 8 * (self.first_signal + u64::from(command.signal));
        Request::FetchAdd {
            to: Remote { address: at, key },
            add: u64::from(command.add),
            sink: self.sink,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::transport::NO_COMMAND;

    use super::*;

    #[test]
    fn a_signal_is_an_addition_to_its_queue_and_id_and_nothing_to_move_is_no_write() {
        let remote = RemoteMemory { windows: Vec::new(), signals: (0x1000, 9), gid: [0; 16] };
        let sink = Local { address: 0x2000, key: 5, bytes: 8 };
        let maker = RequestMaker { remote: &remote, regions: &[], sink, first_signal: 100 };
        let command = |op| Command { op, signal: 7, add: 3, ..NO_COMMAND };
        let to = Remote { address: 0x1000 + 8 * 107, key: 9 };
        let addition = Request::FetchAdd { to, add: 3, sink };
        for op in [abi::TY_OP_SIGNAL, abi::TY_OP_PUT_SIGNAL] {
            assert_eq!(maker.requests(&command(op)), Some((None, addition)));
        }
        for op in [abi::TY_OP_PUT, abi::TY_OP_GET] {
            assert_eq!(maker.requests(&command(op)), Some((None, Request::Nop)));
        }
        assert_eq!(maker.requests(&command(99)), None);
    }
}
