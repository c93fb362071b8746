//! The memory of a communicator, before it is opened.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tokenyard_core::config::Config as CoreConfig;
use tokenyard_core::host::Registry;
use tokenyard_core::kernels::kernel_shape;
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES};
use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_cpu::kernels::{CpuConfig, Spread, WindowSizes, handle_bytes};
use tokenyard_gpu::{Foreseen, GpuConfig, LevelBytes, LinkPath};

use crate::argument::Argument;
use crate::config::Config;
use crate::errors::raise;

/// The longest put: larger than any row, so that no row is split. Its exact value does not matter.
const LARGEST_PUT: u64 = 1 << 40;

/// Bytes that a communicator takes on each rank, before it is opened: `{"control": ..., "arena": ..., "handles": ...}`;
/// of a GPU kernel set `{"control": ..., "arena": ..., "host": ...}`, where `host` is pinned memory of the host, for
/// rows between machines. No GPU is needed.
///
/// Arguments are those of `Communicator`, on `ranks` ranks in `domains` domains. With the kernel set `cpu`, windows
/// (`control` and `arena`) take memory where they are touched, handles when as many live at once; what a handle keeps
/// of expert-major and packed rows (8 bytes for each received token and k), or of rank-major rows (4 for each token),
/// comes on top. On a GPU all is taken from
/// the start.
///
/// Local: nothing is opened. Raises InvalidInputError, ConfigError; UnsupportedError for a kernel set of a plugin, and
/// for a shape that no GPU can do.
#[pyfunction]
#[pyo3(signature = (config, ranks, experts, topk, hidden, max_tokens, *, domains=Argument::Fits(1),
                    in_flight=Argument::Fits(2), handles=Argument::Fits(8)),
       text_signature = "(config, ranks, experts, topk, hidden, max_tokens, *, domains=1, in_flight=2, handles=8)")]
#[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
pub(crate) fn memory_needed<'py>(
    py: Python<'py>,
    config: &Bound<'py, PyAny>,
    ranks: Argument<u32>,
    experts: Argument<u32>,
    topk: Argument<u32>,
    hidden: Argument<u32>,
    max_tokens: Argument<u32>,
    domains: Argument<u32>,
    in_flight: Argument<u32>,
    handles: Argument<u32>,
) -> PyResult<Bound<'py, PyDict>> {
    let read = || {
        let shape = Shape {
            ranks: ranks.get("ranks")?,
            experts: experts.get("experts")?,
            topk: topk.get("topk")?,
            hidden: hidden.get("hidden")?,
            max_tokens: max_tokens.get("max_tokens")?,
        };
        let spread =
            Spread { in_flight: in_flight.get("in_flight")?, domains: domains.get("domains")? };
        let handles = handles.get("handles")?;
        let config = Config::read(config)?;
        let (shape, is_gpu) = (checked(shape, spread)?, config.kernels.name != "cpu");
        if is_gpu {
            return of_gpu(&config, &shape, spread, handles);
        }
        let (sizes, one) = sizes(&config, &shape, spread)?;
        let handles = one * u64::from(handles);
        Ok([("control", sizes.control_bytes), ("arena", sizes.arena_bytes), ("handles", handles)])
    };
    let parts = read().map_err(|error| raise(py, &error))?;
    let bytes = PyDict::new(py);
    parts.iter().try_for_each(|(name, count)| bytes.set_item(name, count))?;
    Ok(bytes)
}

fn error<T>(kind: ErrorKind, text: String) -> Result<T> {
    Err(Error::new(kind, "compute memory", text))
}

fn checked(shape: Shape, spread: Spread) -> Result<Shape> {
    let shape = shape.new()?;
    if spread.domains == 0 || !shape.ranks.is_multiple_of(spread.domains) {
        return error(
            ErrorKind::InvalidInput,
            format!(
                "found domains = {}; expected a divisor of the {} ranks",
                spread.domains, shape.ranks
            ),
        );
    }
    Ok(shape)
}

/// The windows of a GPU kernel set, by the transports that the config names: their libraries are not needed.
fn of_gpu(
    config: &CoreConfig,
    shape: &Shape,
    Spread { in_flight, domains }: Spread,
    handles: u32,
) -> Result<[(&'static str, u64); 3]> {
    let block = match config.kernels.name.as_str() {
        "cuda" => tokenyard_cuda::HOPPER,
        "rocm" => tokenyard_rocm::GFX942,
        other => {
            let text = format!("found the kernel set `{other}`; expected `cpu`, `cuda` or `rocm`");
            return error(ErrorKind::Unsupported, text);
        }
    };
    let link = |name: &str| match name {
        "nvlink" | "xgmi" => LinkPath::Store,
        "gin" | "ibgda" => LinkPath::PutByKernels,
        _ => LinkPath::PutByHost,
    };
    let between = config.scale_out.first().map_or(LinkPath::PutByHost, |choice| link(&choice.name));
    let inside = config.scale_up.as_ref().map_or(between, |choice| link(&choice.name));
    let table: GpuConfig = config.kernels.table.parse(&config.kernels.name)?;
    let shape = kernel_shape(shape, domains, in_flight, handles);
    let windows = Foreseen { config: &table, shape: &shape, inside, between, block }.windows()?;
    let sum = |part: fn(&LevelBytes) -> u64| windows.iter().map(part).sum();
    Ok([
        ("control", sum(|level| if level.in_host_memory { 0 } else { level.control })),
        ("arena", sum(|level| if level.in_host_memory { 0 } else { level.arena })),
        ("host", sum(|level| if level.in_host_memory { level.control + level.arena } else { 0 })),
    ])
}

/// The windows of the cpu kernel set, and what one handle takes.
fn sizes(config: &CoreConfig, shape: &Shape, spread: Spread) -> Result<(WindowSizes, u64)> {
    // Rows that are stored where they belong are not staged.
    let flags = match &config.scale_up {
        Some(choice) => {
            let registry = Registry::for_config(config)?;
            registry.choose_transport(choice)?.probe(&choice.table)?.flags & abi::TY_CAP_LOAD_STORE
        }
        None => 0,
    };
    let limits = Capabilities { largest_put: LARGEST_PUT, flags, ..NO_CAPABILITIES };
    let table: CpuConfig = config.kernels.table.parse("cpu")?;
    let sizes = WindowSizes::new(shape, spread, [&limits; 2], &table)?;
    Ok((sizes, handle_bytes(shape, spread.domains)))
}
