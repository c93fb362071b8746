use super::*;
use crate::moe::oracle::compare::Origin;

/// Rows 1 and 3 of four, of four f32 each: all 1 and all 2.
fn array() -> Array {
    let mut array = Array::new("x", Elem::F32, 4, 4);
    array.push(1, Origin::Token { rank: 0, token: 7 }, &f32_bytes(&[1.0; 4]));
    array.push(3, Origin::Copy { rank: 1, token: 9, expert: 5 }, &f32_bytes(&[2.0; 4]));
    array
}

fn message(array: &Array, found: &[u8]) -> String {
    array.compare(found).unwrap_err().to_string()
}

#[test]
fn unspecified_rows_may_hold_anything() {
    assert_eq!(array().compare(&array().dense(0x00)), Ok(()));
    assert_eq!(array().compare(&array().dense(0xff)), Ok(()));
}

#[test]
fn the_first_difference_is_shown_with_value_bits_and_owner() {
    let mut found = array().dense(0);
    found[16 + 8..][..4].copy_from_slice(&1.5f32.to_le_bytes());
    found[48..][..8].copy_from_slice(&[0; 8]);
    assert_eq!(
        message(&array(), &found),
        "x: row 1, column 2 (token 7 of rank 0): found 1.5e0 (0x3fc00000); expected 1e0 \
         (0x3f800000); 3 elements in 2 of 2 rows differ"
    );
}

#[test]
fn a_row_at_the_wrong_place_is_traced_to_its_owner() {
    let mut found = array().dense(0);
    found.copy_within(48..64, 16);
    let message = message(&array(), &found);
    let expected = "the row found belongs at row 3 (token 9 of rank 1 for expert 5)";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn equal_values_with_different_bits_differ() {
    let mut array = Array::new("x", Elem::Bf16, 1, 1);
    array.push(0, Origin::Padding(3), &[0, 0]);
    let found = message(&array, &[0x00, 0x80]);
    assert!(found.contains("(padding of expert 3): found -0e0 (0x8000); expected 0e0"), "{found}");
}

#[test]
fn any_nan_equals_any_nan_only_where_the_rules_leave_it_open() {
    let mut array = Array::new("x", Elem::Bf16, 1, 1);
    array.push(0, Origin::Entry, &[0xc0, 0x7f]);
    assert!(array.compare(&[0xff, 0xff]).is_err());
    array.any_nan = true;
    assert_eq!(array.compare(&[0xff, 0xff]), Ok(()));
    assert!(array.compare(&[0x80, 0x7f]).is_err(), "infinity is not NaN");
}

#[test]
fn sizes_must_match_unless_the_end_is_open() {
    let mut array = array();
    assert_eq!(message(&array, &[0; 63]), "x: found 63 bytes; expected 64");
    assert_eq!(message(&array, &[0; 80]), "x: found 80 bytes; expected 64");
    array.open_ended = true;
    assert_eq!(message(&array, &[0; 63]), "x: found 63 bytes; expected at least 64");
    let mut longer = array.dense(0);
    longer.extend([9; 5]);
    assert_eq!(array.compare(&longer), Ok(()));
}

#[test]
fn a_missing_array_is_a_mismatch() {
    let (case, inputs) = example(Layout::Flat);
    let received = expected_dispatch(&case, &inputs, 1);
    let (x, ids) = (received.x.dense(0), received.ids.as_ref().unwrap().dense(0));
    let found = |name: &'static str| match name {
        "x" => Some(x.as_slice()),
        "ids" => Some(ids.as_slice()),
        _ => None,
    };
    let message = received.compare(found).unwrap_err().to_string();
    assert_eq!(message, "source: found no such array; expected one");
}
