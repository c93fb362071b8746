//! Low-latency operations, with ranks that stop midway and without.

use super::*;

/// Waits, or statements in the role of a wait, that are removed from the low-latency kernels: the
/// description, the text that occurs once, and its replacement.
const MUTANTS: [Mutant; 31] = [
    (
        "a row is taken before it has come",
        "there &= !is_inside<P, M>(j, at.pieces) || has_come(piece[j]);",
        "there &= model::mutant == 1 || !is_inside<P, M>(j, at.pieces) || has_come(piece[j]);",
    ),
    (
        "a record is read before it has come",
        "          bool there = entry.is_there(at.record, epoch);",
        "          bool there = model::mutant == 2 || entry.is_there(at.record, epoch);",
    ),
    (
        "counts are read before they have come",
        "    while (seen >> 32 != epoch && ((pending",
        "    while (model::mutant != 3 && seen >> 32 != epoch && ((pending",
    ),
    (
        "heads are not waited for",
        "    heard[i] = poll_seen(at, seen, {kPhaseEntry, source, word, epoch}, guard);",
        "    heard[i] = model::mutant == 4 ? (u32)load_relaxed(at) : poll_seen(at, seen, {kPhaseEntry, source, word, epoch}, guard);",
    ),
    (
        "rows of what was refused are not waited for",
        "  bool found = guard.until({kPhaseRows, source, 0, 1}, look,",
        "  bool found = model::mutant == 5 ? look() != 0 : guard.until({kPhaseRows, source, 0, 1}, look,",
    ),
    (
        "what was taken stays",
        "      store_16_relaxed(at.row + place_in<P, M>(j, at.pieces), make_uint4(0, 0, 0, 0));\n",
        "      if (model::mutant != 6) store_16_relaxed(at.row + place_in<P, M>(j, at.pieces), make_uint4(0, 0, 0, 0));\n",
    ),
    (
        "an ended wait empties nothing",
        "  stop_all(c);\n  uint4* rows",
        "  stop_all(c);\n  if (model::mutant == 7) return;\n  uint4* rows",
    ),
    (
        "a row travels by a key that one of its words is",
        "    if (!sync_block_or(taken)) return key;",
        "    if (!sync_block_or(taken) || model::mutant == 8) return key;",
    ),
    (
        "counts that come behind heads are not waited for",
        "    if (pending == 0) t.reports[i] =",
        "    if (pending == 0 && model::mutant != 9) t.reports[i] =",
    ),
    (
        "weights and selections of a combine are read before they have come",
        "    u32 bits = poll_seen(second_half(given), 0, what, guard);\n    if (lane < m.topk) weight =",
        "    u32 bits = model::mutant == 10 ? (u32)load_relaxed(second_half(given)) : poll_seen(second_half(given), 0, what, guard);\n    if (lane < m.topk && model::mutant == 10) weight = float_of((u32)load_relaxed(second_half(given + 1 + lane)));\n    if (lane < m.topk && model::mutant != 10) weight =",
    ),
    (
        "owners wait for weights before they know that their ranks take part",
        "  send_weights(args, up, part);\n",
        "  send_weights(args, up, part);\n  if (model::mutant == 11) return true;\n",
    ),
    (
        "the key of a row is read before it has come",
        "          return there ? key >> 32 : 0;",
        "          return !there ? 0 : model::mutant == 12 ? epoch : key >> 32;",
    ),
    (
        "a rank's own part of a token is that of the token before",
        "    if (keeps && token != part.receiving.first) make_own",
        "    if (keeps && token != part.receiving.first && model::mutant != 13) make_own",
    ),
    (
        "weights that come back are read before they have come",
        "    weight = float_of(poll_seen(first_half(record + 1 + lane), 0, what, guard));",
        "    const u64* at = first_half(record + 1 + lane);\n    weight = float_of(model::mutant == 14 ? (u32)load_relaxed(at) : poll_seen(at, 0, what, guard));",
    ),
    (
        "later pieces of rows that were refused are not waited for",
        "        auto look = [&]() -> u64 { return has_come(load_16_relaxed(row + piece)); };",
        "        auto look = [&]() -> u64 { return model::mutant == 15 || has_come(load_16_relaxed(row + piece)); };",
    ),
    (
        "a weight of a combine is read before it has come, behind its selections",
        "weight = float_of(poll_seen(second_half(given + 1 + lane), 0, what, guard));",
        "weight = float_of(model::mutant == 16 ? (u32)load_relaxed(second_half(given + 1 + lane)) : poll_seen(second_half(given + 1 + lane), 0, what, guard));",
    ),
    (
        "heads of a dispatch are not waited for",
        "      u32 value = poll_seen(at, 0, {kPhaseEntry, source, word, epoch}, guard);\n      t.heard",
        "      u32 value = model::mutant == 17 ? (u32)load_relaxed(at) : poll_seen(at, 0, {kPhaseEntry, source, word, epoch}, guard);\n      t.heard",
    ),
    (
        "packed rows lie as the exchange has room, and not as M of the call says",
        "most = (u32)a.most_tokens();\n  u32 expert = entry.named",
        "most = model::mutant == 18 ? a.c.ranks * a.c.max_tokens : (u32)a.most_tokens();\n  u32 expert = entry.named",
    ),
    (
        "a rank-major row is taken before it has come",
        "there &= piece_at(j) >= at.pieces || has_come(piece[j]);",
        "there &= model::mutant == 19 || piece_at(j) >= at.pieces || has_come(piece[j]);",
    ),
    (
        "what goes with a rank-major row is read before it has come",
        "      bool there = entry.is_there(at.record, epoch) && is_known(epoch);",
        "      bool there = (model::mutant == 20 || entry.is_there(at.record, epoch)) && is_known(epoch);",
    ),
    (
        "the place of a rank-major row is read before it has come",
        "      if (there) return epoch;\n      bool asks",
        "      if (there || model::mutant == 21) return epoch;\n      bool asks",
    ),
    (
        "rank-major rows of a rank that refuses are waited for",
        "  return token >= tokens_of(a, head);",
        "  return model::mutant != 22 && token >= tokens_of(a, head);",
    ),
    (
        "rank-major rows of ranks that name a larger M stay in the inbox",
        "    u32 most = min(tokens_of(args.dispatch, &heard[s * kHead]), c.max_tokens);",
        "    u32 most = model::mutant == 23 ? 0 : min(tokens_of(args.dispatch, &heard[s * kHead]), c.max_tokens);",
    ),
    (
        "rank-major rows that were taken stay in the inbox",
        "      store_16_relaxed(at.row + piece_at(j), make_uint4(0, 0, 0, 0));\n      piece[j] = with_key(piece[j], first.x);",
        "      if (model::mutant != 24) store_16_relaxed(at.row + piece_at(j), make_uint4(0, 0, 0, 0));\n      piece[j] = with_key(piece[j], first.x);",
    ),
    (
        "places behind rank-major rows stay as they are",
        "    if (!has_row() && is_place) close_place(args, out, from);",
        "    if (!has_row() && is_place && model::mutant != 25) close_place(args, out, from);",
    ),
    (
        "a combine announces a rank-major row for each place",
        "args.is_rank_major() ? a.r.counts[d] : places;",
        "args.is_rank_major() && model::mutant != 26 ? a.r.counts[d] : places;",
    ),
    (
        "a rank-major row of a combine is taken before it has come",
        "there = there && (piece_at(j) >= at.pieces || has_come(piece[j]));",
        "there = there && (model::mutant == 27 || piece_at(j) >= at.pieces || has_come(piece[j]));",
    ),
    (
        "the key of a rank-major row of a combine is read before it has come",
        "      there = key >> 32 == epoch;",
        "      there = model::mutant == 28 || key >> 32 == epoch;",
    ),
    (
        "rank-major rows of a rank that refuses a combine are waited for",
        "  return objects(c, head);\n}\n\n// A row that arrives.",
        "  return model::mutant != 29 && objects(c, head);\n}\n\n// A row that arrives.",
    ),
    (
        "rank-major rows of a combine that were taken stay in the inbox",
        "      store_16_relaxed(at.row + piece_at(j), make_uint4(0, 0, 0, 0));\n      piece[j] = with_key(piece[j], kOneKey",
        "      if (model::mutant != 30) store_16_relaxed(at.row + piece_at(j), make_uint4(0, 0, 0, 0));\n      piece[j] = with_key(piece[j], kOneKey",
    ),
    (
        "a rank's own row of a token is that of the token before",
        "    if (part.keeps_own() && token != part.receiving.first) room",
        "    if (part.keeps_own() && token != part.receiving.first && model::mutant != 31) room",
    ),
];

