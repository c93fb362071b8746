//! Converts commands to work requests.

use tokenyard_core::abi;
use tokenyard_core::transport::Command;
use tokenyard_sys_verbs::ffi::{
    SEND_INLINE, SendWr, Sge, WR_ATOMIC_FETCH_AND_ADD, WR_RDMA_READ, WR_RDMA_WRITE,
    WR_RDMA_WRITE_WITH_IMM, WrAtomic, WrRdma, WrTarget,
};

use super::memory::Memory;
use super::peer::Remote;
use crate::endpoint::SignalArea;

/// A work request without its id, its place in a list and its completion flag.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) wr: SendWr,
    /// The piece of local memory; nothing for an empty payload.
    pub(super) sge: Option<Sge>,
}

/// The inputs of a request besides the command.
#[derive(Clone, Copy)]
pub(super) struct RequestMaker<'a> {
    pub(super) remote: &'a Remote,
    pub(super) memory: &'a Memory,
    /// Bytes of a payload that may be copied while it is posted.
    pub(super) inline: u32,
}

/// The work requests of `command`; the last one ends it. `None` for an unknown op.
impl RequestMaker<'_> {
    ///
    /// A value's request points into `command`, so it must be posted while `command` lives.
    pub(super) fn requests(&self, command: &Command) -> Option<(Option<Request>, Request)> {
        Some(match command.op {
            abi::TY_OP_PUT => (None, self.write(command)),
            abi::TY_OP_PUT_SIGNAL => match self.remote.signals {
                SignalArea::Immediate => (None, immediate(self.write(command), command)),
                // Both are on one queue pair, so the device of the peer adds after it has written
                // (INV-1).
                SignalArea::Atomic { .. } if command.bytes > 0 => {
                    (Some(self.write(command)), self.addition(command))
                }
                SignalArea::Atomic { .. } => (None, self.addition(command)),
            },
            abi::TY_OP_SIGNAL => match self.remote.signals {
                SignalArea::Immediate => (None, immediate(empty(), command)),
                SignalArea::Atomic { .. } => (None, self.addition(command)),
            },
            abi::TY_OP_PUT_VALUE => (None, self.value(command)),
            abi::TY_OP_GET => (None, self.read(command)),
            _ => return None,
        })
    }

    fn write(&self, command: &Command) -> Request {
        let mut request = self.transfer(command, WR_RDMA_WRITE);
        let host = self.memory.regions[command.src_window as usize].host;
        if host && command.bytes <= u64::from(self.inline) && command.bytes > 0 {
            request.wr.send_flags = SEND_INLINE;
        }
        request
    }

    fn read(&self, command: &Command) -> Request {
        self.transfer(command, WR_RDMA_READ)
    }

    /// 8 aligned bytes in one packet: the device writes them as a whole (INV-3).
    fn value(&self, command: &Command) -> Request {
        debug_assert!(command.dst_offset.is_multiple_of(8));
        let mut request = empty();
        request.wr.wr.rdma = self.target(command, 8);
        request.wr.send_flags = SEND_INLINE;
        let addr = &raw const command.value as u64;
        request.sge = Some(Sge { addr, length: 8, lkey: 0 });
        request
    }

    fn transfer(&self, command: &Command, opcode: i32) -> Request {
        let mut request = empty();
        request.wr.opcode = opcode;
        if command.bytes == 0 {
            return request;
        }
        let region = &self.memory.regions[command.src_window as usize];
        request.wr.wr.rdma = self.target(command, command.bytes);
        request.sge = Some(Sge {
            addr: region.at(command.src_offset, command.bytes),
            // A put has at most `largest_put` bytes, which a port reports in 32 bits.
            length: command.bytes as u32,
            lkey: region.mr.lkey(),
        });
        request
    }

    fn target(&self, command: &Command, bytes: u64) -> WrRdma {
        let window = &self.remote.windows[command.dst_window as usize];
        WrRdma { remote_addr: window.at(command.dst_offset, bytes), rkey: window.key.0 }
    }

    fn addition(&self, command: &Command) -> Request {
        let mut request = empty();
        request.wr.opcode = WR_ATOMIC_FETCH_AND_ADD;
        if let SignalArea::Atomic { address, key } = self.remote.signals {
            request.wr.wr = WrTarget {
                atomic: WrAtomic {
                    remote_addr: address + 8 * u64::from(command.signal),
                    compare_add: u64::from(command.add),
                    swap: 0,
                    rkey: key.0,
                },
            };
        }
        let (addr, lkey) = self.memory.scratch();
        request.sge = Some(Sge { addr, length: 8, lkey });
        request
    }
}

/// An empty write: the device needs no address and no key for it.
fn empty() -> Request {
    Request { wr: SendWr { opcode: WR_RDMA_WRITE, ..SendWr::BLANK }, sge: None }
}

fn immediate(mut request: Request, command: &Command) -> Request {
    request.wr.opcode = WR_RDMA_WRITE_WITH_IMM;
    request.wr.imm_data = Datum { id: command.signal, add: command.add }.to_word().to_be();
    request
}

/// The meaning of 32 bits of immediate data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Datum {
    pub(super) id: u32,
    pub(super) add: u32,
}

impl Datum {
    pub(super) fn to_word(self) -> u32 {
        debug_assert!(self.id <= 0xffff && (1..=0xffff).contains(&self.add));
        self.id << 16 | self.add
    }

    pub(super) fn from_word(word: u32) -> Self {
        Self { id: word >> 16, add: word & 0xffff }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datum_survives_at_the_ends_of_its_range() {
        for (id, add) in [(0, 1), (0xffff, 0xffff), (1, 0xffff), (0xffff, 1), (0x1234, 0x5678)] {
            let datum = Datum { id, add };
            assert_eq!(Datum::from_word(datum.to_word()), datum);
        }
    }
}
