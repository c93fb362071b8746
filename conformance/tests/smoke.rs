//! First light.
use tokenyard_conformance::exchange::{self, Placed};
use tokenyard_conformance::oracle::*;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::config::Config;
use tokenyard_core::yard::Yard;

fn config(load_store: bool, threads: u32) -> Config {
    Config::parse(
        &format!(
            "[world]\ndeadline_ms = 5000\nlate_ms = 10000\n[kernels]\nuse = \"cpu\"\n[kernels.cpu]\nthreads = {threads}\n[transport.scale_up]\nuse = \"shm\"\n[transport.scale_up.shm]\nload_store = {load_store}\n"
        ),
        "test",
    )
    .unwrap()
}

fn run(case: &Case, load_store: bool, threads: u32, placed: Placed) {
    tokenyard_cpu::link();
    case.validate().unwrap();
    let config = config(load_store, threads);
    let inputs = Inputs::all(case);
    let results = in_threads(case.ranks as u32, &config, |world| {
        let mut yard = Yard::open(world, &config, exchange::options(case))?;
        for _ in 0..3 {
            exchange::check(&mut yard, case, &inputs, placed)?;
        }
        anyhow::Ok(())
    })
    .unwrap();
    for (rank, r) in results.into_iter().enumerate() {
        if let Err(e) = r {
            panic!("{case} load_store={load_store}: rank {rank}: {e:#}");
        }
    }
}

#[test]
fn all_layouts_and_types() {
    for load_store in [true, false] {
        for layout in [
            Layout::Flat,
            Layout::ExpertMajor { alignment: 4, zero_padding: true },
            Layout::ExpertMajor { alignment: 1, zero_padding: false },
            Layout::Packed,
        ] {
            for input in [
                Input::Plain(RowType::Bf16),
                Input::Plain(RowType::F32),
                Input::Cast(RowType::Bf16, Scales::F32),
                Input::Cast(RowType::F16, Scales::Ue8m0),
                Input::Opaque(3),
            ] {
                for ranks in [1, 2, 4] {
                    let weighted = layout != Layout::Flat;
                    let case = Case {
                        ranks,
                        layout,
                        input,
                        topk: 3,
                        tokens: Tokens::Ragged,
                        routing: Routing::SomeNegative,
                        combine: Combine { row: RowType::Bf16, biases: ranks % 3, weighted },
                        worst_case: ranks == 2,
                        ..Case::default()
                    };
                    run(
                        &case,
                        load_store,
                        1 + ranks as u32 % 2,
                        if ranks == 4 { Placed::CombineInput } else { Placed::Outside },
                    );
                }
            }
        }
    }
}
