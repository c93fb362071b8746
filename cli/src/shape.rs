//! `tokenyard shape`: the memory that a shape costs, and its traffic among several domains.

mod recorded;
mod traffic;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use serde::Serialize;
use tokenyard_bench::levels::TwoLevels;
use tokenyard_core::abi;
use tokenyard_core::moe::{Layout, RecvPlan, RowFormat, SendPlan, Shape, buffers};
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES};
use tokenyard_cpu::kernels::{CpuConfig, Spread, WindowSizes, handle_bytes};
use tokenyard_machine::bytes;

use crate::layout::LayoutName;
use crate::output::{People, SCHEMA_VERSION, Style, Table, print_json};
use recorded::RankTraffic;
use traffic::{AskedExchange, Traffic, TrafficArgs};

const EXAMPLES: &str = "\
Examples:
  tokenyard shape --ranks 8 --experts 256 --topk 8 --hidden 7168 --max-tokens 4096
  tokenyard shape --ranks 8 --experts 256 --topk 8 --hidden 7168 --max-tokens 128 \\
      --dtype fp8 --layout packed --in-flight 2 --json
  tokenyard shape --ranks 64 --domains 8 --experts 256 --topk 8 --hidden 7168 \\
      --max-tokens 4096 --dtype fp8 --groups 8 --topk-groups 4

With --domains, bytes, commands, times and SMs of a rank follow, for worlds of up to 2048 ranks:
the model of docs/two-levels.md, no measurement.
Regions are those of the worst case: every token goes to every rank it can. Windows are what the
cpu kernel set asks for; it takes memory only where it is touched.";

/// A put that no row exceeds; any value that is large enough would do.
const LARGEST_PUT: u64 = 1 << 40;
/// Channels that share a scale.
const GROUP: u32 = 128;

/// Arguments of `tokenyard shape`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ShapeArgs {
    /// R: ranks in the world.
    #[arg(long)]
    ranks: u32,
    /// E: experts on all ranks together.
    #[arg(long)]
    experts: u32,
    /// K: experts that each token selects.
    #[arg(long)]
    topk: u32,
    /// H: elements of a token's row.
    #[arg(long)]
    hidden: u32,
    /// M: the most tokens of a rank.
    #[arg(long)]
    max_tokens: u32,
    /// The type of received rows.
    #[arg(long, value_enum, default_value_t = RowName::Bf16)]
    dtype: RowName,
    /// Only this layout [default: all].
    #[arg(long, value_enum)]
    layout: Option<LayoutName>,
    /// The alignment of each expert's group in rows (expert-major).
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    alignment: u32,
    /// Operations that may be sent and not yet received.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    in_flight: u32,
    /// Dispatches whose handles are alive at a time.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    handles: u32,
    /// D: domains that the ranks are in, with puts between them.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    domains: u32,
    /// The path of rows to peers of the domain: stored in place, or put from a staging area.
    #[arg(long, value_enum, default_value_t = PathName::LoadStore)]
    path: PathName,
    #[command(flatten)]
    traffic: TrafficArgs,
    /// Print one JSON document as the last line of standard output; the rest goes to standard error.
    #[arg(long)]
    json: bool,
}

/// Rows as they are received.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum RowName {
    Bf16,
    Fp16,
    Fp32,
    /// FP8 with one f32 scale per 128 elements.
    Fp8,
    /// FP8 with scales packed as exponents.
    Fp8Ue8m0,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PathName {
    LoadStore,
    Put,
}

#[derive(Serialize)]
struct ShapeDocument<'a> {
    schema_version: u32,
    command: &'static str,
    /// The buffers of one rank.
    buffers: &'a [Buffer],
    /// Windows and handles of one rank.
    rank_bytes: u64,
    world_bytes: u64,
    /// With several domains.
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic: Option<&'a [Traffic]>,
    /// The traffic of each rank, with several domains and a recorded routing.
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded: Option<&'a [RankTraffic]>,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Buffer {
    name: String,
    bytes: u64,
    formula: String,
    /// Whether it counts in the total: regions lie within the arena window, for example.
    counts: bool,
}

