//! Caps on the rows of outputs: the memory that they save, and who refuses them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use anyhow::Result;
use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::{Case, Layout, Tokens};
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{CallForm, Communicator, Dispatch};
use tokenyard_core::config::Config;

/// Runs `body` on the ranks of a case.
fn on_ranks(case: &Case, more: &str, body: impl Fn(Communicator) -> Result<()> + Sync) {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let components = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
    let text = format!("[world]\ndeadline_ms = 20000\nlate_ms = 60000\n{components}{more}");
    let config = Config::parse(&text, "caps").unwrap();
    let open = |world: &_| body(Communicator::open(world, &config, options(case))?);
    for result in in_threads(case.ranks as u32, &config, open).unwrap() {
        result.unwrap();
    }
}

#[test]
fn capped_worst_case_outputs_fit_where_the_worst_case_does_not() {
    let layout = Layout::ExpertMajor { alignment: 8, zero_padding: false };
    let tokens = Tokens::Exactly(vec![100, 200]);
    let case = Case { topk: 4, hidden: 1024, max_tokens: 256, tokens, layout, ..Case::default() };
    // The worst case: 512 tokens of 4 experts and 2 KiB. The cap: 256 rows.
    let case = Case { worst_case: true, max_rows: vec![256, 256], ..case };
    on_ranks(&case, "[kernels.cpu]\narena_mib = 2\n", |mut comm| {
        let round = Round::new(&case, comm.rank());
        let free = Dispatch { cap: None, ..round.tensors.dispatch()? };
        let error = comm.dispatch(&free).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        round.run(&mut comm)?;
        Ok(comm.close()?)
    });
}

#[test]
fn several_domains_refuse_a_cap_by_name_and_the_communicator_goes_on() {
    let more = "[transport.scale_out]\nuse = \"shm\"\n[transport.scale_out.shm]\nload_store = false\n\
                [topology]\ndomains = 2\n";
    let case = Case { ranks: 4, domains: 2, experts: 16, ..Case::default() };
    let capped = Case { max_rows: vec![5; 4], ..case.clone() };
    on_ranks(&case, more, |mut comm| {
        assert!(!comm.takes(CallForm::RowCap));
        let error = comm.dispatch(&Round::new(&capped, comm.rank()).tensors.dispatch()?);
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("max_rows of a call: found some"), "{error}");
        Round::new(&case, comm.rank()).run(&mut comm)?;
        Ok(comm.close()?)
    });
}
