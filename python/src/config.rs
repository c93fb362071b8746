//! The config.

use std::path::PathBuf;

use pyo3::prelude::*;
use tokenyard_core::config::Config as CoreConfig;
use tokenyard_core::{Error, Result};

use crate::argument::Argument;
use crate::errors::{invalid, raise};
use crate::shipped::{self, Keys};

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
    pub(crate) fn read(argument: &Bound<'_, PyAny>) -> Result<CoreConfig> {
        if let Ok(config) = argument.cast::<Self>() {
            return Ok(config.get().core.clone());
        }
        let Ok(path) = argument.extract::<PathBuf>() else {
            let found = argument.get_type().name();
            let found = found.map_or_else(|_| "an object".into(), |name| name.to_string());
            let text = format!("config: found {found}; expected a tokenyard.Config or a path");
            return Err(invalid(text));
        };
        CoreConfig::load(&path)
    }

    /// As `read`, for a call that probes or opens the components.
    ///
    /// # Errors
    /// As `read`; CUDA's compiler, which its kernels need, cannot be loaded.
    pub(crate) fn read_to_open(argument: &Bound<'_, PyAny>) -> Result<CoreConfig> {
        let config = Self::read(argument)?;
        if config.kernels.name == "cuda" {
            // The loader does not look where pip puts CUDA's compiler.
            let nvrtc = argument.py().import("tokenyard._nvrtc");
            let preloaded = nvrtc.and_then(|nvrtc| nvrtc.call_method0("preload"));
            preloaded.map_err(|raised| invalid(format!("cannot preload NVRTC: {raised}")))?;
        }
        Ok(config)
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

    /// A config that comes with the package: the file `configs/NAME.toml` of the source tree, such as `"cpu"` (shared
    /// memory of one host), `"nvlink"` (NVIDIA GPUs of one host), `"ibgda"`, `"gin"` or `"nvlink-efa"` (between hosts).
    /// `deadline_ms` and `late_ms` are those of its world; `decode` and `sms` are those of its kernel set, on GPUs.
    ///
    /// Raises ConfigError for another name, which lists all of them, or another `decode`.
    #[staticmethod]
    #[pyo3(signature = (name, *, deadline_ms=Argument::Fits(30_000), late_ms=Argument::Fits(1_800_000),
                        decode="direct", sms=None),
           text_signature = "(name, *, deadline_ms=30_000, late_ms=1_800_000, decode='direct', sms=None)")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn built_in(
        py: Python<'_>,
        name: &str,
        deadline_ms: Argument<u64>,
        late_ms: Argument<u64>,
        decode: &str,
        sms: Option<Argument<u32>>,
    ) -> PyResult<Self> {
        let read = || {
            let sms = sms.map(|sms| sms.get("sms")).transpose()?;
            Ok((deadline_ms.get("deadline_ms")?, late_ms.get("late_ms")?, sms))
        };
        let (deadline_ms, late_ms, sms) = read().map_err(|error: Error| raise(py, &error))?;
        let decode = (decode != "direct").then_some(decode);
        let keys = Keys { deadline_ms, late_ms, decode, sms };
        let text = shipped::text(name, &keys).map_err(|error| raise(py, &error))?;
        let core = CoreConfig::parse(&text, &format!("the built-in config {name}"))
            .map_err(|error| raise(py, &error))?;
        Ok(Self { core })
    }

    /// The file, as messages name it.
    #[getter]
    fn name(&self) -> &str {
        &self.core.name
    }

    /// The consequence of a lost rank: `"stop"` ends a communicator, with `"mask"` the others go on without the rank.
    #[getter]
    fn on_failure(&self) -> &'static str {
        self.core.world.on_failure.name()
    }

    fn __repr__(&self) -> String {
        format!("tokenyard.Config({:?})", self.core.name)
    }
}