/// A part of what one rank sends comes late while a mutant is switched on: behind what announces it. Mutants that do
/// not wait for it are then noticed by more than chance.
const LATE: [Mutant; 8] = [
    (
        "counts come behind heads",
        "  if (part.sending.first < part.reporting) report_counts(args, up, t, {part.sending.first, part.reporting});\n#pragma",
        "  model::come_late(a.c.rank);\n  if (part.sending.first < part.reporting) report_counts(args, up, t, {part.sending.first, part.reporting});\n#pragma",
    ),
    (
        "pieces of rows come behind their record",
        "    store_decode_row(decode_row(a.c, args.decode, up, d, place), row.piece, pieces, key);\n",
        "    model::come_late(a.c.rank);\n    if (model::mutant == 15 && model::refuses && threadIdx.x == 1) model::hold_back(a.c.rank);\n    store_decode_row(decode_row(a.c, args.decode, up, d, place), row.piece, pieces, key);\n",
    ),
    (
        "weights that come back come behind their row",
        "  if (!m.weights) return;\n  u32 back",
        "  if (!m.weights) return;\n  if (model::mutant == 14 && lane == 0) model::hold_back(c.rank);\n  u32 back",
    ),
    (
        "pieces of rank-major rows come behind their record",
        "    if (!(at & kRowless)) store_decode_row(",
        "    if (model::mutant == 19 && threadIdx.x == 1) model::hold_back(c.rank);\n    if (!(at & kRowless)) store_decode_row(",
    ),
    (
        "pieces of rank-major rows of a combine come behind their record",
        "    store_decode_row(decode_row(c, args.decode, up, source, place), piece, pieces, key);\n",
        "    if (model::mutant == 27 && threadIdx.x == 1) model::hold_back(c.rank);\n    store_decode_row(decode_row(c, args.decode, up, source, place), piece, pieces, key);\n    if (model::mutant == 28 && threadIdx.x == blockDim.x - 1) model::hold_back(c.rank);\n",
    ),
    (
        "what goes with a rank-major row comes behind the row",
        "    bool here = sent.is_at(d);\n    if (!(at & kRowless) && lane < c.topk)",
        "    bool here = sent.is_at(d);\n    if (model::mutant == 20 && lane == 0) model::hold_back(c.rank);\n    if (!(at & kRowless) && lane < c.topk)",
    ),
    (
        "a weight of a combine comes behind its selections",
        "      if (lane < c.topk) store_relaxed(second_half(record + 1 + lane), epoch | bits_of(term.weight));\n",
        "      if (model::mutant == 16 && lane == 0) model::hold_back(c.rank);\n      if (lane < c.topk) store_relaxed(second_half(record + 1 + lane), epoch | bits_of(term.weight));\n",
    ),
    (
        "weights of a combine come behind heads",
        "  send_weights(args, up, part);\n",
        "  model::come_late(args.combine.c.rank);\n  send_weights(args, up, part);\n",
    ),
];

