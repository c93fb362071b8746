//! Mutants that only several domains can show, and the exchange that catches each.

use tokenyard_conformance::moe::exchange::{self, Placed};
use tokenyard_conformance::moe::oracle::{Case, Inputs};
use tokenyard_core::abi;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::Config;
use tokenyard_core::transport::Command;

use crate::faulty_shm::{Below, Fault, Hot};
use crate::l0::{Intact, IntactLoadStore};
use crate::{assert_caught, failures};

/// 2 domains of 2 ranks. Every token goes to several ranks of a domain, so that its order counts.
fn two_by_two() -> Case {
    Case { ranks: 4, domains: 2, experts: 8, topk: 5, ..Case::default() }
}

/// A whole exchange with this transport between domains; `domains` are the product's.
fn run(case: &Case, scale_out: &str, domains: usize) -> Vec<String> {
    let text = format!(
        "[world]\ndeadline_ms = 5000\nlate_ms = 10000\n[kernels]\nuse = \"cpu\"\n\
         [transport.scale_up]\nuse = \"{}\"\n[transport.scale_out]\nuse = \"{scale_out}\"\n\
         [topology]\ndomains = {domains}\n",
        IntactLoadStore::NAME
    );
    let config = Config::parse(&text, "mutants").unwrap();
    let inputs = Inputs::all(case);
    failures(case.ranks as u32, &config, |world| {
        let mut comm = Communicator::open(world, &config, exchange::options(case))?;
        exchange::check(&mut comm, case, &inputs, Placed::Outside)
    })
}

/// Rows on a rail raise their signal and are lost. Records, which are shorter, arrive.
#[derive(Default)]
pub(crate) struct LostRailRows;
impl Fault for LostRailRows {
    const NAME: &'static str = "lost_rail_rows";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let mut command = *command;
        if command.op == abi::TY_OP_PUT_SIGNAL && command.bytes >= 512 {
            command.op = abi::TY_OP_SIGNAL;
        }
        // SAFETY: by this function's contract; a signal alone reads and writes no window.
        unsafe { below.post(queue, command) }
    }
}

#[test]
fn rows_that_a_rail_loses_are_caught() {
    let case = two_by_two();
    assert_caught(LostRailRows::NAME, &case.to_string(), "after dispatch", |broken| {
        run(&case, if broken { LostRailRows::NAME } else { Intact::NAME }, 2)
    });
}

/// The mutant is the direct algorithm: it sums over ranks, and does not round once per domain.
#[test]
fn a_sum_that_does_not_round_per_domain_is_caught() {
    let case = two_by_two();
    assert_caught("one rounding", &case.to_string(), "after combine", |broken| {
        run(&case, Intact::NAME, if broken { 1 } else { 2 })
    });
}
