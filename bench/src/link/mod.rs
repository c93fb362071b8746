//! One link, bare and with tokenyard on top: latency and bandwidth between two ranks.
//!
//! The bare link is libfabric or libibverbs by direct calls (`raw`), without tokenyard in between.
//! The same run measures, turn by turn, the transport (`through`) and the dispatch of a
//! communicator. For all bandwidths both ranks send at once, as in an exchange.

mod raw;
mod through;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Cast, Communicator};
use tokenyard_core::config::{ComponentChoice, Config};
use tokenyard_core::moe::Layout;

use crate::job::{Output, Sizes};
use crate::ranks::Speaker;
use crate::spread::median;
use crate::workload::Workload;
use raw::Raw as _;
use through::Through;

/// The fraction of the bare link's bandwidth that large puts through the transport must reach.
pub const REQUIRED_LARGE: f64 = 0.9;
/// The highest ratio of a small put's latency through the transport, driven inline, to that on the
/// bare link.
pub const REQUIRED_SMALL: f64 = 1.3;
/// The fraction of the bare link's bandwidth that a dispatch must reach.
pub const REQUIRED_DISPATCH: f64 = 0.6;

/// Bytes of a large put.
pub const LARGE: usize = 1 << 20;
/// Bytes of a small put.
pub const SMALL: usize = 8;
/// Large puts in flight, and room for as many on the other side.
const DEPTH: usize = 16;
/// Longest wait for the other rank.
const PATIENCE: Duration = Duration::from_secs(30);

/// The task of the two ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LinkTask {
    /// Turns; each measures everything once.
    pub turns: u32,
    /// Round trips of small puts per turn.
    pub pings: u32,
    /// Large puts per turn and rank.
    pub puts: u32,
    /// Sizes of the dispatch.
    pub sizes: Sizes,
}

impl LinkTask {
    /// `turns` turns, at least 1, with a dispatch of `sizes`.
    pub fn new(sizes: Sizes, turns: u32) -> Self {
        Self { turns, pings: 1000, puts: 64, sizes }
    }

    pub(crate) fn check(&self) -> Result<()> {
        ensure!(self.turns > 0, "check bench: found 0 samples; expected at least 1");
        Workload::shape(&self.sizes, 2)?;
        Ok(())
    }
}

/// Times of one turn on one rank.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Turn {
    /// Half of a round trip, in microseconds.
    raw_us: f64,
    through_us: f64,
    /// Bytes that this rank sent per second.
    raw_bytes_s: f64,
    through_bytes_s: f64,
    dispatch_bytes_s: f64,
}

/// The figures of one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LinkFigures {
    /// Library, provider or device, and interface of the bare link.
    pub bare: String,
    /// The transport and its own description of the link.
    pub link: String,
    /// Whether the transport was driven by the caller.
    pub inline: bool,
    /// The turns, in order.
    pub turns: Vec<Turn>,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub struct LinkRow {
    /// `8-byte latency`, `1 MiB bandwidth` or `dispatch bandwidth`.
    pub what: &'static str,
    /// `us` or `GB/s per rank`.
    pub unit: &'static str,
    /// Library, provider or device, and interface of the bare link.
    pub bare_link: String,
    /// The transport and its link.
    pub link: String,
    /// Median on the bare link.
    pub bare: f64,
    /// Median through tokenyard.
    pub ours: f64,
    /// Median over the turns of ours / bare.
    pub ratio: f64,
    /// The ratio to reach, or for a latency not to exceed; none where there is no requirement.
    pub required: Option<f64>,
}

impl LinkRow {
    /// Whether the requirement holds.
    pub fn holds(&self) -> bool {
        let (latency, ratio) = (self.is_latency(), self.ratio);
        self.required.is_none_or(|bound| if latency { ratio <= bound } else { ratio >= bound })
    }

    fn is_latency(&self) -> bool {
        self.unit == "us"
    }

    /// Its requirement in tables.
    pub(crate) fn requirement(&self) -> String {
        let sign = if self.is_latency() { "<=" } else { ">=" };
        self.required.map_or_else(|| "-".to_owned(), |bound| format!("{sign} {bound}"))
    }
}

/// The transport of the config that connects hosts.
fn choice(config: &Config) -> Result<&ComponentChoice> {
    let choice = config.scale_out.first().or(config.scale_up.as_ref());
    choice.context("find the link: the config names no transport")
}

/// The work of one rank.
pub(crate) fn measure(
    world: &Arc<World>,
    config: &Config,
    task: &LinkTask,
    say: &Speaker,
) -> Result<LinkFigures> {
    ensure!(world.ranks() == 2, "a link has two ends: found {} ranks; expected 2", world.ranks());
    let choice = choice(config)?;
    let mut bare = raw::open(world, choice).context("open the bare link")?;
    let mut through = Through::open(world, config, choice).context("open the transport")?;
    let mut comm = Communicator::open(world, &direct(config), Workload::options(&task.sizes))?;
    let workload = Workload::new(&task.sizes, world.rank(), 2);
    let mut turns = Vec::new();
    // The first turn touches memory and opens connections; it does not count.
    for turn in 0..=task.turns {
        say.progress(turn.into(), task.turns.into())?;
        let figures = Turn {
            raw_us: us(align(world, || raw::ping(&mut *bare, task.pings))?, 2 * task.pings),
            through_us: us(align(world, || through.ping(task.pings))?, 2 * task.pings),
            raw_bytes_s: rate(align(world, || raw::stream(&mut *bare, task.puts))?, large(task)),
            through_bytes_s: rate(
                align(world, || raw::stream(&mut through, task.puts))?,
                large(task),
            ),
            dispatch_bytes_s: dispatch(world, &mut comm, &workload, &task.sizes)?,
        };
        if turn > 0 {
            turns.push(figures);
        }
    }
    let figures =
        LinkFigures { bare: bare.name(), link: through.name(), inline: through.is_inline(), turns };
    comm.close()?;
    world.barrier("link measured")?;
    Ok(figures)
}

