//! Runs cases of level L0 on broken transports; shared code of the mutants.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_conformance::suite::{Outcome, Rank};
use tokenyard_conformance::transport;
use tokenyard_core::abi;
use tokenyard_core::transport::Command;

use crate::claim_mutants::IntactDriven;
use crate::faulty_shm::Fault;
use crate::{assert_caught, config, config_within, failures};

/// Runs the test `name` of L0 on the transport `component`.
pub(crate) fn run(component: &str, name: &str) -> Vec<String> {
    // An unbroken transport has as much time as a busy machine takes.
    let deadline = if component.starts_with("intact") { 60_000 } else { 5000 };
    run_within(deadline, component, name)
}

/// The same, with this deadline in milliseconds.
pub(crate) fn run_within(deadline: u32, component: &str, name: &str) -> Vec<String> {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let config = config_within(deadline, "cpu", component);
    let capabilities = transport::probe(&config).unwrap();
    let tests = transport::tests(&capabilities);
    let test = tests.iter().find(|test| test.name == name).unwrap();
    failures(test.ranks, &config, |world| {
        let rank = Rank { world, config: &config, capabilities: &capabilities };
        let outcome = (test.body)(&rank)?;
        anyhow::ensure!(outcome == Outcome::Pass, "{name} did not run: {outcome:?}");
        Ok(())
    })
}

pub(crate) fn caught<F: Fault>(case: &str, why: &str) {
    let loads = F::KEEPS & abi::TY_CAP_LOAD_STORE != 0;
    let intact = if loads { IntactLoadStore::NAME } else { Intact::NAME };
    assert_caught(F::NAME, case, why, |broken| run(if broken { F::NAME } else { intact }, case));
}

#[test]
fn an_unbroken_transport_passes_every_case() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let (mut all, mut passed) = (BTreeSet::new(), BTreeSet::new());
    for component in [IntactLoadStore::NAME, Intact::NAME, IntactDriven::NAME] {
        let capabilities = transport::probe(&config("cpu", component)).unwrap();
        for test in transport::tests(&capabilities) {
            // Losses need processes: see `tests/lost_peers`.
            if test.in_processes {
                continue;
            }
            all.insert(test.name.clone());
            let found = run(component, &test.name);
            match test.lacks {
                None => {
                    assert!(found.is_empty(), "{} on {component}: {found:#?}", test.name);
                    passed.insert(test.name);
                }
                Some(lacks) => {
                    let is_lack = |e: &String| e.contains("NotSupported") && e.contains(&lacks);
                    assert!(found.iter().all(is_lack) && !found.is_empty(), "{found:#?}");
                }
            }
        }
    }
    // No capability that they lack hides a case from all of them.
    let nowhere: Vec<_> = all.difference(&passed).map(|name| name.split('/').nth(1)).collect();
    assert_eq!(nowhere, [Some("allocated_windows_are_whole")]);
}

/// Counts calls; returns whether this is an `n`-th one.
#[derive(Default)]
pub(crate) struct Turn(AtomicU64);

impl Turn {
    pub(crate) fn of(&self, n: u64) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) % n == n - 1
    }
}

/// Commands that carry a payload.
pub(crate) fn is_put(command: &Command) -> bool {
    matches!(command.op, abi::TY_OP_PUT | abi::TY_OP_PUT_SIGNAL) && command.bytes > 0
}

/// The unbroken transport, without load and store.
#[derive(Default)]
pub(crate) struct Intact;
impl Fault for Intact {
    const NAME: &'static str = "intact";
}

/// The unbroken transport.
#[derive(Default)]
pub(crate) struct IntactLoadStore;
impl Fault for IntactLoadStore {
    const NAME: &'static str = "intact_load_store";
    const KEEPS: u64 = abi::TY_CAP_GET | abi::TY_CAP_LOAD_STORE;
}
