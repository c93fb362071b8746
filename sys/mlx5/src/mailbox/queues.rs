//! Commands that make and end queues.

use super::{OPCODE, mailbox};
use crate::field::Field;

/// Offset of the context of a completion queue.
const CQC: usize = 0x10;
/// Offset of the context of a queue pair.
pub(super) const QPC: usize = 0x18;

mailbox! {
    /// Makes a completion queue that is collapsed (each completion overwrites the last one) and cannot
    /// overrun. Its buffer and doorbell record lie in umems.
    CreateCq, 0x110;
    fixed {
        opcode: OPCODE => 0x400;
        dbr_umem_valid: Field::new(CQC, 6, 1) => 1;
        cqe_size: Field::new(CQC + 1, 0, 3) => 0;
        collapsed: Field::new(CQC + 1, 3, 1) => 1;
        overrun_ignored: Field::new(CQC + 1, 6, 1) => 1;
        cq_umem_valid: Field::new(0x5c, 0, 1) => 1;
    }
    fields {
        /// Umem of the doorbell record.
        dbr_umem_id: u32 => Field::new(CQC + 4, 0, 32);
        /// Entries, as a power of two.
        log_size: u8 => Field::new(CQC + 0xc, 3, 5);
        /// Page of the doorbell register. Such a queue never rings.
        uar_page: u32 => Field::new(CQC + 0xd, 0, 24);
        /// Event queue for errors.
        eqn: u8 => Field::new(CQC + 0x17, 0, 8);
        /// Offset of the doorbell record in its umem.
        dbr_offset: u64 => Field::new(CQC + 0x38, 0, 64);
        /// Offset of the buffer in its umem.
        buffer_offset: u64 => Field::new(0x50, 0, 64);
        /// Umem of the buffer.
        buffer_umem_id: u32 => Field::new(0x58, 0, 32);
    }
}

mailbox! {
    /// The answer to [`CreateCq`].
    CreateCqOut, 0x10;
    fixed {}
    fields {
        /// 0 is success.
        status: u8 => super::STATUS;
        /// More about a failure.
        syndrome: u32 => super::SYNDROME;
        /// Number of the queue, 24 bits.
        cqn: u32 => Field::new(9, 0, 24);
    }
}

mailbox! {
    /// Ends a completion queue.
    DestroyCq, 0x10;
    fixed {
        opcode: OPCODE => 0x401;
    }
    fields {
        /// Number of the queue, 24 bits.
        cqn: u32 => Field::new(9, 0, 24);
    }
}

mailbox! {
    /// Makes a queue pair of a reliable connection without a receive queue. Its send queue and doorbell
    /// record lie in umems. Nothing is scattered to completions.
    CreateQp, 0x110;
    fixed {
        opcode: OPCODE => 0x500;
        service_type: Field::new(QPC + 1, 0, 8) => 0;
        path_migration: Field::new(QPC + 2, 3, 2) => 3;
        timestamp_format: Field::new(QPC + 0xb, 0, 2) => 1;
        receive_queue_type: Field::new(QPC + 0xac, 5, 3) => 3;
        scatter_requester: Field::new(QPC + 0xc6, 0, 8) => 0;
        scatter_responder: Field::new(QPC + 0xc7, 0, 8) => 0;
        dbr_umem_valid: Field::new(QPC + 0xd0, 3, 1) => 1;
        wq_umem_valid: Field::new(0x10c, 0, 1) => 1;
    }
    fields {
        /// Number of the protection domain.
        pd: u32 => Field::new(QPC + 5, 0, 24);
        /// Blocks of the send queue, as a power of two.
        log_sq_size: u8 => Field::new(QPC + 0xa, 1, 4);
        /// Page of the doorbell register.
        uar_page: u32 => Field::new(QPC + 0xd, 0, 24);
        /// A number that completions carry.
        user_index: u32 => Field::new(QPC + 0x11, 0, 24);
        /// Completion queue of work requests.
        send_cqn: u32 => Field::new(QPC + 0x7d, 0, 24);
        /// Completion queue of receives: the same queue.
        receive_cqn: u32 => Field::new(QPC + 0x9d, 0, 24);
        /// Offset of the doorbell record in its umem.
        dbr_offset: u64 => Field::new(QPC + 0xa0, 0, 64);
        /// Umem of the doorbell record.
        dbr_umem_id: u32 => Field::new(QPC + 0xe4, 0, 32);
        /// Offset of the send queue in its umem.
        wq_offset: u64 => Field::new(0x100, 0, 64);
        /// Umem of the send queue.
        wq_umem_id: u32 => Field::new(0x108, 0, 32);
    }
}

mailbox! {
    /// The answer to [`CreateQp`].
    CreateQpOut, 0x10;
    fixed {}
    fields {
        /// 0 is success.
        status: u8 => super::STATUS;
        /// More about a failure.
        syndrome: u32 => super::SYNDROME;
        /// Number of the queue pair, 24 bits.
        qpn: u32 => Field::new(9, 0, 24);
    }
}

mailbox! {
    /// Ends a queue pair.
    DestroyQp, 0x10;
    fixed {
        opcode: OPCODE => 0x501;
    }
    fields {
        /// Number of the queue pair, 24 bits.
        qpn: u32 => Field::new(9, 0, 24);
    }
}
