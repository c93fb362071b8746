//! Local work beside the exchange: the combine that merges expert rows as it pushes them, and the spreading of
//! tiles.

use super::*;

/// Waits that are removed from the kernels: the description, how rows move, the text that occurs once, and its
/// replacement.
const MUTANTS: [(&str, Rows, &str, &str); 8] = [
    (
        "a sum does not wait for the rows of others",
        Rows::Vector,
        "bool ok = !due || load_acquire(flag(owner, row)) == epoch;",
        "bool ok = !due || load_acquire(flag(owner, row)) == epoch || model::mutant == 1;",
    ),
    (
        "a unit is reported before its rows are there",
        Rows::Vector,
        "    fence_system();\n    if (lane_id() == 0) store_relaxed(unit_flags(a, up, row.source, a.c.rank) + row.unit, a.c.epoch());",
        "    if (model::mutant != 2) fence_system();\n    if (lane_id() == 0) store_relaxed(unit_flags(a, up, row.source, a.c.rank) + row.unit, a.c.epoch());",
    ),
    (
        "the same, with bulk copies",
        Rows::Tma,
        "    stores_done();\n    fence_system();",
        "    if (model::mutant != 3) stores_done();\n    fence_system();",
    ),
    (
        "the same, if none waits for a unit that is late",
        Rows::Tma,
        "      if (!waits) return false;\n",
        "      if (!waits) return false;\n      if (model::mutant == 4) return true;\n",
    ),
    (
        "a row is loaded over one that is not summed yet",
        Rows::Tma,
        "    if (!due || !is_past(shared_address(&v.ring.empty[to.slot]), to.parity ^ 1)) continue;",
        "    if (!due || (!is_past(shared_address(&v.ring.empty[to.slot]), to.parity ^ 1) && model::mutant != 5)) continue;",
    ),
    (
        "a row is summed before it has arrived",
        Rows::Tma,
        "  wait_barrier(shared_address(&v.ring.full[me.turn.slot]), me.turn.parity);\n  const uint4* row",
        "  if (model::mutant != 6) wait_barrier(shared_address(&v.ring.full[me.turn.slot]), me.turn.parity);\n  const uint4* row",
    ),
    (
        "a row is made over one that is still read",
        Rows::Tma,
        "    stores_read();\n    arrive(",
        "    if (model::mutant != 7) stores_read();\n    arrive(",
    ),
    (
        "a row is made over one that has not left yet",
        Rows::Tma,
        "    wait_barrier(shared_address(&v.ring.out_empty[out.slot]), out.parity ^ 1);",
        "    if (model::mutant != 8) wait_barrier(shared_address(&v.ring.out_empty[out.slot]), out.parity ^ 1);",
    ),
];

/// For the last mutant: the thread that stores rows is slow.
const SLOW: Mutant = (
    "a slow thread",
    "    bulk_store(reinterpret_cast<u8*>(left.to)",
    "    for (u32 i = 0; i < 5000 && model::mutant == 8; i++) pause_ns(1);\n    bulk_store(reinterpret_cast<u8*>(left.to)",
);

/// A tile is spread before it has arrived.
pub(super) const EARLY_TILE: Mutant = (
    "a tile is spread early",
    "[&](u64 found) { return (u32)found == p.expected; });",
    "[&](u64 found) { return (u32)found == p.expected || model::mutant == 1; });",
);

/// The kernels with every mutant. Compiled once for all tests.
fn fused(rows: Rows) -> &'static Model {
    static VECTOR: OnceLock<Model> = OnceLock::new();
    static TMA: OnceLock<Model> = OnceLock::new();
    let once = if rows == Rows::Vector { &VECTOR } else { &TMA };
    once.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        write_all(folder.path(), NVLINK, rows, "fused");
        let all: Vec<_> =
            MUTANTS.into_iter().map(|(what, _, from, to)| (what, from, to)).chain([SLOW]).collect();
        mutate(folder.path(), &["fused_plan.cuh", "fused_combine.cuh"], &all);
        Model::compile(folder, "fused.cpp", &defines(NVLINK, rows))
    })
}

#[test]
fn expert_rows_that_are_merged_as_they_are_pushed_end_as_the_oracle_sums_them() {
    for rows in [Rows::Vector, Rows::Tma] {
        fused(rows).is_well();
    }
    Model::of_wave_64(NVLINK, "fused.cpp").is_well_with(&["few"]);
}

#[test]
fn no_lane_of_a_wavefront_waits_for_another_where_expert_rows_are_merged_as_they_are_pushed() {
    Model::in_lockstep(NVLINK, "fused.cpp").is_well_with(&["least"]);
}

#[test]
fn every_wait_of_a_fused_combine_that_is_taken_out_is_noticed() {
    for rows in [Rows::Vector, Rows::Tma] {
        let model = fused(rows);
        // None is switched on.
        model.is_well_with(&["0"]);
        for (number, (what, of, ..)) in (1..).zip(MUTANTS) {
            if of == rows {
                println!("{what}");
                model.notices(&[&number.to_string()]);
            }
        }
    }
}

#[test]
fn a_tile_that_is_spread_before_it_has_arrived_is_noticed() {
    Model::of_stores(Rows::Vector).notices(&["mutant"]);
}
