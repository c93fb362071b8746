//! Forms of calls that some kernel sets do not take: errors that a case against the oracle cannot show.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use anyhow::Result;
use tokenyard_conformance::moe::exchange::{self, options};
use tokenyard_conformance::moe::oracle::{Case, Combine, Input, Layout, RowType, Scales, Sums};
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{
    Communicator, CommunicatorOptions, Dispatch, Replay, Sizes, TensorRef,
};
use tokenyard_core::config::Config;
use tokenyard_core::moe::{ScaleLayout, SourceIndex};

const RANKS: u32 = 2;
const EXPERT_MAJOR: Layout = Layout::ExpertMajor { alignment: 4, zero_padding: false };

fn late(layout: Layout) -> Case {
    let combine =
        Combine { row: RowType::Bf16, biases: 0, weighted: true, sums: Sums::LateWeightsOnce };
    Case { ranks: RANKS as usize, experts: 4, topk: 2, layout, combine, ..Case::default() }
}

/// Runs `body` on both ranks.
fn on_ranks(options: CommunicatorOptions, body: impl Fn(Communicator) -> Result<()> + Sync) {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let components = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
    let text = format!("[world]\ndeadline_ms = 10000\n{components}");
    let config = Config::parse(&text, "call forms").unwrap();
    let open = |world: &_| body(Communicator::open(world, &config, options)?);
    for result in in_threads(RANKS, &config, open).unwrap() {
        result.unwrap();
    }
}

#[test]
fn ids_and_slots_behind_the_last_token_of_a_worst_case_output_name_no_rank() {
    for layout in [Layout::Flat, EXPERT_MAJOR] {
        let case = Case { worst_case: true, layout, ..late(layout) };
        let case = Case { combine: Case::default().combine, ..case };
        on_ranks(options(&case), |mut comm| {
            let round = Round::new(&case, comm.rank());
            for _ in 0..2 {
                let live = round.dispatch(&mut comm)?;
                let received = &live.received;
                let tokens = received.totals().unwrap().elements::<i64>()[0] as usize;
                let named = received.ids().or_else(|| received.slots()).unwrap();
                let behind = &named.elements::<i32>()[tokens * case.topk..];
                assert!(behind.iter().all(|id| *id == -1), "{layout}: {behind:?}");
                assert!(!behind.is_empty(), "{layout}: every rank sends everything here");
            }
            Ok(comm.close()?)
        });
    }
}

#[test]
fn a_handle_of_rows_by_expert_keeps_no_place_in_the_arena() {
    for layout in [EXPERT_MAJOR, Layout::Packed] {
        let case =
            Case { combine: Combine { weighted: true, ..Case::default().combine }, ..late(layout) };
        on_ranks(CommunicatorOptions { handles: 64, ..options(&case) }, |mut comm| {
            let round = Round::new(&case, comm.rank());
            // Many more than the arena has room for at once.
            let mut handles = Vec::new();
            for _ in 0..64 {
                let live = round.dispatch(&mut comm)?;
                let output = exchange::run_experts(&case, comm.rank() as usize, &live.received)?;
                drop(live.received);
                handles.push((live.handle, output));
            }
            for (handle, output) in &handles {
                let outside = exchange::Placed::Outside;
                let got = exchange::combine(&mut comm, &round.tensors, handle, output, outside)?;
                round.check_combined(&got)?;
            }
            drop(handles);
            Ok(comm.close()?)
        });
    }
}

