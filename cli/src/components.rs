//! The components of this program and of a config's plugins, each probed whether it can run here.

use std::path::{Path, PathBuf};

use serde::Serialize;
use tokenyard_core::capabilities::Declared;
use tokenyard_core::config::{ComponentChoice, ComponentTable, Config};
use tokenyard_core::host::{
    ComponentKind, PluginFile, Registry, discover, load_file, plugin_files,
};
use tokenyard_core::topology::Discover;
use tokenyard_core::{Error, Result};

/// The components, and the errors of plugins.
#[derive(Debug, Serialize)]
pub(crate) struct Components {
    pub(crate) components: Vec<Component>,
    /// Plugin files that failed the handshake.
    pub(crate) broken: Vec<BrokenFile>,
    /// Names in the config that no component has.
    pub(crate) missing: Vec<Missing>,
}

/// A choice of the config that is the name of no component.
#[derive(Debug, Serialize)]
pub(crate) struct Missing {
    pub(crate) kind: &'static str,
    pub(crate) name: String,
    /// The components that there are, and the places where its plugin was searched.
    pub(crate) found: String,
    pub(crate) fix: String,
}

/// One component.
#[derive(Debug, Serialize)]
pub(crate) struct Component {
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) version: &'static str,
    pub(crate) about: &'static str,
    /// The library; absent for a built-in component.
    pub(crate) file: Option<PathBuf>,
    /// Whether the config names it.
    pub(crate) chosen: bool,
    /// The reason why it cannot run here.
    pub(crate) why_not: Option<String>,
    /// The declared capabilities of a transport.
    pub(crate) capabilities: Option<Declared>,
}

/// A file that is no usable plugin.
#[derive(Debug, Serialize)]
pub(crate) struct BrokenFile {
    pub(crate) path: PathBuf,
    pub(crate) error: String,
    /// The line of the config that names it.
    #[serde(skip)]
    pub(crate) line: usize,
}

impl Components {
    /// Loads the plugins of `config` and probes every component, with its table where the config has one.
    ///
    /// # Errors
    /// A built-in component is not well formed: a bug.
    pub(crate) fn find(config: Option<&Config>) -> Result<Self> {
        let (registry, broken) = load(config, |_| ())?;
        let components = registry.components().into_iter().map(|info| {
            let choice = config.and_then(|config| choice_of(config, info.kind, info.name));
            let (why_not, capabilities) = probe(&registry, info.kind, info.name, choice);
            Component {
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
        let components = components.collect();
        let missing = config.map(|config| registry.missing(config)).unwrap_or_default();
        let missing = missing.into_iter().map(|(kind, choice)| {
            let error = registry.unknown(kind, &choice.name);
            Missing {
                kind: kind.name(),
                name: choice.name.clone(),
                found: error.message().to_owned(),
                fix: error.fix().unwrap_or_default().to_owned(),
            }
        });
        Ok(Self { components, broken, missing: missing.collect() })
    }
}

/// The built-in components and those of the plugins of `config`, and the files that are no plugins.
/// Calls `each` with every file before it is opened. Like `Registry::for_config`, but does not end
/// at the first file that is refused.
///
/// # Errors
/// A built-in component is not well formed: a bug.
pub(crate) fn load(
    config: Option<&Config>,
    each: impl FnMut(&Path),
) -> Result<(Registry, Vec<BrokenFile>)> {
    let mut loading = Loading { registry: Registry::built_in()?, broken: Vec::new(), each };
    if let Some(config) = config {
        for (path, line) in config.plugins.iter().zip(&config.lines.plugins) {
            match plugin_files(std::slice::from_ref(path)) {
                Err(error) => loading.refuse(path.clone(), *line, &error),
                Ok(files) => {
                    files.into_iter().for_each(|file| loading.load(file, *line, Registry::add));
                }
            }
        }
        for (file, choice) in loading.registry.installed(config) {
            loading.load(file, choice.line, Registry::add_installed);
        }
    }
    Ok((loading.registry, loading.broken))
}

struct Loading<E> {
    registry: Registry,
    broken: Vec<BrokenFile>,
    each: E,
}

impl<E: FnMut(&Path)> Loading<E> {
    fn load(
        &mut self,
        file: PathBuf,
        line: usize,
        add: impl Fn(&mut Registry, PluginFile) -> Result<()>,
    ) {
        (self.each)(&file);
        if let Err(error) = load_file(&file).and_then(|plugin| add(&mut self.registry, plugin)) {
            self.refuse(file, line, &error);
        }
    }

    fn refuse(&mut self, path: PathBuf, line: usize, error: &Error) {
        self.broken.push(BrokenFile { path, error: error.to_string(), line });
    }
}

fn choice_of<'a>(config: &'a Config, kind: &str, name: &str) -> Option<&'a ComponentChoice> {
    let mut all = ComponentKind::choices(config).into_iter();
    all.find(|(of, choice)| of.name() == kind && choice.name == name).map(|(_, choice)| choice)
}

fn probe(
    registry: &Registry,
    kind: &str,
    name: &str,
    choice: Option<&ComponentChoice>,
) -> (Option<String>, Option<Declared>) {
    let empty = ComponentTable::empty();
    let table = choice.map_or(&empty, |choice| &choice.table);
    let result = match kind {
        "kernel set" => {
            registry.kernels(name).and_then(|component| component.probe(table)).map(|_| None)
        }
        "topology" => {
            let ask = Discover { rank: 0, ranks: 1, local_rank: 0 };
            registry
                .topology(name)
                .and_then(|component| discover(&component, table, &ask))
                .map(|_| None)
        }
        _ => registry
            .transport(name)
            .and_then(|component| component.probe(table))
            .map(|capabilities| Some(Declared::from(&capabilities))),
    };
    match result {
        Ok(capabilities) => (None, capabilities),
        Err(error) => (Some(error.to_string()), None),
    }
}
