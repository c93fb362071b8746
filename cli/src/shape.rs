//! `tokenyard shape`: the memory that a shape costs, and its traffic among several domains.

mod recorded;
mod summary;
mod traffic;
mod windows;

use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use serde::Serialize;
use tokenyard_bench::levels::TwoLevels;
use tokenyard_core::moe::{Layout, Quant, RecvPlan, RowFormat, SendPlan, Shape, buffers};
use tokenyard_cpu::kernels::handle_bytes;
use tokenyard_machine::bytes;

use crate::layout::LayoutName;
use crate::output::{People, Table, print_document};
use recorded::RankTraffic;
use traffic::{AskedExchange, Traffic, TrafficArgs};

const EXAMPLES: &str = "\
Examples:
  tokenyard shape --ranks 8 --experts 256 --topk 8 --hidden 7168 --max-tokens 4096
  tokenyard shape --kernels cuda --ranks 8 --experts 256 --topk 8 --hidden 7168 \\
      --max-tokens 4096 --card-memory 80
  tokenyard shape --ranks 8 --experts 256 --topk 8 --hidden 7168 --max-tokens 128 \\
      --dtype fp8 --layout packed --in-flight 2 --json
  tokenyard shape --ranks 8 --experts 256 --topk 8 --hidden 7168 --max-tokens 4096 \\
      --layout expert-major --alignment 128 --max-rows 49152
  tokenyard shape --ranks 64 --domains 8 --experts 256 --topk 8 --hidden 7168 \\
      --max-tokens 4096 --dtype fp8 --groups 8 --topk-groups 4

With --domains, bytes, commands, times and SMs of a rank follow, for worlds of up to 2048 ranks:
the model of docs/two-levels.md, no measurement.
Regions are those of the worst case: every token goes to every rank it can. Windows are what the
kernel set asks for. The cpu kernel set takes memory only where it is touched; on a GPU all of it is
taken. No GPU is needed to compute them.";

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
    /// The kernel set.
    #[arg(long, value_enum, default_value_t = KernelsName::Cpu)]
    kernels: KernelsName,
    /// The memory of one GPU in GiB, to warn where the windows leave little of it [default: 80, with `rocm` 192].
    #[arg(long, value_name = "GIB", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    card_memory: Option<u32>,
    /// On GPUs: the size of the arena, as `arena_mib` of the config.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=65_536))]
    arena_mib: Option<u64>,
    /// On GPUs: packed rows move as with `decode = "low_latency"`.
    #[arg(long)]
    low_latency: bool,
    /// On GPUs: what puts rows between domains.
    #[arg(long, value_enum, default_value_t = PutsName::Host)]
    between: PutsName,
    /// The type of received rows.
    #[arg(long, value_enum, default_value_t = RowName::Bf16)]
    dtype: RowName,
    /// Only this layout [default: all].
    #[arg(long, value_enum)]
    layout: Option<LayoutName>,
    /// The alignment of each expert's group in rows (expert-major).
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    alignment: u32,
    /// P: a cap on flat and expert-major rows, as `max_rows` of a dispatch, of cpu kernels [default: none].
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u64).range(1..))]
    max_rows: Option<u64>,
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
enum KernelsName {
    Cpu,
    Cuda,
    Rocm,
}

/// The poster of rows of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PutsName {
    /// A thread of the host (`verbs`, `efa`, `libfabric`), from pinned memory of the host.
    Host,
    /// The kernels (`gin`, `ibgda`), from memory of the GPU.
    Gpu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PathName {
    LoadStore,
    Put,
}

#[derive(Serialize)]
struct ShapeDocument<'a> {
    kernels: &'static str,
    /// The buffers of one rank.
    buffers: &'a [Buffer],
    /// Windows and handles of one rank.
    rank_bytes: u64,
    world_bytes: u64,
    /// On GPUs: the part of `rank_bytes` that each GPU has, and that of a card that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<&'a summary::OnGpu>,
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
    /// Of a GPU's windows: it lies in pinned memory of the host.
    #[serde(skip)]
    in_host_memory: bool,
}

impl Buffer {
    /// One that does not count in the total.
    fn new(name: impl Into<String>, bytes: u64, formula: impl Into<String>) -> Self {
        let (name, formula) = (name.into(), formula.into());
        Self { name, bytes, formula, counts: false, in_host_memory: false }
    }
}

pub(crate) fn main(args: &ShapeArgs) -> Result<ExitCode> {
    let shape = shape_of(args)?;
    let list = list(args, &shape)?;
    let asked = (args.domains > 1).then(|| asked(args, &shape)).transpose()?;
    let traffic = asked.map(|asked| args.traffic.of(&asked)).transpose()?;
    let input = args.traffic.input.as_deref();
    ensure!(
        input.is_none() || asked.is_some(),
        "read options: found --input for one domain; expected --domains"
    );
    let rates = args.traffic.rates();
    let recorded = input.zip(asked).map(|(path, asked)| recorded::of(path, &asked, &rates));
    let recorded = recorded.transpose()?;
    let rank_bytes = summary::total(&list, |_| true);
    let world_bytes = rank_bytes.saturating_mul(u64::from(args.ranks));
    let gpu = summary::OnGpu::of(args, &list);
    let people = People::new(args.json);
    summary::print(args, rank_bytes, gpu.as_ref(), people);
    print(&list, people);
    if let (Some(asked), Some(traffic)) = (&asked, &traffic) {
        args.traffic.print(asked, traffic, people);
    }
    if let (Some(path), Some(recorded)) = (input, &recorded) {
        recorded::print(path, recorded, people);
    }
    if args.json {
        let document = ShapeDocument {
            kernels: args.kernels.name(),
            buffers: &list,
            rank_bytes,
            world_bytes,
            gpu: gpu.as_ref(),
            traffic: traffic.as_deref(),
            recorded: recorded.as_deref(),
        };
        print_document("shape", &document)?;
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
        "read options: found {} domains; expected a divisor of {} ranks",
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
            Some(LayoutName::RankMajor) => Layout::RankMajor { zero_padding: false },
        },
        row,
        // Experts answer FP8 rows in bf16.
        back_bytes: if is_cast { 2 * row.x_bytes } else { row.x_bytes },
        stores: args.path == PathName::LoadStore,
    })
}

