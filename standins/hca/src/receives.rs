//! The receives that a program has posted.

use tokenyard_sys_mlx5::wqe::{Local, SEGMENT, layout};

use crate::object::{Inlet, ReceiveQueue};
use crate::store::Store;

/// The end of a receive's list of memory.
const NO_KEY: u32 = 0x100;
/// A receive that was taken.
pub(crate) struct Taken {
    pub(crate) counter: u16,
    /// The domain of its keys.
    pub(crate) pd: u32,
    pub(crate) pieces: Vec<Local>,
}

impl Store {
    /// Takes the next receive of a queue pair, if there is one.
    pub(crate) fn take_receive(&mut self, qpn: u32) -> Option<Taken> {
        let qp = self.qps.get(&qpn)?;
        let queue = match &qp.inlet {
            Inlet::None => return None,
            Inlet::Shared(srqn) => self.srqs.get(srqn)?,
            Inlet::Own(queue) => queue,
        };
        let (taken, next) = self.read_receive(queue)?;
        let queue = match &mut self.qps.get_mut(&qpn)?.inlet {
            Inlet::None => return None,
            Inlet::Shared(srqn) => self.srqs.get_mut(srqn)?,
            Inlet::Own(queue) => queue,
        };
        queue.taken = queue.taken.wrapping_add(1);
        queue.at = next;
        Some(taken)
    }

    /// Reads the next receive of a queue, and the index of the one after it.
    fn read_receive(&self, queue: &ReceiveQueue) -> Option<(Taken, u16)> {
        let posted = u32::from_be_bytes(self.read_array(queue.record).ok()?) as u16;
        if posted == queue.taken {
            return None;
        }
        let index = u64::from(queue.at) & u64::from(queue.entries - 1);
        let mut entry = vec![0; usize::try_from(queue.stride).ok()?];
        self.memory.read(queue.buffer + index * queue.stride, &mut entry).ok()?;
        let first = if queue.linked { SEGMENT } else { 0 };
        let next = match queue.linked {
            true => u16::from_be_bytes([entry[2], entry[3]]),
            false => queue.at.wrapping_add(1),
        };
        let pieces = entry[first..].chunks_exact(SEGMENT).map(piece);
        let pieces = pieces.take_while(|piece| piece.key != NO_KEY);
        let pieces = pieces.filter(|piece| piece.bytes > 0).collect();
        Some((Taken { counter: queue.at, pd: queue.pd, pieces }, next))
    }
}

fn piece(segment: &[u8]) -> Local {
    let word = |at: usize| std::array::from_fn(|i| segment[at + i]);
    let long = std::array::from_fn(|i| segment[layout::DATA_ADDRESS + i]);
    Local {
        bytes: u32::from_be_bytes(word(layout::DATA_BYTES)),
        key: u32::from_be_bytes(word(layout::DATA_KEY)),
        address: u64::from_be_bytes(long),
    }
}
