//! Rows that cross between domains in runs: each wait is left out in turn, and noticed.

use super::{DEVICE_PUT, Model, Mutant, NVLINK, domains_in_bulk, domains_with, mutate};

/// Waits of the exchange on the rail.
const ON_THE_RAIL: [Mutant; 7] = [
    (
        "a run is put before it is whole",
        "    if (some > 0 && load_acquire(count) != (u64)some * whole.each) return 0;",
        "    if (model::mutant != 1 && some > 0 && load_acquire(count) != (u64)some * whole.each) return 0;",
    ),
    (
        "a run is announced before it is here",
        "      if ((i64)(up.read_signal(queue_of_run(",
        "      if (model::mutant != 2 && (i64)(up.read_signal(queue_of_run(",
    ),
    (
        "metadata are put before all warps have staged theirs",
        "  if (!last_to_come(a.c) || wave_id()",
        "  if (last_to_come(a.c) == (model::mutant == 3) || wave_id()",
    ),
    (
        "metadata are announced before they are here",
        "    if (wait_queues(*a.c.state, up, what, guard)) store_release(x.described + s",
        "    if (model::mutant == 4 || wait_queues(*a.c.state, up, what, guard)) store_release(x.described + s",
    ),
    (
        "a sum is made before its rows have returned",
        "  bool ok = !due || guard.until(",
        "  bool ok = !due || model::mutant == 5 || guard.until(",
    ),
    (
        "a combine enters the rail before the exchange inside has decided",
        "  if (!c.former || c.former_ticket == 0) return true;",
        "  if (!c.former || c.former_ticket == 0 || model::mutant == 6) return true;",
    ),
    (
        "sums are made before the combine has entered",
        "    bool ok = is_decided(a.c.cell, a.c.ticket, a.c.rank, guard);",
        "    bool ok = model::mutant == 7 || is_decided(a.c.cell, a.c.ticket, a.c.rank, guard);",
    ),
];

/// The warp with the last unit of metadata is late with it, so that a put before that is early.
const LATE_METADATA: Mutant = (
    "the last unit of metadata",
    "    if (i >= units) break;\n",
    "    if (i >= units) break;\n    \
     auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);\n    \
     bool holds = model::mutant == 3 && i == units - 1;\n    \
     while (holds && std::chrono::steady_clock::now() < end) model::yield();\n",
);

/// Waits of the exchange inside a domain.
const INSIDE: [Mutant; 3] = [
    (
        "a row is forwarded before it is here",
        "  if (!a.awaits_rows()) return true;",
        "  if (!a.awaits_rows() || model::mutant == 8) return true;",
    ),
    (
        "tokens are counted before their metadata are here",
        "  for (u32 s = threadIdx.x; s < a.groups && ok; s += blockDim.x)",
        "  for (u32 s = threadIdx.x; s < a.groups && ok && model::mutant != 9; s += blockDim.x)",
    ),
    (
        "a sum is counted before it is stored",
        "  __device__ u32 token(u32 position) const {\n    return crosses()",
        "  __device__ u32 token(u32 position) const {\n    if (model::mutant == 10) stored(position);\n    return crosses()",
    ),
];

const MOE: [&str; 8] = [
    "runs.cuh",
    "metadata.cuh",
    "arrivals.cuh",
    "put_combine.cuh",
    "combine.cuh",
    "route.cuh",
    "entry.cuh",
    "pull.cuh",
];

#[test]
fn each_wait_for_rows_that_cross_in_runs_is_needed() {
    let model: Model = domains_with(NVLINK, DEVICE_PUT, |out, up| {
        mutate(out, &MOE, &ON_THE_RAIL);
        mutate(out, &MOE, &[LATE_METADATA]);
        mutate(up, &MOE, &INSIDE);
    });
    model.is_well_with(&["few"]);
    for number in 1..=ON_THE_RAIL.len() + INSIDE.len() {
        model.notices(&[&number.to_string()]);
    }
}

#[test]
fn rows_and_sums_cross_in_runs_by_bulk_copies() {
    // The first warp, which has the only part of a short row, is late with it.
    let early: [Mutant; 2] = [
        (
            "a sum is counted before all warps of its ring have stored their parts",
            "    bool last = shfl(others, 0) == kMost;",
            "    bool last = shfl(others, 0) == (model::mutant == 1 ? 0 : kMost);",
        ),
        (
            "the part of the first warp",
            "#pragma unroll\n  for (u32 v = 0; v < N; v++)\n    if (me.thread",
            "  static std::atomic<u32> held{0};\n  \
             auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);\n  \
             bool holds = model::mutant == 1 && me.thread == 0 && held++ < 4;\n  \
             while (holds && std::chrono::steady_clock::now() < end) model::yield();\n  \
             for (u32 v = 0; v < N; v++)\n    if (me.thread",
        ),
    ];
    let model: Model = domains_in_bulk(NVLINK, DEVICE_PUT, |_, up| mutate(up, &MOE, &early));
    model.is_well_with(&[]);
    model.notices(&["1"]);
}
