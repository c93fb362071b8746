//! The record that kernels write to host memory when they see an error completion.

use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_sys_mlx5::cqe::syndrome;

/// The first error completion that any kernel has seen. Zeros at first. In host memory that kernels reach.
///
/// Kernels write it by atomics of their own device, so the host only reads.
#[repr(C)]
#[derive(Debug, Default)]
pub struct FaultRecord {
    /// 0 at first, 1 while the record is being written, 2 once it is whole.
    state: AtomicU64,
    /// Peer and queue, 32 bits each.
    place: AtomicU64,
    /// Number of the queue pair and index of the request, 32 bits each.
    request: AtomicU64,
    /// The vendor's code and the syndrome, 8 bits each.
    reason: AtomicU64,
}

/// An error completion of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "queue pair {number:#x} to peer {peer} (queue {queue}) broke at request {index:#x}: syndrome {syndrome:#04x} \
     ({}), vendor's code {vendor:#04x}",
    syndrome::words(*.syndrome)
)]
pub struct QueueFault {
    /// Index in the team.
    pub peer: u32,
    /// The queue.
    pub queue: u32,
    /// Number of the queue pair.
    pub number: u32,
    /// Index of the request, 16 bits.
    pub index: u16,
    /// One of `tokenyard_sys_mlx5::cqe::syndrome`: that of the first failure, unless requests behind it were
    /// flushed before a kernel looked. Then it is "the queue pair broke before".
    pub syndrome: u8,
    /// The vendor's code for the failure.
    pub vendor: u8,
}

impl FaultRecord {
    /// Reads the record; none if no kernel has written it. From any thread.
    pub fn read(&self) -> Option<QueueFault> {
        if self.state.load(Ordering::Acquire) != 2 {
            return None;
        }
        let [place, request, reason] =
            [&self.place, &self.request, &self.reason].map(|word| word.load(Ordering::Relaxed));
        Some(QueueFault {
            peer: (place >> 32) as u32,
            queue: place as u32,
            number: (request >> 32) as u32,
            index: request as u16,
            syndrome: reason as u8,
            vendor: (reason >> 8) as u8,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_once_it_is_written_and_says_peer_and_syndrome_in_words() {
        let record = FaultRecord::default();
        record.place.store(3 << 32 | 1, Ordering::Relaxed);
        record.request.store(0x12_3456 << 32 | 0xfffe, Ordering::Relaxed);
        record.reason.store(0x5115, Ordering::Relaxed);
        for state in [0, 1] {
            record.state.store(state, Ordering::Release);
            assert_eq!(record.read(), None);
        }
        record.state.store(2, Ordering::Release);
        let expected = "queue pair 0x123456 to peer 3 (queue 1) broke at request 0xfffe: syndrome 0x15 (the \
                        peer does not answer), vendor's code 0x51";
        assert_eq!(record.read().map(|fault| fault.to_string()).as_deref(), Some(expected));
    }
}