/// Mutants of what masks do, and of a wait that kernels have only with masks.
const MASKING_MUTANTS: [Mutant; 7] = [
    (
        "a rank that is lost is waited for",
        "    if (!masking || peer == masking->rank",
        "    if (model::mutant == 1 || !masking || peer == masking->rank",
    ),
    (
        "each block settles by itself who takes part",
        "    out.ranks[rank] = old & 1;",
        "    out.ranks[rank] = (model::mutant == 2 ? mine : old) & 1;",
    ),
    (
        "the places of rows that have not come stay as they are",
        "    if (load_relaxed(settled_word(args.dispatch.c, args.decode, kGaps, s)) ==",
        "    if (model::mutant != 3 && load_relaxed(settled_word(args.dispatch.c, args.decode, kGaps, s)) ==",
    ),
    (
        "a row of which some pieces have come counts",
        "  return !masks(s) || !sync_block_or(guard.takes_left_out());",
        "  return !masks(s) || !sync_block_or(guard.takes_left_out()) || model::mutant == 4;",
    ),
    (
        "rows are sent to a rank that is left out",
        "    if (expert >= 0 && is_left_out(s, a.c.rank_of((u32)expert)))",
        "    if (model::mutant != 5 && expert >= 0 && is_left_out(s, a.c.rank_of((u32)expert)))",
    ),
    (
        "sums wait for a rank that is left out",
        "    bool is_owed = has && mine.expert >= 0 && !is_left_out(",
        "    bool is_owed = has && mine.expert >= 0 && model::mutant == 6 || has && mine.expert >= 0 && !is_left_out(",
    ),
    (
        "counts of ranks that take part are not waited for",
        "    return is_there ? poll_seen(at, 0, {kPhaseEntry, source, w, c.epoch()}, guard) : 0;",
        "    if (is_there && model::mutant == 7) return (u32)load_relaxed(at);\n    return is_there ? poll_seen(at, 0, {kPhaseEntry, source, w, c.epoch()}, guard) : 0;",
    ),
];

