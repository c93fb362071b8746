use super::*;
use crate::moe::oracle::cast::{cast, received_row, received_values};
use crate::moe::oracle::number::u32s;

/// The scales of a cast, as 32-bit words.
fn scale_words(row: &[f32], scales: Scales) -> Vec<u32> {
    u32s(&cast(row, scales).scales)
}

#[test]
fn plain_scale_is_amax_over_448_and_values_fill_the_range() {
    // amax = 1: scale 448, its inverse is 1/448 in f32.
    let one = cast(&[1.0, -0.5, 0.0], Scales::F32);
    assert_eq!(one.x, [0x7e, 0xf6, 0x00]);
    assert_eq!(scale_words(&[1.0, -0.5, 0.0], Scales::F32), [0x3b12_4925]);
    // amax = 3: 3 * (1/448), and 1 * (448/3) = 149.33 lies nearest to 144 (0x71).
    assert_eq!(cast(&[1.0, 3.0], Scales::F32).x, [0x71, 0x7e]);
    assert_eq!(scale_words(&[1.0, 3.0], Scales::F32), [0x3bdb_6db8]);
}

#[test]
fn values_are_multiplied_by_448_over_amax_and_not_divided_by_the_scale() {
    // 2.4375 * 448 / 13 is exactly 84, half way between 80 (0x6a) and 88 (0x6b). In f32, 448/13
    // lies above the true quotient, so the product lies above the tie; with 1 / (13/448) or a
    // division by 13/448 it would lie below.
    assert_eq!(cast(&[2.4375, 13.0], Scales::F32).x, [0x6b, 0x7e]);
    // 3.5625 * (448/21) is exactly 76 in f32: a tie, and 80 is even.
    assert_eq!(cast(&[3.5625, 21.0], Scales::F32).x, [0x6a, 0x7e]);
}

#[test]
fn amax_is_at_least_1e_4_so_that_zeros_stay_zeros() {
    let zeros = cast(&[0.0, -0.0], Scales::F32);
    assert_eq!(zeros.x, [0x00, 0x80]);
    // 1e-4 / 448 is 2.232143e-7.
    assert_eq!(scale_words(&[0.0], Scales::F32), [0x346f_acad]);
    // 2.232143e-7 lies between 2^-23 and 2^-22.
    assert_eq!(scale_words(&[0.0], Scales::RoundedF32), [0x3480_0000]);
}

#[test]
fn rounded_scale_is_the_next_power_of_two_and_exact_powers_stay() {
    // amax = 1: 1/448 lies between 2^-9 and 2^-8.
    assert_eq!(cast(&[1.0, -0.5], Scales::RoundedF32).x, [0x78, 0xf0]);
    assert_eq!(scale_words(&[1.0], Scales::RoundedF32), [0x3b80_0000]);
    // amax = 448: exactly 2^0; amax = 896: exactly 2^1; just above 448: 2^1.
    assert_eq!(cast(&[448.0], Scales::RoundedF32).x, [0x7e]);
    assert_eq!(scale_words(&[448.0], Scales::RoundedF32), [0x3f80_0000]);
    assert_eq!(scale_words(&[896.0], Scales::RoundedF32), [0x4000_0000]);
    assert_eq!(scale_words(&[449.0], Scales::RoundedF32), [0x4000_0000]);
}

#[test]
fn amax_ignores_nan_and_nan_stays_nan() {
    let row = cast(&[f32::from_bits(0xffc0_0000), 448.0, f32::NAN.abs()], Scales::F32);
    assert_eq!(row.x, [0xff, 0x7e, 0x7f]);
    assert_eq!(f32s(&row.scales), [1.0]);
}

#[test]
fn every_128_channels_have_their_own_scale_and_the_last_group_may_be_partial() {
    let mut row = vec![448.0; 128];
    row.extend([896.0, 448.0]);
    let cast = cast(&row, Scales::F32);
    assert_eq!(f32s(&cast.scales), [1.0, 2.0]);
    assert_eq!(cast.x[..128], [0x7e; 128]);
    // 448 / 2 = 224.
    assert_eq!(cast.x[128..], [0x7e, 0x76]);
}

#[test]
fn ue8m0_bytes_are_packed_by_four_and_padded_with_zeros() {
    // Five groups with amax 448, 896, 1, 224, 0: exponents 0, 1, -8, -1, -22.
    let mut row = vec![0.0; 5 * 128 - 1];
    (row[0], row[128], row[256], row[384]) = (448.0, 896.0, 1.0, 224.0);
    assert_eq!(cast(&row, Scales::Ue8m0).scales, [127, 128, 119, 126, 105, 0, 0, 0]);
    assert_eq!(scale_words(&row, Scales::Ue8m0), [0x7e77_807f, 0x0000_0069]);
}

fn received(input: Input, hidden: usize) -> Case {
    Case { input, hidden, ..Case::default() }
}

#[test]
fn received_values_are_elements_times_the_scale_of_their_group() {
    let mut x = vec![0x38; 128];
    x.extend([0x40, 0xc0]);
    let mut expected = vec![0.5; 128];
    let f32_scales = f32_bytes(&[0.5, 0.25]);

    expected.extend([0.5, -0.5]);
    let cast = received(Input::Cast(RowType::Bf16, Scales::F32), 130);
    assert_eq!(received_values(&cast, &x, &f32_scales), expected);
    let ue8m0 = received(Input::Cast(RowType::Bf16, Scales::Ue8m0), 130);
    assert_eq!(received_values(&ue8m0, &x, &[126, 125, 0, 0]), expected);
    // As many opaque scales as groups count as f32.
    assert_eq!(received_values(&received(Input::Opaque(2), 130), &x, &f32_scales), expected);
    // Any other number of scales is ignored.
    let ignored = received_values(&received(Input::Opaque(1), 130), &x, &[9, 9, 9, 9]);
    assert_eq!((ignored[0], &ignored[128..]), (1.0, &[2.0, -2.0][..]));
}

#[test]
fn plain_and_opaque_rows_travel_untouched() {
    let case = Case { hidden: 2, topk: 1, input: Input::Opaque(3), ..Case::default() };
    let inputs = RankInputs {
        x: vec![0x7f, 1, 2, 0xff],
        scales: Some((0..24).collect()),
        topk_idx: vec![0, 0],
        topk_weights: None,
        biases: Vec::new(),
    };
    let row = received_row(&case, &inputs, 1);
    assert_eq!(row.x, [2, 0xff]);
    assert_eq!(row.scales, [12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]);

    // The bits of a NaN with a payload do not change.
    let case = Case { hidden: 1, input: Input::Plain(RowType::Bf16), ..case };
    let inputs = RankInputs { x: vec![0, 0, 0xa5, 0x7f], scales: None, ..inputs };
    let row = received_row(&case, &inputs, 1);
    assert_eq!((row.x, row.scales), (vec![0xa5, 0x7f], vec![]));
}

#[test]
fn what_is_not_a_number_after_the_cast_keeps_the_sign_that_it_came_with() {
    // An infinite group has scale 0 on the way out.
    let row = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, 1.0, -1.0];
    let codes = cast(&row, Scales::F32).x;
    assert_eq!(codes, [0x7f, 0xff, 0x7f, 0xff, 0x00, 0x80]);
}
