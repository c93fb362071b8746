//! Benchmark scenarios: numbers as ratios to a ceiling that the same run measures.
//!
//! Duties: [`run`] starts ranks as processes of the calling program, gives each a [`Job`], and
//! turns what they print into a [`BenchReport`]; the calling program gives control to [`run_rank`] when
//! it finds itself started as a rank. A scenario fails with an error if the exchange itself fails;
//! a required figure that is missed is listed in [`BenchReport::missed`].
//!
//! - [`exchange`]: dispatch and combine against a plain copy of the same bytes;
//! - [`steady`]: allocations and memory of steady steps;
//! - [`scaling`]: commands and bytes of a step, counted by a transport that counts;
//! - [`mod@link`]: one link between two ranks, bare and with tokenyard on top;
//! - [`gpu`]: dispatch and combine on GPUs, against what the link between them carries;
//! - [`proxy`]: commands through proxy threads into an engine that moves nothing;
//! - crossing the plugin ABI is measured by `cargo bench -p tokenyard-bench --bench abi`.

pub mod ceiling;
pub mod counting;
mod csv;
pub mod exchange;
pub mod gpu;
pub mod job;
pub mod link;
pub mod proxy;
pub mod ranks;
pub mod report;
pub mod scaling;
pub mod spread;
pub mod steady;
mod table;
pub mod workload;

pub use job::{Job, Output, Plan, Scenario, Sizes};
pub use ranks::{Progress, measure_gpu, measure_link, run, run_gpu, run_link, run_rank};
pub use report::{BenchReport, SCHEMA_VERSION};

/// Keeps the components that are measured in the calling program.
pub fn link() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_cuda::link();
}