const SOURCES: [&str; 10] = [
    "transport.cuh",
    "masking.cuh",
    "decode_rows.cuh",
    "decode_sums.cuh",
    "decode.cuh",
    "decode_send.cuh",
    "decode_dispatch.cuh",
    "decode_rank_major.cuh",
    "decode_combine.cuh",
    "decode_rank_major_combine.cuh",
];

/// Low-latency kernels with every mutant.
fn compiled(model: &str, mutants: &[Mutant]) -> Model {
    let folder = tempfile::tempdir().expect("a folder");
    write_all(folder.path(), NVLINK, Rows::Vector, "mutants");
    mutate(folder.path(), &SOURCES, mutants);
    mutate(folder.path(), &SOURCES, &LATE);
    coded::mutate_codes(folder.path());
    Model::compile(folder, model, &defines(NVLINK, Rows::Vector))
}

/// Compiled once for all tests.
pub(super) fn decode() -> &'static Model {
    static DECODE: OnceLock<Model> = OnceLock::new();
    DECODE.get_or_init(|| compiled("decode.cpp", &MUTANTS))
}

/// Without mutants, on waves of 64.
pub(super) fn decode_64() -> &'static Model {
    static DECODE: OnceLock<Model> = OnceLock::new();
    DECODE.get_or_init(|| Model::of_wave_64(NVLINK, "decode.cpp"))
}

pub(super) fn decode_in_lockstep() -> &'static Model {
    static DECODE: OnceLock<Model> = OnceLock::new();
    DECODE.get_or_init(|| Model::in_lockstep(NVLINK, "decode.cpp"))
}

/// The same with masks.
fn masked() -> &'static Model {
    static MASKED: OnceLock<Model> = OnceLock::new();
    MASKED.get_or_init(|| compiled("masked.cpp", &MASKING_MUTANTS))
}

#[test]
fn low_latency_rows_of_any_bytes_reach_their_places_and_come_back() {
    decode().is_well();
}

#[test]
fn low_latency_rows_of_any_bytes_reach_their_places_and_come_back_on_waves_of_64() {
    decode_64().is_well_with(&["few"]);
}

#[test]
fn every_low_latency_wait_that_is_taken_out_is_noticed() {
    for number in 1..=MUTANTS.len() {
        decode().notices(&[&number.to_string()]);
    }
}

#[test]
fn low_latency_operations_go_on_without_a_rank_that_stops_in_any_phase() {
    masked().is_well();
}

#[test]
fn waves_of_64_go_on_without_a_rank_that_stops_in_any_phase_of_low_latency_operations() {
    Model::of_wave_64(NVLINK, "masked.cpp").is_well_with(&["few"]);
}

#[test]
fn what_masks_do_is_noticed_where_it_is_taken_out() {
    for number in 1..=MASKING_MUTANTS.len() {
        masked().notices(&[&number.to_string()]);
    }
}

#[test]
fn no_lane_of_a_wavefront_waits_for_another_in_low_latency_operations() {
    decode_in_lockstep().is_well_with(&["least"]);
}

#[test]
fn no_lane_of_a_wavefront_waits_for_another_where_masks_leave_ranks_out() {
    Model::in_lockstep(NVLINK, "masked.cpp").is_well_with(&["few"]);
}
