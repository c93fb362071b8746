//! x
use std::sync::Arc;
use std::time::Instant;
use tokenyard_conformance::{
    device::Copies,
    exchange,
    oracle::{Case, Combine, Input, Layout, Routing, RowType, Scales, Tokens},
    round::Round,
};
use tokenyard_core::{bootstrap::World, config::Config, yard::Yard};
fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(std::env::var("TOKENYARD_LOG").unwrap_or_default())
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    tokenyard_cpu::link();
    tokenyard_cuda::link();
    let config = Config::load(std::path::Path::new(&std::env::args().nth(1).unwrap()))?;
    let tokens: usize = std::env::args().nth(2).unwrap().parse()?;
    let world = Arc::new(World::from_config(&config.world)?);
    let ranks = world.ranks() as usize;
    for (name, input, layout) in [
        ("bf16 flat", Input::Plain(RowType::Bf16), Layout::Flat),
        ("fp8 opaque flat", Input::Opaque(56), Layout::Flat),
        (
            "bf16 expert",
            Input::Plain(RowType::Bf16),
            Layout::ExpertMajor { alignment: 128, zero_padding: false },
        ),
        ("bf16 cast fp8 flat", Input::Cast(RowType::Bf16, Scales::F32), Layout::Flat),
    ] {
        let case = Case {
            ranks,
            experts: 32 * ranks,
            topk: 8,
            hidden: 7168,
            max_tokens: tokens,
            tokens: Tokens::Full,
            routing: Routing::Uniform,
            input,
            layout,
            weights: true,
            combine: Combine { row: RowType::Bf16, biases: 0, weighted: false },
            ..Case::default()
        };
        let mut yard = Yard::open(&world, &config, exchange::options(&case))?;
        let round = Round::new(&case, yard.rank());
        let call = round.brought.dispatch_on(&yard)?;
        let (mut d, mut c) = (Vec::new(), Vec::new());
        let mut rows = 0;
        let mut out = yard.buffer(&vec![0u8; tokens * 7168 * 2])?;
        for _ in 0..30 {
            world.barrier("go")?;
            let t = Instant::now();
            let (received, handle) = yard.dispatch(&call)?;
            d.push(t.elapsed().as_secs_f64() * 1e6);
            rows = received.tokens();
            if matches!(input, Input::Plain(_)) {
                let host = tokenyard_core::yard::Combine {
                    x: received.x(),
                    weights: None,
                    bias: [None, None],
                    weighted: false,
                    out: out.tensor_mut(tokenyard_core::moe::DType::Bf16, [tokens, 7168])?,
                    out_weights: None,
                    missing: None,
                };
                world.barrier("go")?;
                let t = Instant::now();
                yard.combine(&handle, host)?;
                c.push(t.elapsed().as_secs_f64() * 1e6);
            }
        }
        d.sort_by(f64::total_cmp);
        c.sort_by(f64::total_cmp);
        if world.rank() == 0 {
            println!(
                "{name}: rows {rows} dispatch median {:.0} us min {:.0}; combine median {:.0} us min {:.0}",
                d[15],
                d[0],
                c.get(15).unwrap_or(&0.0),
                c.first().unwrap_or(&0.0)
            );
        }
        let _ = Copies::default();
        drop(call);
        drop(round);
        yard.close()?;
    }
    Ok(())
}
