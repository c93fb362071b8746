//! The config.

use std::path::PathBuf;

use pyo3::prelude::*;
use tokenyard_core::config::Config as CoreConfig;

use crate::errors::{invalid, raise};

/// A config that was read and checked: who takes part, and which components do the work.
#[pyclass(frozen, module = "tokenyard")]
pub(crate) struct Config {
    core: CoreConfig,
}

impl Config {
    /// Reads the argument `config` of other calls: a config, or the path of a file.
    ///
    /// # Errors
    /// As [`Config::load`]; an object that is neither.
    pub(crate) fn read(argument: &Bound<'_, PyAny>) -> PyResult<CoreConfig> {
        if let Ok(config) = argument.cast::<Self>() {
            return Ok(config.get().core.clone());
        }
        let py = argument.py();
        let Ok(path) = argument.extract::<PathBuf>() else {
            let found = argument.get_type().name()?;
            let text = format!("config: found {found}; expected a tokenyard.Config or a path");
            return Err(raise(py, &invalid(text)));
        };
        CoreConfig::load(&path).map_err(|error| raise(py, &error))
    }
}

#[pymethods]
impl Config {
    /// Reads the TOML file at `path`.
    ///
    /// Raises ConfigError, which names the line, what was found and what was expected.
    #[staticmethod]
    #[pyo3(signature = (path))]
    fn load(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let core = CoreConfig::load(&path).map_err(|error| raise(py, &error))?;
        Ok(Self { core })
    }

    /// Reads TOML text; `name` stands for the file in messages.
    ///
    /// Raises ConfigError, as `load`.
    #[staticmethod]
    #[pyo3(signature = (text, name="config"))]
    fn parse(py: Python<'_>, text: &str, name: &str) -> PyResult<Self> {
        let core = CoreConfig::parse(text, name).map_err(|error| raise(py, &error))?;
        Ok(Self { core })
    }

    /// The file, as messages name it.
    #[getter]
    fn name(&self) -> &str {
        &self.core.name
    }

    fn __repr__(&self) -> String {
        format!("tokenyard.Config({:?})", self.core.name)
    }
}
