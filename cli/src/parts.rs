//! The parts of this program and of a config's plugins, each asked whether it can run here.

use std::path::{Path, PathBuf};

use serde::Serialize;
use tokenyard_core::capabilities::Declared;
use tokenyard_core::config::{Config, PartChoice, PartTable};
use tokenyard_core::host::{Registry, discover, load_file, plugin_files};
use tokenyard_core::topology::Discover;
use tokenyard_core::{Error, Result};

/// All that was found.
#[derive(Debug, Serialize)]
pub(crate) struct Parts {
    pub(crate) parts: Vec<Part>,
    /// Plugin files that failed the handshake.
    pub(crate) broken: Vec<BrokenFile>,
}

/// One part.
#[derive(Debug, Serialize)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) version: &'static str,
    pub(crate) about: &'static str,
    /// The library; absent for a built-in part.
    pub(crate) file: Option<PathBuf>,
    /// Whether the config names it.
    pub(crate) chosen: bool,
    /// What keeps it from running here.
    pub(crate) why_not: Option<String>,
    /// What a transport declares.
    pub(crate) capabilities: Option<Declared>,
}

/// A file that is no usable plugin.
#[derive(Debug, Serialize)]
pub(crate) struct BrokenFile {
    pub(crate) path: Option<PathBuf>,
    pub(crate) error: String,
}

impl Parts {
    /// Loads the plugins of `config` and probes every part, with its table where the config has one.
    ///
    /// # Errors
    /// A built-in part that is not well formed: a bug.
    pub(crate) fn find(config: Option<&Config>) -> Result<Self> {
        let (registry, broken) = load(config, |_| ())?;
        let parts = registry.parts().into_iter().map(|info| {
            let choice = config.and_then(|config| choice_of(config, info.kind, info.name));
            let (why_not, capabilities) = probe(&registry, info.kind, info.name, choice);
            Part {
                name: info.name,
                kind: info.kind,
                version: info.version,
                about: info.about,
                file: info.file,
                chosen: choice.is_some(),
                why_not,
                capabilities,
            }
        });
        Ok(Self { parts: parts.collect(), broken })
    }

    /// The names that `config` gives and no part has, as the registry words it.
    pub(crate) fn missing(&self, config: &Config) -> Vec<(&'static str, String)> {
        let kernels = std::iter::once(("kernel set", &config.kernels));
        let transports = config.scale_up.iter().chain(&config.scale_out).map(|c| ("transport", c));
        let topology = std::iter::once(("topology", &config.topology));
        kernels
            .chain(transports)
            .chain(topology)
            .filter(|(kind, choice)| {
                !self.parts.iter().any(|part| part.kind == *kind && part.name == choice.name)
            })
            .map(|(kind, choice)| (kind, choice.name.clone()))
            .collect()
    }
}

/// The built-in parts and those of the plugins of `config`, and the files that are no plugins. Calls `each` with
/// every file before it is opened.
///
/// # Errors
/// A built-in part that is not well formed: a bug.
pub(crate) fn load(
    config: Option<&Config>,
    mut each: impl FnMut(&Path),
) -> Result<(Registry, Vec<BrokenFile>)> {
    let mut registry = Registry::built_in()?;
    let mut broken = Vec::new();
    for path in config.map(|c| c.plugins.as_slice()).unwrap_or_default() {
        let mut note = |path: Option<PathBuf>, error: Error| {
            broken.push(BrokenFile { path, error: error.to_string() });
        };
        match plugin_files(std::slice::from_ref(path)) {
            Err(error) => note(Some(path.clone()), error),
            Ok(files) => {
                for file in files {
                    each(&file);
                    let added = load_file(&file).and_then(|plugin| registry.add(plugin));
                    if let Err(error) = added {
                        note(Some(file), error);
                    }
                }
            }
        }
    }
    Ok((registry, broken))
}

fn choice_of<'a>(config: &'a Config, kind: &str, name: &str) -> Option<&'a PartChoice> {
    let choices: Vec<&PartChoice> = match kind {
        "kernel set" => vec![&config.kernels],
        "topology" => vec![&config.topology],
        _ => config.scale_up.iter().chain(&config.scale_out).collect(),
    };
    choices.into_iter().find(|choice| choice.name == name)
}

fn probe(
    registry: &Registry,
    kind: &str,
    name: &str,
    choice: Option<&PartChoice>,
) -> (Option<String>, Option<Declared>) {
    let empty = PartTable::empty();
    let table = choice.map_or(&empty, |choice| &choice.table);
    let result = match kind {
        "kernel set" => registry.kernels(name).and_then(|part| part.probe(table)).map(|_| None),
        "topology" => {
            let ask = Discover { rank: 0, ranks: 1, local_rank: 0 };
            registry.topology(name).and_then(|part| discover(&part, table, &ask)).map(|_| None)
        }
        _ => registry
            .transport(name)
            .and_then(|part| part.probe(table))
            .map(|capabilities| Some(Declared::from(&capabilities))),
    };
    match result {
        Ok(capabilities) => (None, capabilities),
        Err(error) => (Some(error.to_string()), None),
    }
}
