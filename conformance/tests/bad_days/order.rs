//! A test of the tests of INV-2: code that relies on order passes over an ordered transport, and fails
//! here.

use std::time::Duration;

use tokenyard_conformance::moe::exchange;
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_conformance::runner::Settings;
use tokenyard_conformance::suite;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::Config;

use crate::{config, meeting, small};

const RANKS: u32 = 3;

/// A kernel set's puts, each followed by a signal of its own, over this transport.
fn split_over(inner: &str) -> Config {
    let text = format!("use = \"between\"\n[transport.scale_up.between]\nsplits = true\n{inner}");
    config(&text, Duration::from_secs(5))
}

const IN_ORDER: &str = "inner = \"shm\"\nshm.load_store = false";
/// A signal and its payload lie milliseconds apart, so that even a rank that seldom gets a processor sees
/// one without the other.
const REORDERED: &str = "inner = \"faulty\"\nfaulty.inner = \"shm\"\nfaulty.delay_us = 5000";

/// The errors of some exchanges.
fn exchanges(config: &Config) -> Vec<String> {
    let results = in_threads(RANKS, config, |world| -> anyhow::Result<()> {
        let case = small(RANKS as usize);
        let mut comm = Communicator::open(world, config, exchange::options(&case))?;
        for seed in 0..40 {
            let round = Round::new(
                &tokenyard_conformance::moe::oracle::Case { seed, ..case.clone() },
                comm.rank(),
            );
            round.run(&mut comm)?;
        }
        Ok(comm.close()?)
    });
    results.unwrap().into_iter().filter_map(|r| r.err().map(|e| format!("{e:#}"))).collect()
}

/// The errors of the L0 case about payloads and signals.
fn payloads(config: &Config) -> Option<String> {
    let settings = Settings::new(config.clone()).unwrap();
    let tests = suite::tests(settings.capabilities(), 1);
    let test = tests.iter().find(|test| test.name == "l0/payload_before_signal/r2").unwrap();
    settings.run_in_threads(test).err().map(|error| format!("{error:#}"))
}

#[test]
fn who_relies_on_order_passes_in_order_and_is_found_out_by_reordering() {
    meeting();
    assert_eq!(payloads(&split_over(IN_ORDER)), None);
    let found = payloads(&split_over(REORDERED)).unwrap();
    assert!(found.contains("seen with its signal"), "{found}");

    assert_eq!(exchanges(&split_over(IN_ORDER)), Vec::<String>::new());
    let found = exchanges(&split_over(REORDERED));
    assert!(!found.is_empty(), "40 exchanges that rely on order survive reordering");
}
