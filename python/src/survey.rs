//! The choices of a config on a world, before anything is open.

use pyo3::prelude::*;
use tokenyard_core::communicator::{Choices, Communicator};

use crate::config::Config;
use crate::errors::{raise, to_python};
use crate::world::World;

/// The components that a communicator of this config would use on `world`, with the reasons, as a dictionary:
/// `kernels`, `works_on_device`, `scale_up` and `scale_out` (their transports), `warnings`, `domains` and `places` of
/// all ranks. Collective. Nothing is opened, and no memory is taken.
///
/// `config` is a Config or the path of a TOML file, equal on all ranks. Raises what opening a communicator raises where
/// a component cannot work here, or ranks disagree; RefusedError where that concerns another rank alone.
#[pyfunction]
#[pyo3(signature = (world, config))]
pub(crate) fn survey(
    py: Python<'_>,
    world: &World,
    config: &Bound<'_, PyAny>,
) -> PyResult<Py<PyAny>> {
    let world = world.core().map_err(|error| raise(py, &error))?;
    let config = Config::read_to_open(config);
    let choices = py.detach(|| {
        let world = world.get()?;
        match config {
            Ok(config) => Choices::of(world, &config),
            Err(why) => Err(Communicator::refuse_open(world, why)),
        }
    });
    to_python(py, &choices.map_err(|error| raise(py, &error))?)
}
