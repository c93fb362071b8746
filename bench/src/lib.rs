//! Benchmark scenarios: numbers as ratios to a ceiling that the same run measures.
//!
//! [`run`] starts ranks as processes of the calling program, gives each a [`Job`], and turns their
//! output into a [`BenchReport`]. The calling program calls [`run_rank`] when it was started as a
//! rank. A scenario fails with an error if the exchange itself fails; a required figure that is
//! missed is listed in [`BenchReport::missed`].
//!
//! - [`exchange`]: dispatch and combine against a plain copy of the same bytes;
//! - [`steady`]: allocations and memory of steady steps;
//! - [`scaling`]: commands and bytes of a step, counted by a transport that counts;
//! - [`levels`]: what two levels cost on paper;
//! - [`mod@link`]: one link between two ranks, bare and with tokenyard on top;
//! - [`ops`]: gathers, pipes and tables against a plain copy, or copy engines;
//! - [`gpu`]: dispatch and combine on GPUs, against the rate of the link between them;
//! - [`proxy`]: commands through proxy threads into an engine that moves nothing;
//! - the package `tokenyard-bench-abi` measures the plugin ABI.
//!
//! It measures; rules are the suite's. Watched by the tests in these files, and `tests` for counts and allocations.
//! Times are taken by hand: `docs/performance.md`.

pub mod ceiling;
pub mod counting;
mod csv;
pub mod exchange;
pub mod gpu;
pub mod job;
pub mod levels;
pub mod link;
pub mod ops;
pub mod pairs;
pub mod proxy;
pub mod ranks;
pub mod report;
pub mod scaling;
pub mod spread;
pub mod steady;
mod table;
pub mod workload;

pub use job::{Job, Output, Plan, Scenario, Sizes};
pub use ranks::{
    Join, Progress, measure_gpu, measure_link, run, run_gpu, run_link, run_operations, run_rank,
};
pub use report::{BenchReport, SCHEMA_VERSION};

/// Links the measured components into the calling program.
pub fn link() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_cuda::link();
    tokenyard_rocm::link();
}