/// The config with both ranks on the one link, wherever they are.
fn direct(config: &Config) -> Config {
    let mut config = config.clone();
    if !config.scale_out.is_empty() {
        config.scale_up = None;
    }
    config
}

fn align(world: &World, measured: impl FnOnce() -> Result<Duration>) -> Result<Duration> {
    world.barrier("turn")?;
    measured()
}

/// Bytes of rows per second that this rank sent to the other.
fn dispatch(
    world: &World,
    comm: &mut Communicator,
    workload: &Workload,
    sizes: &Sizes,
) -> Result<f64> {
    let arguments = workload.dispatch(Layout::Flat, Cast::None)?;
    world.barrier("turn")?;
    let start = Instant::now();
    let (received, _handle) = comm.dispatch(&arguments)?;
    let took = start.elapsed();
    workload.check(&received)?;
    let rows = workload.sends()[1 - world.rank() as usize];
    Ok(rate(took, rows * u64::from(sizes.hidden) * 2))
}

fn large(task: &LinkTask) -> u64 {
    u64::from(task.puts) * LARGE as u64
}

fn us(took: Duration, puts: u32) -> f64 {
    took.as_secs_f64() * 1e6 / f64::from(puts.max(1))
}

fn rate(took: Duration, bytes: u64) -> f64 {
    bytes as f64 / took.as_secs_f64().max(1e-9)
}

/// The lines from the figures of both ranks.
pub(crate) fn rows(outputs: &[Output]) -> Result<Vec<LinkRow>> {
    let [Output::Link(first), Output::Link(second)] = outputs else {
        bail!("found the figures of {} ranks; expected the figures of 2", outputs.len());
    };
    ensure!(first.turns.len() == second.turns.len(), "the ranks measured different turns");
    // For a bandwidth, the slower end counts. A round trip is the same for both ends.
    let pairs = || first.turns.iter().zip(&second.turns);
    let slower = |of: fn(&Turn) -> f64| pairs().map(|(a, b)| of(a).min(of(b))).collect::<Vec<_>>();
    let one = |of: fn(&Turn) -> f64| first.turns.iter().map(of).collect::<Vec<_>>();
    let gb = |values: Vec<f64>| values.into_iter().map(|v| v / 1e9).collect::<Vec<_>>();
    let bare_gb = gb(slower(|t| t.raw_bytes_s));
    let middle = |values: &[f64]| median(values.iter().copied()).unwrap_or(f64::NAN);
    let row = |what, unit, (bare, ours): (&[f64], &[f64]), required| {
        let ratios: Vec<f64> = ours.iter().zip(bare).map(|(ours, bare)| ours / bare).collect();
        LinkRow {
            what,
            unit,
            bare_link: first.bare.clone(),
            link: first.link.clone(),
            bare: middle(bare),
            ours: middle(ours),
            ratio: middle(&ratios),
            required,
        }
    };
    let (raw_us, through_us) = (one(|t| t.raw_us), one(|t| t.through_us));
    let (through_gb, dispatch_gb) =
        (gb(slower(|t| t.through_bytes_s)), gb(slower(|t| t.dispatch_bytes_s)));
    let small = first.inline.then_some(REQUIRED_SMALL);
    const GB: &str = "GB/s per rank";
    Ok(vec![
        row("8-byte latency", "us", (&raw_us, &through_us), small),
        row("1 MiB bandwidth", GB, (&bare_gb, &through_gb), Some(REQUIRED_LARGE)),
        row("dispatch bandwidth", GB, (&bare_gb, &dispatch_gb), Some(REQUIRED_DISPATCH)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(scale: f64) -> Output {
        let turn = |raw_us| Turn {
            raw_us,
            through_us: 1.2 * raw_us,
            raw_bytes_s: 2e9 * scale,
            through_bytes_s: 1.9e9 * scale,
            dispatch_bytes_s: 1e9 * scale,
        };
        Output::Link(LinkFigures {
            bare: "tcp".into(),
            link: "libfabric".into(),
            inline: true,
            turns: [10.0, 12.0, 11.0].map(turn).to_vec(),
        })
    }

    #[test]
    fn the_slower_end_counts_and_requirements_are_judged_by_their_direction() {
        let rows = rows(&[figures(1.0), figures(0.5)]).unwrap();
        assert_eq!((rows[0].bare, rows[0].holds()), (11.0, true));
        assert!((rows[1].bare - 1.0).abs() < 1e-9 && rows[1].holds());
        assert!((rows[2].ratio - 0.5).abs() < 1e-9 && !rows[2].holds());
    }

    #[test]
    fn a_link_has_two_ends() {
        assert!(
            rows(&[figures(1.0)]).unwrap_err().to_string().contains("expected the figures of 2")
        );
    }
}
