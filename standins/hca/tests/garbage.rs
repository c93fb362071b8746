//! Bytes of any kind cause a violation or nothing, never a panic.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::Pair;
use proptest::prelude::*;
use tokenyard_hca::{Config, Packet, Profile};

fn profile() -> impl Strategy<Value = Profile> {
    prop_oneof![Just(Profile::Kernels), Just(Profile::Library)]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn requests_of_any_bytes(
        profile in profile(),
        opcode in 0_u8..0x16,
        segments in 1_u8..8,
        rest in prop::collection::vec(any::<u8>(), 512),
    ) {
        let mut pair = Pair::new(Config { profile, ..Config::default() }, 6);
        let mut bytes = rest;
        // A plausible first segment, so that the others are read.
        let qpn = pair.a.qpn.to_be_bytes();
        bytes[..12].copy_from_slice(&[0, 0, 0, opcode, qpn[1], qpn[2], qpn[3], segments, 0, 0, 0, 8]);
        bytes.chunks(64).for_each(|block| pair.a.write(block));
        pair.a.next = u16::from(segments.div_ceil(4));
        pair.a.publish();
        let Pair { a, switch, .. } = &mut pair;
        a.ring(switch.device(1).unwrap());
        pair.switch.run(common::SECOND);
    }

    #[test]
    fn commands_of_any_bytes(mut bytes in prop::collection::vec(any::<u8>(), 0..300), opcode in 0x400_u16..0x510) {
        let mut pair = Pair::new(Config::default(), 6);
        if let Some(first) = bytes.get_mut(..2) {
            first.copy_from_slice(&opcode.to_be_bytes());
        }
        prop_assert!(pair.hca().command(&bytes).is_err());
    }

    #[test]
    fn rings_and_packets_of_any_bytes(
        offset in 0_usize..8192,
        ring in any::<[u8; 8]>(),
        packet in prop::collection::vec(any::<u8>(), 0..80),
    ) {
        let mut pair = Pair::new(Config::default(), 6);
        let page = pair.a.page;
        if let Some(packet) = Packet::from_bytes(&packet) {
            pair.hca().receive(packet);
        }
        pair.hca().ring(page, offset, ring);
        pair.switch.run(common::SECOND);
    }
}
