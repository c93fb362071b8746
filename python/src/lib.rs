//! The native module of the Python package `tokenyard`.
//!
//! It turns Python's objects into what core takes and core's answers into Python's objects, and adds no rule of
//! its own.
//! - **The GIL** is released before anything waits, and before any lock is taken that another thread may hold
//!   while it waits.
//! - **Arguments** are judged inside of the operation that they are for: what only this module can see (an object
//!   that is no tensor) is refused on all ranks, as what core sees is.
//! - **Outputs** are claims. Nothing that frees one takes the GIL, unless a record belongs to it.
//! - **A forked child** owns nothing of its parent: see `owned.rs`.
//!
//! Names and defaults of arguments are promises to callers; `python/tokenyard/_native.pyi` says them again. Watched
//! by `python/tests`, which run on ranks as processes.

mod all_gather;
mod anchors;
mod argument;
mod array;
mod calls;
mod communicator;
mod config;
mod counts;
mod dlpack;
mod dtype;
mod errors;
mod exchange;
mod exit;
mod gather;
mod guarded;
mod log;
mod memory;
mod operations;
mod options;
mod output;
mod owned;
mod pipe;
mod reader;
mod reduce;
mod replicas;
mod routing;
mod shared;
mod shipped;
mod survey;
mod table;
mod tensor;
mod tensors;
mod world;

use std::path::PathBuf;
use std::sync::OnceLock;

use pyo3::prelude::*;
use tokenyard_core::host::{Registry, add_plugin_folder};

/// The components that a config can name, as a list of dictionaries: `name`, `kind`, `version`, `about`, and
/// `file`, the plugin's, or None for what is built in. Plugins are those of the package.
///
/// It opens no device: what each component needs of this machine is looked for when a communicator is opened. Raises
/// PluginError for a plugin of another version.
#[pyfunction]
fn components(py: Python<'_>) -> PyResult<Py<PyAny>> {
    let folders: Vec<PathBuf> = PLUGINS.get().cloned().into_iter().collect();
    let registry = Registry::load(&folders).map_err(|e| errors::raise(py, &e))?;
    errors::to_python(py, &registry.components())
}

/// The package's folder of plugins, if it has one.
static PLUGINS: OnceLock<PathBuf> = OnceLock::new();

/// Says where the package's plugins are: a config then needs no path for them. `tokenyard` calls it.
#[pyfunction]
fn _set_plugin_folder(py: Python<'_>, folder: PathBuf) -> PyResult<()> {
    add_plugin_folder(&folder).map_err(|e| errors::raise(py, &e))?;
    let _is_set_already = PLUGINS.set(folder);
    Ok(())
}

/// The calls of a GPU's driver that this thread has made since it was asked last, as a list of kind, number and
/// nanoseconds; from now on they are measured, or not. For tests that look for the cost of a call.
#[pyfunction]
fn _driver_times(is_measured: bool) -> Vec<(&'static str, u64, u64)> {
    let times = tokenyard_gpu::driver::measure(is_measured).into_iter();
    times.map(|of| (of.name, of.calls, of.ns)).collect()
}

/// The native module of `tokenyard`. Use the package.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_cuda::link();
    tokenyard_rocm::link();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("_SCALED_CHANNELS", tokenyard_core::moe::Quant::FP8.group)?;
    module.add_function(wrap_pyfunction!(components, module)?)?;
    module.add_function(wrap_pyfunction!(counts::routing_counts, module)?)?;
    module.add_function(wrap_pyfunction!(memory::memory_needed, module)?)?;
    module.add_function(wrap_pyfunction!(replicas::plan_replicas, module)?)?;
    module.add_function(wrap_pyfunction!(survey::survey, module)?)?;
    module.add_function(wrap_pyfunction!(_set_plugin_folder, module)?)?;
    module.add_function(wrap_pyfunction!(tensor::_fits, module)?)?;
    module.add_function(wrap_pyfunction!(routing::_routing, module)?)?;
    module.add_function(wrap_pyfunction!(anchors::_record_at, module)?)?;
    module.add_class::<anchors::Anchor>()?;
    module.add_class::<reader::Reader>()?;
    module.add_function(wrap_pyfunction!(_driver_times, module)?)?;
    module.add_class::<config::Config>()?;
    module.add_class::<world::World>()?;
    module.add_class::<communicator::Communicator>()?;
    module.add_class::<pipe::Pipe>()?;
    module.add_class::<all_gather::Gather>()?;
    module.add_class::<all_gather::PendingGather>()?;
    module.add_class::<reduce::PendingReduce>()?;
    module.add_class::<table::Table>()?;
    module.add_class::<table::PendingFetch>()?;
    module.add_class::<operations::PendingDispatch>()?;
    module.add_class::<operations::PendingReplay>()?;
    module.add_class::<operations::PendingCombine>()?;
    module.add_class::<output::Received>()?;
    module.add_class::<output::Handle>()?;
    module.add_class::<array::Array>()?;
    owned::register()?;
    log::register();
    exit::register(module)
}