pub(crate) fn main(args: &ShapeArgs) -> Result<ExitCode> {
    let shape = shape_of(args)?;
    let list = list(args, &shape)?;
    let asked = (args.domains > 1).then(|| asked(args, &shape)).transpose()?;
    let traffic = asked.map(|asked| args.traffic.of(&asked)).transpose()?;
    let input = args.traffic.input.as_deref();
    ensure!(input.is_none() || asked.is_some(), "found --input for one domain; expected --domains");
    let rates = args.traffic.rates();
    let recorded = input.zip(asked).map(|(path, asked)| recorded::of(path, &asked, &rates));
    let recorded = recorded.transpose()?;
    let counts = list.iter().filter(|b| b.counts).map(|b| b.bytes);
    let rank_bytes = counts.fold(0, u64::saturating_add);
    let world_bytes = rank_bytes.saturating_mul(u64::from(args.ranks));
    let people = People::new(args.json);
    print(&list, rank_bytes, world_bytes, people);
    if let (Some(asked), Some(traffic)) = (&asked, &traffic) {
        args.traffic.print(asked, traffic, people);
    }
    if let (Some(path), Some(recorded)) = (input, &recorded) {
        recorded::print(path, recorded, people);
    }
    if args.json {
        print_json(&ShapeDocument {
            schema_version: SCHEMA_VERSION,
            command: "shape",
            buffers: &list,
            rank_bytes,
            world_bytes,
            traffic: traffic.as_deref(),
            recorded: recorded.as_deref(),
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The requested shape, checked.
fn shape_of(args: &ShapeArgs) -> Result<Shape> {
    let shape = Shape {
        ranks: args.ranks,
        experts: args.experts,
        topk: args.topk,
        hidden: args.hidden,
        max_tokens: args.max_tokens,
    }
    .new()?;
    ensure!(
        shape.ranks.is_multiple_of(args.domains),
        "found {} domains; expected a divisor of {} ranks",
        args.domains,
        shape.ranks
    );
    Ok(shape)
}

/// The exchange whose traffic is asked for.
fn asked(args: &ShapeArgs, shape: &Shape) -> Result<AskedExchange> {
    let row = row_format(args)?;
    let is_cast = row.scale_bytes > 0;
    Ok(AskedExchange {
        levels: TwoLevels {
            domains: args.domains,
            domain_ranks: shape.ranks / args.domains,
            experts: shape.experts,
            topk: shape.topk,
        },
        max_tokens: shape.max_tokens,
        layout: match args.layout {
            None | Some(LayoutName::Flat) => Layout::Flat,
            Some(LayoutName::ExpertMajor) => {
                Layout::ExpertMajor { alignment: args.alignment, zero_padding: false }
            }
            Some(LayoutName::Packed) => Layout::Packed,
        },
        row,
        // Experts answer FP8 rows in bf16.
        back_bytes: if is_cast { 2 * row.x_bytes } else { row.x_bytes },
        stores: args.path == PathName::LoadStore,
    })
}

fn row_format(args: &ShapeArgs) -> Result<RowFormat> {
    let groups = args.hidden.div_ceil(GROUP);
    let (element, scale_bytes) = match args.dtype {
        RowName::Bf16 | RowName::Fp16 => (2, 0),
        RowName::Fp32 => (4, 0),
        RowName::Fp8 => (1, 4 * groups),
        RowName::Fp8Ue8m0 => (1, 4 * groups.div_ceil(4)),
    };
    let x_bytes = args.hidden.checked_mul(element).filter(|bytes| bytes.is_multiple_of(16));
    ensure!(
        x_bytes.is_some(),
        "found hidden = {}, elements of {element} bytes; expected rows of a multiple of 16 bytes, \
         less than 4 GiB",
        args.hidden
    );
    Ok(RowFormat { x_bytes: x_bytes.unwrap_or_default(), scale_bytes, weights: true })
}

fn list(args: &ShapeArgs, shape: &Shape) -> Result<Vec<Buffer>> {
    let layout = args.layout.map(|layout| match layout {
        LayoutName::Flat => "flat region",
        LayoutName::ExpertMajor => "expert-major region",
        LayoutName::Packed => "packed region",
    });
    let mut list: Vec<Buffer> = buffers(shape, row_format(args)?, args.alignment, args.in_flight)?
        .into_iter()
        .filter(|b| !b.name.contains("region") || layout.is_none_or(|l| b.name.starts_with(l)))
        .filter(|b| b.name != "send plan" || args.domains == 1)
        .map(|b| Buffer { counts: false, name: b.name, bytes: b.bytes, formula: b.formula })
        .collect();
    if args.domains > 1 {
        list.extend(domain_plans(args.domains, shape));
    }
    list.push(handles(args, shape));
    list.extend(windows(args, shape)?);
    Ok(list)
}

/// The plans that replace the send plan where there are several domains.
fn domain_plans(domains: u32, shape: &Shape) -> [Buffer; 3] {
    let ranks = shape.ranks / domains;
    let inside = Shape { ranks, experts: shape.experts / domains, ..*shape };
    let rail = Shape { ranks: domains, ..*shape };
    let plan = |name: &str, bytes, formula: &str| Buffer {
        name: name.to_owned(),
        bytes,
        formula: formula.to_owned(),
        counts: false,
    };
    let bytes = u64::from(domains) * SendPlan::bytes_for(&inside);
    [
        plan("send plans inside the domain", bytes, "D send plans for S = R/D ranks, E/D experts"),
        plan("send plan between domains", SendPlan::bytes_for(&rail), "one for D ranks, E experts"),
        plan("receive plan between domains", RecvPlan::bytes_for(&rail), "for D ranks, E experts"),
    ]
}

/// The routing that handles store.
fn handles(args: &ShapeArgs, shape: &Shape) -> Buffer {
    let routing = "4 * M*K of routing, 24 * S of places, 4 * E/D of bases";
    let of_domains = match args.domains {
        1 => "",
        _ => "; and 4 * M*K, 24 * D and 4 * E between domains",
    };
    Buffer {
        name: "handles".to_owned(),
        bytes: u64::from(args.handles) * handle_bytes(shape, args.domains),
        formula: format!("{} * (the plans above; D times {routing}{of_domains})", args.handles),
        counts: true,
    }
}

/// The windows that the cpu kernel set registers with its transports.
fn windows(args: &ShapeArgs, shape: &Shape) -> Result<Vec<Buffer>> {
    let flags = if args.path == PathName::LoadStore { abi::TY_CAP_LOAD_STORE } else { 0 };
    let limits = Capabilities { largest_put: LARGEST_PUT, flags, ..NO_CAPABILITIES };
    let spread = Spread { in_flight: args.in_flight, domains: args.domains };
    let sizes = WindowSizes::new(shape, spread, [&limits; 2], &CpuConfig::default())?;
    let part = |name: &str, bytes, formula: &str, counts| Buffer {
        name: name.to_owned(),
        bytes,
        formula: formula.to_owned(),
        counts,
    };
    let mut list = vec![
        part(
            "staging",
            sizes.stage_bytes * u64::from(args.domains),
            "D * M * min(K, R/D) rows of fp32 with their side arrays, per operation; 0 with load/store",
            false,
        ),
        part(
            "landing places",
            sizes.landing_pitch * u64::from(shape.ranks),
            "R * M rows of fp32 with their side arrays, per operation (packed layout)",
            false,
        ),
    ];
    if args.domains > 1 {
        list.extend([
            part(
                "rail records",
                2 * sizes.rail_records.bytes,
                "2 * D * 2 records of 256 bytes, per operation",
                false,
            ),
            part(
                "rail staging",
                sizes.rail_stage_bytes,
                "M * min(K, D) rows of fp32 with their side arrays, at least R, per operation",
                false,
            ),
            part(
                "rail landing places",
                sizes.landing_pitch * u64::from(args.domains),
                "D * M rows of fp32 with their side arrays, per operation",
                false,
            ),
        ]);
    }
    list.extend([
        part(
            "control window",
            sizes.control_bytes,
            "in flight * (2 * records + staging + landing places, and those of the rail)",
            true,
        ),
        part(
            "arena window",
            sizes.arena_bytes,
            "2 worst-case regions of the widest rows (fp32), at most 16 GiB, at least 4 flat ones, \
             6 with several domains",
            true,
        ),
    ]);
    Ok(list)
}

fn print(list: &[Buffer], rank: u64, world: u64, people: People) {
    let mut table = Table::folded(&["buffer", "bytes", "", "how it comes about"]);
    for buffer in list {
        let human = bytes(buffer.bytes);
        // The unit makes this column text, so that only the column of bytes is aligned as numbers.
        let cells = [buffer.name.as_str().into(), buffer.bytes.into(), format!("= {human}").into()];
        table.row(cells.into_iter().chain([buffer.formula.as_str().into()]));
    }
    people.say(table.render(people));
    let total = |bytes_of: u64| people.paint(Style::Strong, bytes(bytes_of));
    people.say(format_args!(
        "\none rank: {} (windows and handles; regions lie in the arena,\n    the control area in the \
         control window)\nall ranks: {}",
        total(rank),
        total(world)
    ));
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use proptest::prelude::*;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: ShapeArgs,
    }

    fn args(more: &str) -> ShapeArgs {
        let base = "shape --ranks 4 --experts 16 --topk 2 --hidden 256 --max-tokens 8";
        let words = base.split_whitespace().chain(more.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.args).unwrap()
    }

    fn buffer(more: &str, name: &str) -> Option<Buffer> {
        let args = args(more);
        let shape =
            Shape { ranks: 4, experts: 16, topk: 2, hidden: 256, max_tokens: 8 }.new().unwrap();
        list(&args, &shape).unwrap().into_iter().find(|b| b.name == name)
    }

    #[test]
    fn the_rows_of_a_region_follow_the_type() {
        let x = |more: &str| buffer(more, "flat region: x").unwrap().bytes;
        assert_eq!(x(""), 4 * 8 * 512);
        assert_eq!(x("--dtype fp32"), 4 * 8 * 1024);
        assert_eq!(x("--dtype fp8"), 4 * 8 * 256);
        let scales = |more: &str| buffer(more, "flat region: scales").map(|b| b.bytes);
        assert_eq!(scales("--dtype fp8"), Some(4 * 8 * 2 * 4));
        assert_eq!(scales("--dtype fp8-ue8m0"), Some(4 * 8 * 4));
        assert_eq!(scales(""), None);
    }

    #[test]
    fn one_layout_can_be_asked_for() {
        assert!(buffer("--layout packed", "flat region: x").is_none());
        assert!(buffer("--layout packed", "packed region: x").is_some());
        assert!(buffer("--layout packed", "control area").is_some());
    }

    #[test]
    fn staging_is_needed_only_where_rows_are_put() {
        assert_eq!(buffer("", "staging").unwrap().bytes, 0);
        assert!(buffer("--path put", "staging").unwrap().bytes > 0);
    }

    #[test]
    fn several_domains_need_room_for_the_rail() {
        assert!(buffer("", "rail staging").is_none());
        let bytes = |name| buffer("--domains 2", name).unwrap().bytes;
        assert!(bytes("rail staging") > 0);
        assert_eq!(2 * bytes("rail landing places"), bytes("landing places"));
        let slot = bytes("control area") + bytes("landing places") * 2 + 2 * bytes("rail records");
        let rail = 2 * bytes("rail staging") + 2 * bytes("rail landing places");
        assert_eq!(bytes("control window"), slot + bytes("control area") + rail);
    }

    #[test]
    fn handles_cost_what_their_number_and_the_domains_make_of_it() {
        let bytes = |more: &str| buffer(more, "handles").unwrap().bytes;
        assert_eq!(bytes("--handles 16"), 2 * bytes(""));
        let plans =
            buffer("", "send plan").unwrap().bytes + buffer("", "receive plan").unwrap().bytes;
        // Routing, places of 24 bytes, first rows.
        assert_eq!(bytes("--handles 1"), plans + 4 * 8 * 2 + 24 * 4 + 4 * 16);
        let plans: u64 = [
            "send plans inside the domain",
            "send plan between domains",
            "receive plan between domains",
            "receive plan",
        ]
        .map(|name| buffer("--domains 2", name).unwrap().bytes)
        .iter()
        .sum();
        let routing = 2 * (4 * 8 * 2 + 24 * 2 + 4 * 8) + 4 * 8 * 2 + 24 * 2 + 4 * 16;
        assert_eq!(bytes("--domains 2 --handles 1"), plans + routing);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// Sizes near a power of two, or near zero, where sums and products may overflow.
        #[test]
        fn extreme_sizes_are_refused_or_summed_up_but_never_overflow(
            sizes in prop::array::uniform5((0_u32..33, 0_u32..3)),
            (alignment, in_flight, handles) in (1_u32..=4096, 1_u32..=16, 1_u32..=1024),
            (domains, put, dtype) in (0_u32..33, any::<bool>(), 0_usize..5),
            groups in 0_u32..11,
        ) {
            let [ranks, experts, topk, hidden, max_tokens] =
                sizes.map(|(bits, off)| (1_u64 << bits).saturating_sub(off.into()) as u32);
            let path = if put { PathName::Put } else { PathName::LoadStore };
            let dtype = *RowName::value_variants().get(dtype).unwrap();
            let domains = (1_u64 << domains).min(u32::MAX.into()) as u32;
            let json = true;
            let layout = None;
            let traffic = args(&format!("--groups {}", 1_u32 << groups)).traffic;
            let args = ShapeArgs {
                ranks, experts, topk, hidden, max_tokens, dtype, layout, alignment, in_flight,
                handles, domains, path, traffic, json,
            };
            let asked = shape_of(&args).and_then(|shape| asked(&args, &shape));
            if let Ok(all) = asked.and_then(|asked| args.traffic.of(&asked)) {
                prop_assert!(all.iter().all(Traffic::is_finite));
            }
            if let Ok(all) = shape_of(&args).and_then(|shape| list(&args, &shape)) {
                let all = all.iter().map(|buffer| buffer.bytes).collect::<Vec<_>>();
                // Every expert has a count in the records of both directions, on every rank.
                prop_assert!(all.iter().max().unwrap() >= &(16 * u64::from(experts)));
            }
        }
    }

    #[test]
    fn a_row_that_cannot_cross_is_refused() {
        let mut args = args("--dtype fp8");
        args.hidden = 24;
        assert!(row_format(&args).unwrap_err().to_string().contains("hidden = 24"));
        args.dtype = RowName::Bf16;
        assert!(row_format(&args).is_ok());
        args.hidden = u32::MAX;
        assert!(row_format(&args).is_err());
    }
}
