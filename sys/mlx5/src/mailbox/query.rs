//! Queries to the device.

use super::queues::QPC;
use super::{OP_MOD, OPCODE, mailbox};
use crate::field::Field;

/// Offset of the capabilities in the answer.
const CAP: usize = 0x10;

mailbox! {
    /// Asks for the capabilities of the device: general, current values.
    QueryHcaCap, 0x10;
    fixed {
        opcode: OPCODE => 0x100;
        op_mod: OP_MOD => 1;
    }
    fields {}
}

mailbox! {
    /// The answer to [`QueryHcaCap`].
    QueryHcaCapOut, 0x1010;
    fixed {}
    fields {
        /// 0 is success.
        status: u8 => super::STATUS;
        /// More about a failure.
        syndrome: u32 => super::SYNDROME;
        /// Reads and atomics that a queue pair has under way at once, as a power of two.
        log_max_ra_req_qp: u8 => Field::new(CAP + 0x29, 2, 6);
        /// Reads and atomics that a queue pair serves at once, as a power of two.
        log_max_ra_res_qp: u8 => Field::new(CAP + 0x2b, 2, 6);
        /// Form of completions: 1 is the form of [`crate::cqe`].
        cqe_version: u8 => Field::new(CAP + 0x3f, 4, 4);
    }
}

mailbox! {
    /// Asks for a queue pair's state.
    QueryQp, 0x10;
    fixed {
        opcode: OPCODE => 0x50b;
    }
    fields {
        /// Number of the queue pair.
        qpn: u32 => Field::new(9, 0, 24);
    }
}

mailbox! {
    /// The answer to [`QueryQp`].
    QueryQpOut, 0x110;
    fixed {}
    fields {
        /// 0 is success.
        status: u8 => super::STATUS;
        /// More about a failure.
        syndrome: u32 => super::SYNDROME;
        /// One of `QP_STATE_*`.
        state: u8 => Field::new(QPC, 0, 4);
        /// Blocks of the send queue that the device has taken, modulo 2^16.
        hw_sq_counter: u16 => Field::new(QPC + 0xb4, 0, 16);
        /// Blocks of the send queue that were posted, modulo 2^16.
        sw_sq_counter: u16 => Field::new(QPC + 0xb6, 0, 16);
    }
}

/// State: made, and nothing else.
pub const QP_STATE_RST: u8 = 0;
/// State: has its port and rights.
pub const QP_STATE_INIT: u8 = 1;
/// State: receives.
pub const QP_STATE_RTR: u8 = 2;
/// State: receives and sends.
pub const QP_STATE_RTS: u8 = 3;
/// State: broken.
pub const QP_STATE_ERR: u8 = 6;

mailbox! {
    /// The answer to commands that return no data.
    Done, 0x10;
    fixed {}
    fields {
        /// 0 is success.
        status: u8 => super::STATUS;
        /// More about a failure.
        syndrome: u32 => super::SYNDROME;
    }
}
