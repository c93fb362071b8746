use super::*;

/// No two fields share a bit, all lie inside, and a value that is written comes back.
fn table_is_sound<M: Mailbox>() {
    let places = M::FIELDS.iter().map(|(name, place)| (*name, *place));
    let fixed = M::FIXED.iter().map(|(name, place, _)| (*name, *place));
    let mut covered = vec![0_u8; M::BYTES];
    for (name, place) in places.chain(fixed) {
        assert!(place.end() <= M::BYTES, "{}.{name}", M::NAME);
        assert_eq!(place.get(&covered), 0, "{}.{name} overlaps another field", M::NAME);
        place.set(&mut covered, place.most());
    }
    // Every field at its largest value.
    let mut bytes = M::from_answer(&vec![0; M::BYTES]).to_bytes();
    for (_, place) in M::FIELDS {
        place.set(&mut bytes, place.most());
    }
    let read = M::from_bytes(&bytes).unwrap();
    assert_eq!(read.to_bytes(), bytes, "{}", M::NAME);
    // Every bit of no field is refused.
    let plain = M::from_answer(&vec![0; M::BYTES]).to_bytes();
    for bit in 0..M::BYTES * 8 {
        let place = Field::new(bit / 8, bit % 8, 1);
        if place.get(&covered) == 0 {
            let mut bytes = plain.clone();
            place.set(&mut bytes, 1);
            let error = M::from_bytes(&bytes).err();
            let expected = Some(MailboxError::Reserved {
                mailbox: M::NAME,
                byte: bit / 8,
                bits: 0x80 >> (bit % 8),
            });
            assert_eq!(error, expected);
        }
    }
}

#[test]
fn tables_have_no_overlaps_and_read_back_what_they_write() {
    table_is_sound::<CreateCq>();
    table_is_sound::<CreateCqOut>();
    table_is_sound::<DestroyCq>();
    table_is_sound::<CreateQp>();
    table_is_sound::<CreateQpOut>();
    table_is_sound::<DestroyQp>();
    table_is_sound::<Rst2Init>();
    table_is_sound::<Init2Rtr>();
    table_is_sound::<Rtr2Rts>();
    table_is_sound::<ToErr>();
    table_is_sound::<QueryHcaCap>();
    table_is_sound::<QueryHcaCapOut>();
    table_is_sound::<QueryQp>();
    table_is_sound::<QueryQpOut>();
    table_is_sound::<Done>();
}

/// Words that a person computed from the reference. The macro is compared with them.
#[test]
fn a_queue_pair_has_the_words_of_the_reference() {
    let bytes = CreateQp {
        pd: 0x11,
        log_sq_size: 10,
        uar_page: 0x302,
        user_index: 7,
        send_cqn: 0x56,
        receive_cqn: 0x56,
        dbr_offset: 0x1000,
        dbr_umem_id: 0x71,
        wq_offset: 0x2000,
        wq_umem_id: 0x72,
    }
    .to_bytes();
    let expected: &[(usize, u32)] = &[
        (0x00, 0x0500_0000),
        (0x18, 0x0000_1800),        // path migration 3
        (0x1c, 0x0000_0011),        // domain
        (0x20, 0x0000_5040),        // log size 10, timestamps 1
        (0x24, 0x0000_0302),        // page
        (0x28, 0x0000_0007),        // user index
        (0x18 + 0x7c, 0x0000_0056), // send completions
        (0x18 + 0x9c, 0x0000_0056), // receive completions
        (0x18 + 0xa4, 0x0000_1000), // doorbell record
        (0x18 + 0xac, 0x0300_0000), // no receive queue
        (0x18 + 0xd0, 0x1000_0000), // umem of the doorbell record is valid
        (0x18 + 0xe4, 0x0000_0071), // and its id
        (0x104, 0x0000_2000),
        (0x108, 0x0000_0072),
        (0x10c, 0x8000_0000),
    ];
    for at in (0..bytes.len()).step_by(4) {
        let found = u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        let word = expected.iter().find(|(place, _)| *place == at).map_or(0, |(_, word)| *word);
        assert_eq!(found, word, "at {at:#x}");
    }
}

#[test]
fn a_completion_queue_has_the_words_of_the_reference() {
    let bytes = CreateCq {
        dbr_umem_id: 0x71,
        log_size: 6,
        uar_page: 0x302,
        eqn: 5,
        dbr_offset: 0x40,
        buffer_offset: 0x80,
        buffer_umem_id: 0x73,
    }
    .to_bytes();
    let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(word(0x10), 0x0212_0000, "umem of the record, collapsed, overrun ignored");
    assert_eq!([word(0x14), word(0x1c), word(0x24)], [0x71, 0x0600_0302, 5]);
    assert_eq!([word(0x4c), word(0x54), word(0x58), word(0x5c)], [0x40, 0x80, 0x73, 0x8000_0000]);
}

#[test]
fn a_command_with_another_opcode_or_size_is_refused_by_name() {
    let bytes = ToErr { qpn: 5 }.to_bytes();
    assert_eq!(bytes, [5, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0]);
    assert_eq!(
        QueryQp::from_bytes(&bytes).unwrap_err().to_string(),
        "QueryQp: found opcode = 0x507; expected 0x50b"
    );
    assert_eq!(
        ToErr::from_bytes(&bytes[..12]).unwrap_err().to_string(),
        "ToErr: found 12 bytes; expected 16"
    );
}

#[test]
fn an_answer_may_say_more_than_the_table() {
    let mut bytes = vec![0xff; QueryQpOut::BYTES];
    bytes[0] = 0;
    assert!(QueryQpOut::from_bytes(&bytes).is_err());
    assert_eq!(QueryQpOut::from_answer(&bytes).state, 0xf);
    assert_eq!(QueryQpOut::from_answer(&[3]).status, 3, "a short one reads as zeros");
}
