//! The windows of a kernel set: what a rank takes of its host, or of its GPU.

use anyhow::Result;
use tokenyard_core::abi;
use tokenyard_core::kernels::kernel_shape;
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES};
use tokenyard_cpu::kernels::{CpuConfig, Spread, WindowSizes};
use tokenyard_gpu::{Decode, Foreseen, GpuConfig, LinkPath};

use super::{Buffer, KernelsName, PathName, PutsName, ShapeArgs};

/// A put that no row exceeds; any value that is large enough would do.
const LARGEST_PUT: u64 = 1 << 40;

/// The windows that the cpu kernel set registers with its transports.
pub(super) fn of_cpu(args: &ShapeArgs, shape: &Shape) -> Result<Vec<Buffer>> {
    let flags = if args.path == PathName::LoadStore { abi::TY_CAP_LOAD_STORE } else { 0 };
    let limits = Capabilities { largest_put: LARGEST_PUT, flags, ..NO_CAPABILITIES };
    let spread = Spread { in_flight: args.in_flight, domains: args.domains };
    let sizes = WindowSizes::new(shape, spread, [&limits; 2], &CpuConfig::default())?;
    let mut list = vec![
        Buffer::new(
            "staging",
            sizes.stage_bytes * u64::from(args.domains),
            "D * M * min(K, R/D) rows of fp32 with their side arrays, per operation; 0 with load/store",
        ),
        Buffer::new(
            "landing places",
            sizes.landing_pitch * u64::from(shape.ranks),
            "R * M rows of fp32 with their side arrays, per operation (packed and rank-major)",
        ),
    ];
    if args.domains > 1 {
        list.extend([
            Buffer::new(
                "rail records",
                2 * sizes.rail_records.bytes,
                "2 * D * 2 records of 256 bytes, per operation",
            ),
            Buffer::new(
                "rail staging",
                sizes.rail_stage_bytes,
                "M * min(K, D) rows of fp32 with their side arrays, at least R, per operation",
            ),
            Buffer::new(
                "rail landing places",
                sizes.landing_pitch * u64::from(args.domains),
                "D * M rows of fp32 with their side arrays, per operation",
            ),
        ]);
    }
    let windows = [
        Buffer::new(
            "control window",
            sizes.control_bytes,
            "in flight * (2 * records + staging + landing places, and those of the rail)",
        ),
        Buffer::new(
            "arena window",
            sizes.arena_bytes,
            "2 worst-case regions of the widest rows (fp32), at most 16 GiB, at least 4 flat ones, \
             6 with several domains",
        ),
    ];
    list.extend(windows.map(|window| Buffer { counts: true, ..window }));
    Ok(list)
}

/// The windows that a GPU kernel set asks for. Neither a GPU nor its driver is needed.
pub(super) fn of_gpu(args: &ShapeArgs, shape: &Shape) -> Result<Vec<Buffer>> {
    let between = match args.between {
        PutsName::Host => LinkPath::PutByHost,
        PutsName::Gpu => LinkPath::PutByKernels,
    };
    let inside = match args.path {
        PathName::LoadStore => LinkPath::Store,
        PathName::Put => between,
    };
    let block = match args.kernels {
        KernelsName::Rocm => tokenyard_rocm::GFX942,
        KernelsName::Cpu | KernelsName::Cuda => tokenyard_cuda::HOPPER,
    };
    let mut config = GpuConfig { arena_mib: args.arena_mib, ..GpuConfig::default() };
    if args.low_latency {
        config.decode = Decode::LowLatency;
    }
    let shape = kernel_shape(shape, args.domains, args.in_flight, args.handles);
    let windows = Foreseen { config: &config, shape: &shape, inside, between, block }.windows()?;
    let mut list = Vec::new();
    for (level, windows) in windows.iter().enumerate() {
        let of = match (args.domains, level) {
            (1, _) => "",
            (_, 0) => " inside the domain",
            _ => " between domains",
        };
        let on = if windows.in_host_memory { ", pinned host memory" } else { "" };
        let arena = match (level, args.arena_mib) {
            (1, _) => "rows on their way, of fp32, to and from each domain",
            (_, Some(_)) => "arena_mib",
            (_, None) => {
                "2 worst-case outputs of the widest rows (fp32), at most 16 GiB, at least 4 flat ones; \
                 `arena_mib` sets it"
            }
        };
        for (name, bytes, formula) in [
            ("control window", windows.control, "records and counts; rows of low latency"),
            ("arena window", windows.arena, arena),
        ] {
            let window = Buffer::new(format!("{name}{of}"), bytes, format!("{formula}{on}"));
            let in_host_memory = windows.in_host_memory;
            list.push(Buffer { counts: true, in_host_memory, ..window });
        }
    }
    Ok(list)
}
