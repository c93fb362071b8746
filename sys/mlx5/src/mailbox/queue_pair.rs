//! Commands that take a queue pair from state to state.

use super::queues::QPC;
use super::{OPCODE, mailbox};
use crate::field::Field;

/// Offset of the primary address path.
const PATH: usize = QPC + 0x18;
/// Number of the queue pair.
const QPN: Field = Field::new(9, 0, 24);

mailbox! {
    /// Gives a queue pair its port and its peer's rights.
    Rst2Init, 0x110;
    fixed {
        opcode: OPCODE => 0x502;
        path_migration: Field::new(QPC + 2, 3, 2) => 3;
    }
    fields {
        /// Number of the queue pair.
        qpn: u32 => QPN;
        /// Atomics that the peer may ask for: 3 is 8 bytes and below.
        atomic_mode: u8 => Field::new(QPC + 0x91, 4, 4);
        /// The peer may read.
        remote_read: bool => Field::new(QPC + 0x92, 0, 1);
        /// The peer may write.
        remote_write: bool => Field::new(QPC + 0x92, 1, 1);
        /// The peer may ask for atomics.
        remote_atomic: bool => Field::new(QPC + 0x92, 2, 1);
        /// Entry of the partition key table.
        pkey_index: u16 => Field::new(PATH + 2, 0, 16);
        /// The number of the port, from 1.
        port: u8 => Field::new(PATH + 0x25, 0, 8);
    }
}

mailbox! {
    /// Names the peer and the path to it. The queue pair receives from then on.
    Init2Rtr, 0x110;
    fixed {
        opcode: OPCODE => 0x503;
    }
    fields {
        /// Number of the queue pair.
        qpn: u32 => QPN;
        /// Bytes of a packet, a code of 1 to 5.
        mtu: u8 => Field::new(QPC + 8, 0, 3);
        /// The longest message, as a power of two.
        log_msg_max: u8 => Field::new(QPC + 8, 3, 5);
        /// The peer's queue pair.
        remote_qpn: u32 => Field::new(QPC + 0x15, 0, 24);
        /// Reads and atomics of the peer that are served at once, as a power of two.
        log_rra_max: u8 => Field::new(QPC + 0x91, 0, 3);
        /// The wait of a peer that found no receive, a code.
        min_rnr_nak: u8 => Field::new(QPC + 0x94, 3, 5);
        /// First packet number of the peer.
        next_receive_psn: u32 => Field::new(QPC + 0x95, 0, 24);
        /// Entry of the partition key table.
        pkey_index: u16 => Field::new(PATH + 2, 0, 16);
        /// The route has a global header: always on RoCE.
        global_route: bool => Field::new(PATH + 5, 0, 1);
        /// The peer's local id; 0 on RoCE.
        remote_lid: u16 => Field::new(PATH + 6, 0, 16);
        /// Entry of this port's GID table.
        source_gid_index: u8 => Field::new(PATH + 9, 0, 8);
        /// The hop limit of packets.
        hop_limit: u8 => Field::new(PATH + 0xb, 0, 8);
        /// Traffic class of the global header.
        traffic_class: u8 => Field::new(PATH + 0xc, 4, 8);
        /// The peer's GID.
        remote_gid: [u8; 16] => Field::new(PATH + 0x10, 0, 128);
        /// RoCE: the DSCP of the IP header.
        dscp: u8 => Field::new(PATH + 0x21, 2, 6);
        /// RoCE version 2: 0xc000 or above.
        udp_source_port: u16 => Field::new(PATH + 0x22, 0, 16);
        /// RoCE: the priority of the Ethernet frame.
        ethernet_priority: u8 => Field::new(PATH + 0x24, 1, 3);
        /// The service level of InfiniBand.
        service_level: u8 => Field::new(PATH + 0x24, 4, 4);
        /// The number of the port, from 1.
        port: u8 => Field::new(PATH + 0x25, 0, 8);
        /// RoCE: the peer's MAC address.
        remote_mac: [u8; 6] => Field::new(PATH + 0x26, 0, 48);
    }
}

mailbox! {
    /// Lets a queue pair send.
    Rtr2Rts, 0x110;
    fixed {
        opcode: OPCODE => 0x504;
        log_ack_req_freq: Field::new(QPC + 0x70, 0, 4) => 0;
    }
    fields {
        /// Number of the queue pair.
        qpn: u32 => QPN;
        /// The longest wait for an answer: 4.096 us times two to this power.
        ack_timeout: u8 => Field::new(PATH + 8, 0, 5);
        /// Reads and atomics that are under way at once, as a power of two.
        log_sra_max: u8 => Field::new(QPC + 0x71, 0, 3);
        /// Repetitions without an answer.
        retry_count: u8 => Field::new(QPC + 0x71, 5, 3);
        /// Repetitions while the peer has no receive; 7 is without end.
        rnr_retry: u8 => Field::new(QPC + 0x72, 0, 3);
        /// First packet number.
        next_send_psn: u32 => Field::new(QPC + 0x79, 0, 24);
    }
}

mailbox! {
    /// Breaks a queue pair: what was posted completes as flushed.
    ToErr, 0x10;
    fixed {
        opcode: OPCODE => 0x507;
    }
    fields {
        /// Number of the queue pair.
        qpn: u32 => QPN;
    }
}
