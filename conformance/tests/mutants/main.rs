//! Mutants prove the suite: components that are broken on purpose, each in one way that real transports and
//! kernel sets were broken in. The case that is named here must catch each mutant, for the reason that is
//! named here. The same case must pass on the unbroken component, so that no case fails on every component.

// Helpers of tests may panic as tests may.
#![allow(clippy::unwrap_used)]

mod altered_kernels;
mod cap_mutants;
mod claim_mutants;
mod completion_mutants;
mod contract;
mod domain_mutants;
mod faulty_shm;
mod header;
mod kernel_mutants;
mod l0;
mod operation_mutants;
mod payload_mutants;
mod pipe_mutants;
mod rank_major_mutants;

use std::sync::Arc;

use anyhow::Result;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;

/// A config with these components. The deadline is the time in which a case notices that nothing arrives.
fn config(kernels: &str, transport: &str) -> Config {
    config_within(5000, kernels, transport)
}

/// A config with these components, and this deadline in milliseconds.
fn config_within(deadline: u32, kernels: &str, transport: &str) -> Config {
    let late = 2 * deadline;
    let text = format!(
        "[world]\ndeadline_ms = {deadline}\nlate_ms = {late}\n[kernels]\nuse = \"{kernels}\"\n\
         [transport.scale_up]\nuse = \"{transport}\"\n"
    );
    Config::parse(&text, "mutants").unwrap()
}

/// Runs `body` on all ranks; returns the errors of the ranks that failed.
fn failures(
    ranks: u32,
    config: &Config,
    body: impl Fn(&Arc<World>) -> Result<()> + Sync,
) -> Vec<String> {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let results = in_threads(ranks, config, |world| body(world)).unwrap();
    let errors = results
        .into_iter()
        .zip(0..)
        .filter_map(|(result, rank)| result.err().map(|error| format!("rank {rank}: {error:#}")));
    errors.collect()
}

/// Checks that the unbroken component passes `case` and that the mutant fails it with the words `why`.
fn assert_caught(mutant: &str, case: &str, why: &str, run: impl Fn(bool) -> Vec<String>) {
    let intact = run(false);
    assert!(intact.is_empty(), "the unbroken component fails {case}: {intact:#?}");
    let broken = run(true);
    assert!(!broken.is_empty(), "the mutant {mutant} survives {case}");
    assert!(
        broken.iter().any(|error| error.contains(why)),
        "{case} fails on the mutant {mutant}, but no rank says {why:?}: {broken:#?}"
    );
}
