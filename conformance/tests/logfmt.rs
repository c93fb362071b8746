//! Combines whose partial rows travel in LogFMT-10: results, bytes on the way, and refusals.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use anyhow::Result;
use tokenyard_conformance::moe::exchange::{self, Buffers, options};
use tokenyard_conformance::moe::oracle::{
    Case, Combine, ExpertOutput, Layout, RowType, Sums, Values,
};
use tokenyard_conformance::moe::round::{Live, Round};
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::communicator::{CallForm, Communicator};
use tokenyard_core::config::Config;
use tokenyard_core::moe::Compression;
use tokenyard_core::{Error, ErrorKind};

const STORES: &str = "";
const PUTS: &str = "[transport.scale_up.shm]\nload_store = false\n";

fn case(ranks: usize, hidden: usize, sums: Sums) -> Case {
    let combine = Combine { row: RowType::Bf16, biases: 1, weighted: true, sums };
    let layout = Layout::Packed;
    Case { ranks, experts: 4 * ranks, topk: 3, hidden, layout, combine, ..Case::default() }
}

/// Runs `body` on the ranks of a case.
fn on_ranks(case: &Case, more: &str, body: impl Fn(Communicator) -> Result<()> + Sync) {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let components = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
    let text = format!("[world]\ndeadline_ms = 20000\nlate_ms = 60000\n{components}{more}");
    let config = Config::parse(&text, "logfmt").unwrap();
    let open = |world: &_| body(Communicator::open(world, &config, options(case))?);
    for result in in_threads(case.ranks as u32, &config, open).unwrap() {
        result.unwrap();
    }
}

#[test]
fn sums_are_those_of_the_oracle_where_rows_are_loaded_and_where_they_are_put() {
    for more in [STORES, PUTS] {
        for sums in [Sums::Coded, Sums::LateWeightsCoded] {
            for (ranks, hidden) in [(1, 512), (2, 1536), (3, 2048)] {
                let case = case(ranks, hidden, sums);
                on_ranks(&case, more, |mut comm| {
                    for seed in 0..3 {
                        let values = if seed == 2 { Values::SomeOdd } else { Values::Usual };
                        let case = Case { seed, values, ..case.clone() };
                        Round::new(&case, comm.rank()).run(&mut comm)?;
                    }
                    Ok(comm.close()?)
                });
            }
        }
    }
}

/// Bytes that this rank has put.
fn bytes_put(comm: &Communicator) -> Result<u64> {
    let report = comm.reporter().capture("a test")?;
    let links = report.peers.iter().flat_map(|peer| &peer.links);
    Ok(links.filter_map(|link| link.counts.as_ref()).map(|counts| counts.bytes).sum())
}

#[test]
fn a_row_of_7168_whose_values_allow_it_takes_9184_bytes_instead_of_14336() {
    let combine = Case::default().combine;
    let case = Case { topk: 1, experts: 2, combine, ..case(2, 7168, Sums::ByRank) };
    on_ranks(&case, PUTS, |mut comm| {
        let round = Round::new(&case, comm.rank());
        let live = round.dispatch(&mut comm)?;
        let row: Vec<u8> = [0x3f00_u16, 0xbe80].iter().flat_map(|x| x.to_le_bytes()).collect();
        let rows = row.repeat(live.handle.rows() * case.hidden / 2);
        let output = ExpertOutput { rows, weights: None };
        let mine = &round.inputs.ranks[comm.rank() as usize];
        let mut bytes = [0; 2];
        for (coded, bytes) in bytes.iter_mut().enumerate() {
            let before = bytes_put(&comm)?;
            let mut buffers = Buffers::new(&round.tensors, &output);
            let mut call = buffers.arguments(&round.tensors, &live.handle)?;
            call.compression = [Compression::None, Compression::LogFmt10][coded];
            comm.combine(&live.handle, call)?;
            comm.flush()?;
            *bytes = bytes_put(&comm)? - before;
            let got = buffers.into_got()?;
            for token in 0..live.handle.tokens() {
                let is_sent = mine.topk_idx[token] >= 0;
                let sum = &got.x.bytes()[token * 2 * case.hidden..][..4];
                assert!(!is_sent || sum == row, "{coded}: {sum:?}");
            }
        }
        let others = 1 - comm.rank() as usize;
        let experts = &round.inputs.ranks[others].topk_idx;
        let sent = experts.iter().filter(|e| **e == i64::from(comm.rank())).count() as u64;
        assert!(sent > 0);
        assert_eq!(bytes[0] - bytes[1], sent * (14_336 - 9184));
        drop(live);
        Ok(comm.close()?)
    });
}

/// The error of a combine, which there must be.
fn refused(
    comm: &mut Communicator,
    round: &Round,
    live: &Live,
    compression: Compression,
) -> Result<Error> {
    let output = exchange::run_experts(&round.case, comm.rank() as usize, &live.received)?;
    let mut buffers = Buffers::new(&round.tensors, &output);
    let mut call = buffers.arguments(&round.tensors, &live.handle)?;
    call.compression = compression;
    Ok(comm.combine(&live.handle, call).unwrap_err())
}

#[test]
fn ranks_of_which_one_compresses_receive_an_error_that_names_both_calls() {
    let case = case(2, 512, Sums::ByRank);
    on_ranks(&case, STORES, |mut comm| {
        let round = Round::new(&case, comm.rank());
        let live = round.dispatch(&mut comm)?;
        let coded = [Compression::None, Compression::LogFmt10][comm.rank() as usize];
        let error = refused(&mut comm, &round, &live, coded)?;
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        let text = error.to_string();
        let both =
            ["combine of bf16 rows in LogFMT-10, weighted", "combine of bf16 rows, weighted"];
        assert!(both.iter().all(|call| text.contains(call)), "{text}");
        Ok(())
    });
}

#[test]
fn rows_that_cannot_be_encoded_are_refused_on_all_ranks_and_the_communicator_goes_on() {
    let case = case(2, 768, Sums::ByRank);
    on_ranks(&case, STORES, |mut comm| {
        let round = Round::new(&case, comm.rank());
        let live = round.dispatch(&mut comm)?;
        let text = refused(&mut comm, &round, &live, Compression::LogFmt10)?.to_string();
        assert!(text.contains("compression: found LogFMT-10 of 768 channels"), "{text}");
        round.finish(&mut comm, &live)?;
        drop(live);
        Ok(comm.close()?)
    });
}

#[test]
fn several_domains_refuse_it_by_name() {
    let two = "[transport.scale_out]\nuse = \"shm\"\n[transport.scale_out.shm]\nload_store = false\n\
               [topology]\ndomains = 2\n";
    let case = Case { domains: 2, ..case(4, 512, Sums::ByRank) };
    on_ranks(&case, two, |mut comm| {
        assert!(!comm.takes(CallForm::LogFmt10));
        let round = Round::new(&case, comm.rank());
        let live = round.dispatch(&mut comm)?;
        let error = refused(&mut comm, &round, &live, Compression::LogFmt10)?;
        assert!(error.to_string().contains("LogFMT-10 (one domain"), "{error}");
        round.finish(&mut comm, &live)?;
        drop(live);
        Ok(comm.close()?)
    });
}