fn row_format(args: &ShapeArgs) -> Result<RowFormat> {
    let (element, scale_bytes) = match args.dtype {
        RowName::Bf16 | RowName::Fp16 => (2, 0),
        RowName::Fp32 => (4, 0),
        RowName::Fp8 => (1, Quant::FP8.scale_bytes(args.hidden)),
        RowName::Fp8Ue8m0 => (1, Quant::FP8_UE8M0.scale_bytes(args.hidden)),
    };
    let x_bytes = args.hidden.checked_mul(element).filter(|bytes| bytes.is_multiple_of(16));
    ensure!(
        x_bytes.is_some(),
        "read options: found hidden = {}, elements of {element} bytes; expected rows of a multiple of 16 bytes, \
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
        LayoutName::RankMajor => "rank-major region",
    });
    check_cap(args)?;
    let row = row_format(args)?;
    let buffers = buffers(shape, row, args.alignment, args.in_flight, args.max_rows)?;
    let mut list: Vec<Buffer> = buffers
        .into_iter()
        .filter(|b| !b.name.contains("region") || layout.is_none_or(|l| b.name.starts_with(l)))
        .filter(|b| b.name != "send plan" || args.domains == 1)
        // Plans and the control area are those of the cpu kernel set.
        .filter(|b| b.name.contains("region") || !args.kernels.is_gpu())
        .map(|b| Buffer::new(b.name, b.bytes, b.formula))
        .collect();
    if args.kernels.is_gpu() {
        list.extend(windows::of_gpu(args, shape)?);
        return Ok(list);
    }
    if args.domains > 1 {
        list.extend(domain_plans(args.domains, shape));
    }
    list.push(handles(args, shape));
    list.extend(windows::of_cpu(args, shape)?);
    Ok(list)
}

/// Checks that a cap is one that a dispatch can have.
fn check_cap(args: &ShapeArgs) -> Result<()> {
    let found = match args.layout {
        _ if args.max_rows.is_none() => return Ok(()),
        _ if args.kernels.is_gpu() => format!("--kernels {}", args.kernels.name()),
        _ if args.domains > 1 => format!("--domains {}", args.domains),
        Some(LayoutName::Packed) => "--layout packed".to_owned(),
        Some(LayoutName::RankMajor) => "--layout rank-major".to_owned(),
        None | Some(LayoutName::Flat | LayoutName::ExpertMajor) => return Ok(()),
    };
    bail!(
        "read options: found --max-rows with {found}; expected the cpu kernel set, one domain, and the flat or \
         expert-major layout"
    )
}

/// The plans that replace the send plan where there are several domains.
fn domain_plans(domains: u32, shape: &Shape) -> [Buffer; 3] {
    let ranks = shape.ranks / domains;
    let inside = Shape { ranks, experts: shape.experts / domains, ..*shape };
    let rail = Shape { ranks: domains, ..*shape };
    let bytes = u64::from(domains) * SendPlan::bytes_for(&inside);
    [
        Buffer::new(
            "send plans inside the domain",
            bytes,
            "D send plans for S = R/D ranks, E/D experts",
        ),
        Buffer::new(
            "send plan between domains",
            SendPlan::bytes_for(&rail),
            "one for D ranks, E experts",
        ),
        Buffer::new(
            "receive plan between domains",
            RecvPlan::bytes_for(&rail),
            "for D ranks, E experts",
        ),
    ]
}

/// The routing that handles store.
fn handles(args: &ShapeArgs, shape: &Shape) -> Buffer {
    let routing = "4 * M*K of routing, 36 * S of places, 4 * E/D of bases";
    let of_domains = match args.domains {
        1 => "",
        _ => "; and 4 * M*K, 36 * D and 4 * E between domains",
    };
    let formula = format!("{} * (the plans above; D times {routing}{of_domains})", args.handles);
    let bytes = u64::from(args.handles) * handle_bytes(shape, args.domains);
    Buffer { counts: true, ..Buffer::new("handles", bytes, formula) }
}

fn print(list: &[Buffer], people: People) {
    let mut table = Table::folded(&["buffer", "bytes", "", "how it comes about"]);
    for buffer in list {
        let human = bytes(buffer.bytes);
        // The unit makes this column text, so that only the column of bytes is aligned as numbers.
        let cells = [buffer.name.as_str().into(), buffer.bytes.into(), format!("= {human}").into()];
        table.row(cells.into_iter().chain([buffer.formula.as_str().into()]));
    }
    people.say(table.render(people));
}

impl KernelsName {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
        }
    }

    fn is_gpu(self) -> bool {
        self != Self::Cpu
    }
}

#[cfg(test)]
mod tests;
