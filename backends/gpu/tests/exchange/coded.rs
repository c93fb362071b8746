//! Low-latency combines whose partial rows travel in LogFMT-10.

use std::io::Write;
use std::process::Stdio;

use tokenyard_core::moe::logfmt;

use super::*;

/// Changes to the kernels that encode: as in `decode.rs`.
const MUTANTS: [Mutant; 9] = [
    (
        "the word of a group is read before it has come",
        "        if (word == 0) return 0;\n",
        "        if (model::mutant != 101 && word == 0) return 0;\n",
    ),
    (
        "the codes of a piece are taken before they have come",
        "        return has_come(piece);\n",
        "        return model::mutant == 102 || has_come(piece);\n",
    ),
    (
        "low bits that were taken stay",
        "    store_relaxed(place.low(), 0ull);\n",
        "    if (model::mutant != 103) store_relaxed(place.low(), 0ull);\n",
    ),
    (
        "words that lanes share are freed before all have read them",
        "  sync_wave();\n  if (has_word_of_group()) store_relaxed(place.word(), 0u);\n",
        "  if (model::mutant != 104) sync_wave();\n  if (model::mutant != 105 && has_word_of_group()) store_relaxed(place.word(), 0u);\n",
    ),
    (
        "a block is encoded beside one of its chunk that cannot be",
        "  u32 chunk = (pieces % (2 * kBlockPieces) == 0 ? 2 : 1)",
        "  u32 chunk = (model::mutant != 106 && pieces % (2 * kBlockPieces) == 0 ? 2 : 1)",
    ),
    (
        "a key that one of the words is",
        "    if (!sync_block_or(taken)) return key;\n",
        "    if (!sync_block_or(taken) || model::mutant == 107) return key;\n",
    ),
    (
        "the row of another token has its words in the table",
        "  // The next row has words of its own.\n  sync_block();\n",
        "  if (model::mutant != 108) sync_block();\n",
    ),
    (
        "words of groups are read before all are there",
        "  sync_block();\n  // A chunk has two blocks",
        "  model::mutant == 109 ? sync_wave() : sync_block();\n  // A chunk has two blocks",
    ),
    (
        "encoded rows of what was refused are not removed",
        "  blocks = min(blocks, (u32)(s.row_pitch / kBlockBytes<CodedRows>));\n",
        "  blocks = model::mutant == 110 ? 0 : min(blocks, (u32)(s.row_pitch / kBlockBytes<CodedRows>));\n",
    ),
];

/// Changes: one text has two. Their numbers are above this one, because low-latency operations have others.
const CHANGES: usize = 12;
const FIRST: usize = 100;

/// Changes to the combine, which encodes partial rows.
const COMBINE: [Mutant; 3] = [
    (
        "sums of a rank's own tokens are exact",
        "if constexpr (kCodes<Partial>) encode_row(row, words,",
        "if constexpr (kCodes<Partial>) if (model::mutant == 111) { for (u32& word : words.of) word = 0; } else encode_row(row, words,",
    ),
    (
        "the key of an encoded row is read before it has come",
        "    u32 word = poll_seen(first_half(at.record), key, what, guard);\n",
        "    u32 word = model::mutant == 112 ? (u32)key : poll_seen(first_half(at.record), key, what, guard);\n",
    ),
    (
        "the key comes behind the row",
        "  if (lane == 0) store_relaxed(first_half(record), epoch | key);\n",
        "  if (model::mutant == 112 && lane == 0) model::hold_back(c.rank);\n  if (lane == 0) store_relaxed(first_half(record), epoch | key);\n",
    ),
];

