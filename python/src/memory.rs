//! The memory of a communicator, before it is opened.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tokenyard_core::config::Config as CoreConfig;
use tokenyard_core::host::Registry;
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES};
use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_cpu::kernels::{CpuConfig, Spread, WindowSizes, handle_bytes};

use crate::config::Config;
use crate::errors::raise;
use crate::integer::Integer;

/// The longest put: larger than any row, so that no row is split. Its exact value does not matter.
const LARGEST_PUT: u64 = 1 << 40;

/// Bytes that a communicator of the kernel set `cpu` takes on each rank, before it is opened: `{"control": ...,
/// "arena": ..., "handles": ...}`.
///
/// Arguments are those of `Communicator`, on `ranks` ranks in `domains` domains. Windows (`control` and `arena`) take
/// memory where they are touched, handles when as many live at once; what a handle keeps of expert-major and packed
/// rows (8 bytes for each received token and k) comes on top.
///
/// Local: nothing is opened. Raises InvalidInputError, ConfigError; UnsupportedError for another kernel set.
#[pyfunction]
#[pyo3(signature = (config, ranks, experts, topk, hidden, max_tokens, *, domains=Integer::Fits(1),
                    in_flight=Integer::Fits(2), handles=Integer::Fits(8)),
       text_signature = "(config, ranks, experts, topk, hidden, max_tokens, *, domains=1, in_flight=2, handles=8)")]
#[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
pub(crate) fn memory_needed<'py>(
    py: Python<'py>,
    config: &Bound<'py, PyAny>,
    ranks: Integer<u32>,
    experts: Integer<u32>,
    topk: Integer<u32>,
    hidden: Integer<u32>,
    max_tokens: Integer<u32>,
    domains: Integer<u32>,
    in_flight: Integer<u32>,
    handles: Integer<u32>,
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
        let (sizes, one) = sizes(&Config::read(config)?, shape, spread)?;
        Ok((sizes, one * u64::from(handles)))
    };
    let (sizes, handles) = read().map_err(|error| raise(py, &error))?;
    let bytes = PyDict::new(py);
    bytes.set_item("control", sizes.control_bytes)?;
    bytes.set_item("arena", sizes.arena_bytes)?;
    bytes.set_item("handles", handles)?;
    Ok(bytes)
}

/// The windows, and what one handle takes.
fn sizes(config: &CoreConfig, shape: Shape, spread: Spread) -> Result<(WindowSizes, u64)> {
    let error = |kind, text| Err(Error::new(kind, "compute memory", text));
    let kernels = &config.kernels;
    if kernels.name != "cpu" {
        let text = format!("found the kernel set `{}`; expected `cpu`", kernels.name);
        return error(ErrorKind::Unsupported, text);
    }
    let shape = shape.new()?;
    if spread.domains == 0 || !shape.ranks.is_multiple_of(spread.domains) {
        let text = format!(
            "found domains = {}; expected a divisor of the {} ranks",
            spread.domains, shape.ranks
        );
        return error(ErrorKind::InvalidInput, text);
    }
    // Rows that are stored where they belong are not staged.
    let flags = match &config.scale_up {
        Some(choice) => {
            let registry = Registry::for_config(config)?;
            registry.choose_transport(choice)?.probe(&choice.table)?.flags & abi::TY_CAP_LOAD_STORE
        }
        None => 0,
    };
    let limits = Capabilities { largest_put: LARGEST_PUT, flags, ..NO_CAPABILITIES };
    let table: CpuConfig = kernels.table.parse("cpu")?;
    let sizes = WindowSizes::new(&shape, spread, [&limits; 2], &table)?;
    Ok((sizes, handle_bytes(&shape, spread.domains)))
}