#[test]
fn what_one_rank_cannot_ask_for_is_refused_on_all_and_the_communicator_goes_on() {
    let case = late(Layout::Packed);
    on_ranks(options(&case), |mut comm| {
        let round = Round::new(&case, comm.rank());
        let live = round.dispatch(&mut comm)?;
        let output = exchange::run_experts(&case, comm.rank() as usize, &live.received)?;
        let refused = |error: tokenyard_core::Error, rank: u32, text: &str| {
            let expected = if rank == 0 { ErrorKind::InvalidInput } else { ErrorKind::Refused };
            assert_eq!(error.kind(), expected, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        };
        let rank = comm.rank();
        // A combine with its own weights: those of rank 0 have another shape.
        let mut buffers = exchange::Buffers::new(&round.tensors, &output);
        let wrong = [0.0_f32; 3];
        let mut call = buffers.arguments(&round.tensors, &live.handle)?;
        if rank == 0 {
            call.topk.as_mut().unwrap().weights = TensorRef::from_slice(&wrong, 1, 3)?;
        }
        refused(
            comm.combine(&live.handle, call).unwrap_err(),
            rank,
            "topk weights: found shape [1, 3]",
        );
        // Replayed rows that are too wide.
        let wide = vec![0.0_f32; live.handle.tokens() * 2 * case.hidden];
        let columns = if rank == 0 { 2 * case.hidden } else { 4 };
        let x = TensorRef::from_slice(
            &wide[..live.handle.tokens() * columns],
            live.handle.tokens(),
            columns,
        )?;
        let replay = Replay::new(x);
        refused(comm.replay(&live.handle, &replay).unwrap_err(), rank, "found rows of 512 numbers");
        // More tokens than the call allows.
        let dispatch = round.tensors.dispatch()?;
        let few = Dispatch { max_tokens: Some(if rank == 0 { 3 } else { 16 }), ..dispatch };
        refused(comm.dispatch(&few).unwrap_err(), rank, "expected at most max_tokens = 3");
        let none = Dispatch { max_tokens: Some(if rank == 0 { 17 } else { 16 }), ..dispatch };
        refused(comm.dispatch(&none).unwrap_err(), rank, "max_tokens: found 17");
        round.finish(&mut comm, &live)?;
        drop(live);
        Ok(comm.close()?)
    });
}

#[test]
fn ranks_that_bound_their_tokens_differently_receive_an_error() {
    let case = late(Layout::Flat);
    let case = Case { combine: Case::default().combine, ..case };
    on_ranks(options(&case), |mut comm| {
        let round = Round::new(&case, comm.rank());
        let own = Case { max_tokens: 8 + comm.rank() as usize, ..case.clone() };
        let few = Round::new(&own, comm.rank());
        let dispatch = Dispatch { sizes: Sizes::Exact, ..few.tensors.dispatch()? };
        let error = comm.dispatch(&dispatch).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        let text = error.to_string();
        assert!(text.contains("at most 8 tokens") && text.contains("at most 9 tokens"), "{text}");
        drop(round);
        Ok(())
    });
}

#[test]
fn ranks_choose_the_forms_of_packed_arrays_by_themselves_and_anew_in_a_replay() {
    let input = Input::Cast(RowType::Bf16, Scales::F32);
    let base = Case {
        layout: Layout::Packed,
        input,
        combine: Case::default().combine,
        ..late(Layout::Packed)
    };
    on_ranks(options(&base), |mut comm| {
        let mine = |turn: u32| {
            let odd = |n: u32| n % 2 == 1;
            let (scale_columns, source_tokens) =
                (odd(comm.rank() + turn), odd(comm.rank() / 2 + turn));
            Case { scale_columns, source_tokens, ..base.clone() }
        };
        let rounds = [0, 1].map(|turn| Round::new(&mine(turn), comm.rank()));
        let live = rounds[0].dispatch(&mut comm)?;
        let again = comm.replay(&live.handle, &rounds[1].tensors.replay()?)?;
        exchange::check_received(&rounds[1].case, &rounds[1].inputs, comm.rank() as usize, &again)?;
        rounds[0].finish(&mut comm, &live)?;
        drop((again, live));
        Ok(comm.close()?)
    });
}

#[test]
fn forms_that_rows_of_other_layouts_do_not_have_are_refused_by_name_on_all_ranks() {
    for layout in [Layout::Flat, EXPERT_MAJOR, Layout::RankMajor { zero_padding: false }] {
        let case = Case { combine: Case::default().combine, ..late(layout) };
        on_ranks(options(&case), |mut comm| {
            let round = Round::new(&case, comm.rank());
            let plain = round.tensors.dispatch()?;
            let columns = Dispatch { scale_layout: ScaleLayout::ColumnMajor, ..plain };
            let tokens = Dispatch { source_index: SourceIndex::Token, ..plain };
            for (wrong, name) in [
                (columns, "scale_layout: found column-major with"),
                (tokens, "source_index: found tokens alone with"),
            ] {
                let call = if comm.rank() == 0 { wrong } else { plain };
                let error = comm.dispatch(&call).unwrap_err();
                let own = comm.rank() == 0;
                let kind = if own { ErrorKind::InvalidInput } else { ErrorKind::Refused };
                assert_eq!(error.kind(), kind, "{error}");
                assert!(error.to_string().contains(name), "{error}");
            }
            let live = round.dispatch(&mut comm)?;
            let again = round.tensors.replay()?;
            let wrong = Replay { source_index: SourceIndex::Token, ..again };
            let call = if comm.rank() == 0 { wrong } else { again };
            let error = comm.replay(&live.handle, &call).unwrap_err();
            assert!(error.to_string().contains("source_index: found tokens alone"), "{error}");
            round.finish(&mut comm, &live)?;
            drop(live);
            Ok(comm.close()?)
        });
    }
}

#[test]
fn a_kernel_set_without_masks_of_live_ranks_is_not_asked_for_them_and_the_communicator_goes_on() {
    let case = late(Layout::Flat);
    on_ranks(options(&case), |mut comm| {
        let round = Round::new(&case, comm.rank());
        let mut masks = comm.masks();
        let found = [masks.ranks(), masks.mask(1).map(|()| vec![]), masks.clear().map(|()| vec![])];
        for error in found.map(Result::unwrap_err) {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains("leaves out lost ranks alone"), "{error}");
        }
        round.dispatch(&mut comm)?;
        Ok(comm.close()?)
    });
}