/// Parts of an encoded piece come late: mutants that do not wait for them are then noticed by more than chance.
const LATE: [Mutant; 5] = [
    (
        "a word comes late into the table",
        "    if (has_word_of_group()) groups[piece_at(j) / kGroupPieces<CodedRows>] = words.of[j];\n",
        "    if (model::mutant == 109) model::come_late(0);\n    if (has_word_of_group()) groups[piece_at(j) / kGroupPieces<CodedRows>] = words.of[j];\n",
    ),
    (
        "lanes decide as one where they may read different words: none waits for ever for another",
        "    if (!fits) continue;\n",
        "    if (model::mutant == 108 || model::mutant == 109) fits = all(fits);\n    if (!fits) continue;\n",
    ),
    (
        "a warp reads the words of a chunk late",
        "    bool fits = true;\n",
        "    bool fits = true;\n    if (model::mutant == 108) model::come_late(0), sync_wave();\n",
    ),
    (
        "the word of a group comes behind the record of its row",
        "    if (has_word_of_group()) store_relaxed(place.word(), words.of[j] ^ key);\n",
        "    if (model::mutant == 101) model::come_late(0);\n    if (has_word_of_group()) store_relaxed(place.word(), words.of[j] ^ key);\n",
    ),
    (
        "codes come behind the word of their group",
        "    store_relaxed(place.low(), (u64)v.y << 32 | v.x);\n",
        "    if (model::mutant == 102) model::come_late(0);\n    store_relaxed(place.low(), (u64)v.y << 32 | v.x);\n",
    ),
];

/// Writes all of these into the sources of a folder.
pub(super) fn mutate_codes(folder: &Path) {
    mutate(folder, &["decode_coded.cuh"], &MUTANTS);
    mutate(folder, &["decode_coded.cuh"], &LATE);
    mutate(folder, &["decode_combine.cuh"], &COMBINE);
}

#[test]
fn sums_in_ten_bits_a_value_come_back() {
    decode::decode().is_well_with(&["coded"]);
}

#[test]
fn sums_in_ten_bits_a_value_come_back_on_waves_of_64() {
    decode::decode_64().is_well_with(&["coded few"]);
}

#[test]
fn no_lane_of_a_wavefront_waits_for_another_where_sums_are_encoded() {
    decode::decode_in_lockstep().is_well_with(&["coded least"]);
}

#[test]
fn every_change_to_how_sums_are_encoded_is_noticed() {
    for number in 1..=CHANGES {
        decode::decode().notices(&[&(FIRST + number).to_string()]);
    }
}

/// Rows of bf16: of random bits below 2, of few magnitudes, and of every magnitude in turn.
fn rows() -> Vec<Vec<u16>> {
    let mut seed = 1_u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 48) as u16
    };
    let mut rows: Vec<Vec<u16>> = Vec::new();
    for turn in 0..300_u16 {
        let width = [512, 1024, 1536, 7168][usize::from(turn % 4)];
        let (top, span) = (0x1280 + random() % 0x2cff, 1 + random() % 0x1000);
        rows.push(
            (0..width).map(|_| top.saturating_sub(random() % span) | random() & 0x8000).collect(),
        );
        let magnitude = |i: u16| turn.wrapping_mul(1024).wrapping_add(i) & 0x3fff;
        rows.push((0..1024).map(|i| magnitude(i) | random() & 0x8000).collect());
    }
    rows
}

#[test]
fn kernels_and_host_encode_rows_to_the_same_bits() {
    let rows = rows();
    let program = &decode::decode().program;
    let mut run = Command::new(program)
        .arg("coded values")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut input = run.stdin.take().expect("a pipe");
    let given = rows.clone();
    let writer = std::thread::spawn(move || {
        for row in &given {
            let bytes: Vec<u8> = row.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            input.write_all(&(row.len() as u32).to_le_bytes()).expect("it reads");
            input.write_all(&bytes).expect("it reads");
        }
    });
    let output = run.wait_with_output().expect("it ends");
    writer.join().expect("no panic");
    assert!(output.status.success());
    let mut found = output.stdout.as_chunks::<4>().0.iter();
    let (mut encoded, mut plain) = (0, 0);
    for row in &rows {
        let bytes: Vec<u8> = row.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let chunk = 2 * logfmt::chunk_channels(row.len());
        for chunk in bytes.chunks(chunk) {
            let mut way = vec![0; logfmt::most_bytes(chunk.len() / 2)];
            let used = logfmt::encode_chunk(chunk, &mut way);
            *if used == way.len() { &mut plain } else { &mut encoded } += 1;
            let mut at = 0;
            for _ in 0..chunk.len() / 2 / logfmt::BLOCK {
                let mut block = [0.0_f32; logfmt::BLOCK];
                at += logfmt::decode_block(&way[at..], &mut block);
                for value in block {
                    let found = found.next().map(|bytes| u32::from_le_bytes(*bytes));
                    assert_eq!(found, Some(value.to_bits()), "{value}");
                }
            }
        }
    }
    assert!(encoded > 500 && plain > 100, "{encoded} encoded, {plain} plain");
}
