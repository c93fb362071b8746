//! Broken transports below a pipe, and the case of L1 that catches each.

use std::time::Duration;

use tokenyard_conformance::suite::{self, Outcome, Rank, Test};
use tokenyard_conformance::transport;
use tokenyard_core::abi;
use tokenyard_core::config::Config;
use tokenyard_core::transport::{Capabilities, Command};

use crate::faulty_shm::{Below, Fault, Hot};
use crate::l0::{Intact, IntactLoadStore, Turn, is_put};
use crate::payload_mutants::{CutPut, LostPayload, LostPut, NeighbourRail};
use crate::{assert_caught, config, config_within, failures};

fn cases(capabilities: &Capabilities) -> impl Iterator<Item = Test> {
    let is_beside = |name: &str| {
        ["/pipe/", "/gather/", "/reduce/", "/table/"].iter().any(|word| name.contains(word))
    };
    suite::tests(capabilities, 1).into_iter().filter(move |test| is_beside(&test.name))
}

/// Runs a case of an operation beside MoE.
pub(crate) fn run_case(config: &Config, name: &str) -> Vec<String> {
    let capabilities = transport::probe(config).unwrap();
    let test = cases(&capabilities).find(|test| test.name == name).unwrap();
    failures(test.ranks, config, |world| {
        let rank = Rank { world, config, capabilities: &capabilities };
        let outcome = (test.body)(&rank)?;
        anyhow::ensure!(outcome == Outcome::Pass, "{name} did not run: {outcome:?}");
        Ok(())
    })
}

/// Runs a case on the transport `component`.
fn run(component: &str, name: &str) -> Vec<String> {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    // An unbroken transport has as much time as a busy machine takes.
    let is_whole = component.starts_with("intact") || component == ShortPuts::NAME;
    run_case(&config_within(if is_whole { 60_000 } else { 1500 }, "cpu", component), name)
}

fn caught<F: Fault>(case: &str, why: &str) {
    assert_caught(F::NAME, case, why, |broken| {
        run(if broken { F::NAME } else { Intact::NAME }, case)
    });
}

/// The signal comes long before the payload.
#[derive(Default)]
pub(crate) struct LatePayload;
impl Fault for LatePayload {
    const NAME: &'static str = "late_payload";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        if command.op != abi::TY_OP_PUT_SIGNAL || !is_put(command) {
            // SAFETY: by this function's contract.
            return unsafe { below.post(queue, *command) };
        }
        // SAFETY: two halves of a command that is valid by this function's contract.
        unsafe {
            below.post(queue, Command { op: abi::TY_OP_SIGNAL, flags: 0, ..*command })?;
            std::thread::sleep(Duration::from_millis(5));
            below.post(queue, Command { op: abi::TY_OP_PUT, ..*command })
        }
    }
}

#[test]
fn a_signal_before_its_payload_is_caught() {
    let case = "l1/pipe/one_way";
    let [intact, broken] = [Intact::NAME, LatePayload::NAME].map(|component| run(component, case));
    assert!(intact.is_empty(), "{intact:#?}");
    // The record is late, too: the receiver finds nothing of it, or a part.
    let texts = ["0 bytes were sent; 64 were expected", "sent a record with number 0"];
    let says = |error: &String| texts.iter().any(|text| error.contains(text));
    assert!(broken.iter().any(says), "{broken:#?}");
}

#[test]
fn a_lost_put_is_caught() {
    caught::<LostPut>("l1/pipe/in_flight_2", "phase `");
}

#[test]
fn a_lost_payload_is_caught() {
    let case = "l1/pipe/in_flight_16";
    let [intact, broken] = [Intact::NAME, LostPayload::NAME].map(|component| run(component, case));
    assert!(intact.is_empty(), "{intact:#?}");
    // It is lost from a message, or from a record: that of an earlier message is there then, or none yet.
    let texts = [": byte ", "wrote a record of message", "sent a record with number 0"];
    let says = |error: &String| texts.iter().any(|text| error.contains(text));
    assert!(broken.iter().any(says), "{broken:#?}");
}

#[test]
fn a_cut_put_is_caught() {
    caught::<CutPut>("l1/pipe/large", "message 1 of 1048581 bytes from rank 1 to rank 0: byte 5:");
}

#[test]
fn a_put_on_the_neighbour_rail_is_caught() {
    caught::<NeighbourRail>("l1/pipe/pairs", "were expected");
}

/// A transport that takes no large puts. It refuses longer ones.
#[derive(Default)]
pub(crate) struct ShortPuts;
impl Fault for ShortPuts {
    const NAME: &'static str = "short_puts";
    const MOST: u64 = 1000;

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        if command.bytes > Self::MOST {
            return Err(abi::TY_INTERNAL);
        }
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, *command) }
    }
}

/// The same, and each 30th put of that length comes without its payload.
#[derive(Default)]
pub(crate) struct LostPieces(Turn);
impl Fault for LostPieces {
    const NAME: &'static str = "lost_pieces";
    const MOST: u64 = ShortPuts::MOST;

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let lost = command.bytes == Self::MOST && self.0.of(30);
        let bytes = if lost { 0 } else { command.bytes };
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, Command { bytes, ..*command }) }
    }
}

#[test]
fn a_message_of_many_puts_arrives_whole_and_a_lost_one_of_them_is_caught() {
    let case = "l1/pipe/large";
    assert_caught(LostPieces::NAME, case, "byte 29000: found", |broken| {
        run(if broken { LostPieces::NAME } else { ShortPuts::NAME }, case)
    });
}

#[test]
fn all_cases_pass_on_transports_that_are_not_broken() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    for component in [Intact::NAME, IntactLoadStore::NAME, ShortPuts::NAME] {
        let capabilities = transport::probe(&config("cpu", component)).unwrap();
        let names: Vec<_> = cases(&capabilities).map(|test| test.name).collect();
        assert!(names.len() > 20, "{names:?}");
        for name in names {
            let found = run(component, &name);
            assert!(found.is_empty(), "{name} on {component}: {found:#?}");
        }
    }
}
