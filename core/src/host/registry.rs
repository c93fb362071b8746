use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::installed;
use super::loader::{PluginFile, load_file, plugin_files};
use crate::abi;
use crate::config::wording::nearest;
use crate::config::{ComponentChoice, Config};
use crate::export::{InProcess, TypedCalls};
use crate::{Error, ErrorKind, Result};

/// The kinds of components.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComponentKind {
    /// Moves bytes between windows.
    Transport,
    /// The compute on one kind of device.
    Kernels,
    /// The places of ranks.
    Topology,
}

impl ComponentKind {
    /// The word used in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Transport => "transport",
            Self::Kernels => "kernel set",
            Self::Topology => "topology",
        }
    }

    /// All components that `config` chooses: kernel set, scale-up, scale-out in order of preference,
    /// topology.
    pub fn choices(config: &Config) -> Vec<(Self, &ComponentChoice)> {
        let transports = config.scale_up.iter().chain(&config.scale_out);
        std::iter::once((Self::Kernels, &config.kernels))
            .chain(transports.map(|choice| (Self::Transport, choice)))
            .chain([(Self::Topology, &config.topology)])
            .collect()
    }
}

macro_rules! component_ref {
    ($(#[$doc:meta])* $name:ident, $table:ty $(, $typed:ident: $kind:ty)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            /// A judged, complete copy: every required slot is set.
            pub(crate) table: &'static $table,
            $(
                /// Its calls, where it is in this image.
                pub(super) $typed: Option<$kind>,
            )?
        }

        // SAFETY: the table is constant once judged, and its slots are plain functions.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl $name {
            /// A component whose calls all go through its table.
            pub(super) fn judged(table: &'static $table) -> Self {
                Self { table, $($typed: None)? }
            }

            /// The name that a config writes.
            pub fn name(&self) -> &'static str {
                // SAFETY: judged: static UTF-8 of the library, which is never unloaded.
                unsafe { judged_text(self.table.name) }
            }

            /// The component's own version.
            pub fn version(&self) -> &'static str {
                // SAFETY: as in `name`.
                unsafe { judged_text(self.table.version) }
            }

            /// One line of text for display.
            pub fn about(&self) -> &'static str {
                // SAFETY: as in `name`.
                unsafe { judged_text(self.table.about) }
            }
        }
    };
}

component_ref!(
    /// A transport that was judged fit to be called.
    TransportRef, abi::TyTransportTable);
component_ref!(
    /// A kernel set that was judged fit to be called.
    KernelsRef, abi::TyKernelsTable, typed: TypedCalls);
component_ref!(
    /// A topology that was judged fit to be called.
    TopologyRef, abi::TyTopologyTable);

impl KernelsRef {
    /// A kernel set of this image.
    pub(super) fn in_process(set: &InProcess) -> Self {
        Self { table: set.table, typed: Some(set.calls) }
    }
}

/// # Safety
/// `text` was judged: UTF-8 that lives as long as the process.
unsafe fn judged_text(text: abi::TyStr) -> &'static str {
    // SAFETY: by this function's contract.
    unsafe { std::str::from_utf8_unchecked(std::slice::from_raw_parts(text.data, text.bytes)) }
}

/// A component that is compiled into this image: `inventory::submit! { BuiltIn::Transport(&EXPORT) }`. An export
/// goes through the same table and the same judgement as a loaded one.
#[derive(Debug)]
pub enum BuiltIn {
    /// A transport export.
    Transport(&'static crate::export::Exported<abi::TyTransportExport>),
    /// A kernel set export.
    Kernels(&'static crate::export::Exported<abi::TyKernelsExport>),
    /// Kernel sets that get the typed calls.
    KernelSets(&'static [InProcess]),
    /// A topology export.
    Topology(&'static crate::export::Exported<abi::TyTopologyExport>),
}

inventory::collect!(BuiltIn);

/// Components that [`add_built_in`] has added.
static ADDED: Mutex<Vec<&'static BuiltIn>> = Mutex::new(Vec::new());

/// Adds a component of this image to every registry that is made from now on. It is for a component that a
/// program uses for a purpose of its own, and does not offer to every config. A component that was added is
/// not added again.
pub fn add_built_in(component: &'static BuiltIn) {
    let mut added = ADDED.lock().unwrap_or_else(PoisonError::into_inner);
    if !added.iter().any(|known| std::ptr::eq(*known, component)) {
        added.push(component);
    }
}

/// The description of a component, known without opening it.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ComponentInfo {
    /// The name that a config writes.
    pub name: &'static str,
    /// `transport`, `kernel set` or `topology`.
    pub kind: &'static str,
    /// The component's own version.
    pub version: &'static str,
    /// One line of text for display.
    pub about: &'static str,
    /// The library of the component, or nothing for a built-in component.
    pub file: Option<PathBuf>,
}

/// Every component that a config can name, by kind.
#[derive(Debug, Default)]
pub struct Registry {
    transports: Vec<(TransportRef, Option<PathBuf>)>,
    kernels: Vec<(KernelsRef, Option<PathBuf>)>,
    topologies: Vec<(TopologyRef, Option<PathBuf>)>,
}

impl Registry {
    /// The components that `config` can choose: those that are compiled into this image, and those of the
    /// files and folders in `[plugins] paths`. If the config names a component that none of these provides,
    /// its installed plugin is loaded too ([`Registry::installed`]).
    ///
    /// # Errors
    /// As [`Registry::load`].
    pub fn for_config(config: &Config) -> Result<Self> {
        let mut registry = Self::load(&config.plugins)?;
        for (file, choice) in registry.installed(config) {
            let plugin = load_file(&file).map_err(|error| choice.locate(error))?;
            registry.add_installed(plugin)?;
        }
        Ok(registry)
    }

    /// The installed plugins of the components that `config` names and this registry lacks, each with the
    /// choice that names it. The plugin of a component `NAME` is `libtokenyard_plugin_NAME.so` (`-` becomes
    /// `_`; `efa` is in the plugin of `libfabric`), in the folder of the running program or in
    /// `../lib/tokenyard` of it, or in one of [`add_plugin_folder`](super::add_plugin_folder). No file is
    /// opened.
    pub fn installed<'a>(&self, config: &'a Config) -> Vec<(PathBuf, &'a ComponentChoice)> {
        installed::wanted(config, self)
    }

    /// The choices of `config` that name no component of this registry.
    pub fn missing<'a>(&self, config: &'a Config) -> Vec<(ComponentKind, &'a ComponentChoice)> {
        let all = ComponentKind::choices(config).into_iter();
        all.filter(|(kind, choice)| self.find(*kind, &choice.name).is_none()).collect()
    }

    /// The components compiled into this image, and those of the plugin files and folders in `paths`.
    ///
    /// # Errors
    /// The first handshake failure, or two plugins with a component of the same kind and name.
    pub fn load(paths: &[PathBuf]) -> Result<Self> {
        let mut registry = Self::built_in()?;
        for file in plugin_files(paths)? {
            registry.add(load_file(&file)?)?;
        }
        Ok(registry)
    }

    /// The components compiled into this image.
    ///
    /// # Errors
    /// A built-in table that fails the judgement: a bug.
    pub fn built_in() -> Result<Self> {
        let mut registry = Self::default();
        let added = ADDED.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for component in inventory::iter::<BuiltIn>.into_iter().chain(added) {
            registry.add(PluginFile::from_built_in(component)?)?;
        }
        Ok(registry)
    }

    /// Adds the components of one judged plugin. They replace built-in components of the same kind and
    /// name, because the config names the plugin explicitly.
    ///
    /// # Errors
    /// A component of the same kind and name from another plugin.
    pub fn add(&mut self, file: PluginFile) -> Result<()> {
        if let Some(path) = &file.path {
            let replaced = |kind: ComponentKind, name: &str| {
                let (kind, file) = (kind.name(), path.display());
                tracing::info!("{kind} `{name}` of {file} replaces the built-in one");
            };
            for component in &file.transports {
                if drop_built_in(&mut self.transports, component.name(), TransportRef::name) {
                    replaced(ComponentKind::Transport, component.name());
                }
            }
            for component in &file.kernels {
                if drop_built_in(&mut self.kernels, component.name(), KernelsRef::name) {
                    replaced(ComponentKind::Kernels, component.name());
                }
            }
            for component in &file.topologies {
                if drop_built_in(&mut self.topologies, component.name(), TopologyRef::name) {
                    replaced(ComponentKind::Topology, component.name());
                }
            }
        }
        for component in file.transports {
            self.refuse_double(ComponentKind::Transport, component.name(), &file.path)?;
            remember(component);
            self.transports.push((component, file.path.clone()));
        }
        for component in file.kernels {
            self.refuse_double(ComponentKind::Kernels, component.name(), &file.path)?;
            self.kernels.push((component, file.path.clone()));
        }
        for component in file.topologies {
            self.refuse_double(ComponentKind::Topology, component.name(), &file.path)?;
            self.topologies.push((component, file.path.clone()));
        }
        Ok(())
    }

    /// Adds the components of one judged plugin that was found where it is installed. Existing
    /// components stay: no config names the file, so it replaces nothing.
    ///
    /// # Errors
    /// As [`Registry::add`].
    pub fn add_installed(&mut self, mut file: PluginFile) -> Result<()> {
        let is_new = |kind, name: &str| self.find(kind, name).is_none();
        file.transports.retain(|component| is_new(ComponentKind::Transport, component.name()));
        file.kernels.retain(|component| is_new(ComponentKind::Kernels, component.name()));
        file.topologies.retain(|component| is_new(ComponentKind::Topology, component.name()));
        self.add(file)
    }

    fn refuse_double(&self, kind: ComponentKind, name: &str, file: &Option<PathBuf>) -> Result<()> {
        let Some(old) = self.find(kind, name) else { return Ok(()) };
        let from = |file: &Option<PathBuf>| {
            file.as_ref().map_or("this program".into(), |f| f.display().to_string())
        };
        Err(Error::new(
            ErrorKind::Plugin,
            "load plugin",
            format!(
                "{} `{name}` of {} is also provided by {}",
                kind.name(),
                from(file),
                from(&old.file)
            ),
        )
        .with_fix("remove one of the two from [plugins] paths, or rename the component"))
    }

    /// Every component.
    pub fn components(&self) -> Vec<ComponentInfo> {
        macro_rules! info {
            ($list:expr, $kind:expr) => {
                $list.iter().map(|(p, file)| ComponentInfo {
                    name: p.name(),
                    kind: $kind.name(),
                    version: p.version(),
                    about: p.about(),
                    file: file.clone(),
                })
            };
        }
        info!(self.kernels, ComponentKind::Kernels)
            .chain(info!(self.transports, ComponentKind::Transport))
            .chain(info!(self.topologies, ComponentKind::Topology))
            .collect()
    }

    fn find(&self, kind: ComponentKind, name: &str) -> Option<ComponentInfo> {
        self.components()
            .into_iter()
            .find(|component| component.kind == kind.name() && component.name == name)
    }

    /// Finds a transport by name.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] with the available names.
    pub fn transport(&self, name: &str) -> Result<TransportRef> {
        find(&self.transports, name, TransportRef::name)
            .ok_or_else(|| self.unknown(ComponentKind::Transport, name))
    }

    /// Finds a kernel set by name.
    ///
    /// # Errors
    /// As [`Registry::transport`].
    pub fn kernels(&self, name: &str) -> Result<KernelsRef> {
        find(&self.kernels, name, KernelsRef::name)
            .ok_or_else(|| self.unknown(ComponentKind::Kernels, name))
    }

    /// Finds a topology by name.
    ///
    /// # Errors
    /// As [`Registry::transport`].
    pub fn topology(&self, name: &str) -> Result<TopologyRef> {
        find(&self.topologies, name, TopologyRef::name)
            .ok_or_else(|| self.unknown(ComponentKind::Topology, name))
    }

    /// The transport that a config chooses.
    ///
    /// # Errors
    /// As [`Registry::transport`], with file and line.
    pub fn choose_transport(&self, choice: &ComponentChoice) -> Result<TransportRef> {
        self.transport(&choice.name).map_err(|error| choice.locate(error))
    }

    /// The kernel set that a config chooses.
    ///
    /// # Errors
    /// As [`Registry::choose_transport`].
    pub fn choose_kernels(&self, choice: &ComponentChoice) -> Result<KernelsRef> {
        self.kernels(&choice.name).map_err(|error| choice.locate(error))
    }

    /// The topology that a config chooses.
    ///
    /// # Errors
    /// As [`Registry::choose_transport`].
    pub fn choose_topology(&self, choice: &ComponentChoice) -> Result<TopologyRef> {
        self.topology(&choice.name).map_err(|error| choice.locate(error))
    }

    /// The error of a choice that names no component: the available names, the places where the plugin was
    /// searched, and the fix.
    pub fn unknown(&self, kind: ComponentKind, name: &str) -> Error {
        let available: Vec<_> = self
            .components()
            .into_iter()
            .filter(|p| p.kind == kind.name())
            .map(|p| p.name)
            .collect();
        let hint = nearest(name, &available).map(|name| format!("; did you mean `{name}`?"));
        let hint = hint.unwrap_or_default();
        let available = if available.is_empty() { "none".into() } else { available.join(", ") };
        let (looked, fix) = installed::explain(kind, name);
        let kind = kind.name();
        let text = format!("no {kind} is called `{name}`; available: {available}{hint}; {looked}");
        Error::new(ErrorKind::Config, "choose components", text).with_fix(fix)
    }
}

/// Transports of every registry of this process, for components that wrap others. The last transport of a
/// name counts, because a plugin replaces a built-in component.
static TRANSPORTS: Mutex<Vec<TransportRef>> = Mutex::new(Vec::new());

fn remember(component: TransportRef) {
    let mut known = TRANSPORTS.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|old| old.name() != component.name());
    known.push(component);
}

/// The service `find_transport`.
///
/// # Safety
/// `name` is valid for the call.
pub(super) unsafe extern "C" fn find_transport(
    _: *mut c_void,
    name: abi::TyStr,
) -> *const abi::TyTransportTable {
    // SAFETY: by this function's contract.
    let name = unsafe { super::lossy(name) };
    let known = TRANSPORTS.lock().unwrap_or_else(PoisonError::into_inner);
    known
        .iter()
        .find(|component| component.name() == name)
        .map_or(std::ptr::null(), |component| component.table)
}

/// Drops the built-in component of this name, if there is one.
fn drop_built_in<P>(
    list: &mut Vec<(P, Option<PathBuf>)>,
    name: &str,
    name_of: impl Fn(&P) -> &'static str,
) -> bool {
    let before = list.len();
    list.retain(|(component, file)| file.is_some() || name_of(component) != name);
    list.len() != before
}

fn find<P: Copy>(
    list: &[(P, Option<PathBuf>)],
    name: &str,
    name_of: impl Fn(&P) -> &'static str,
) -> Option<P> {
    list.iter().find(|(p, _)| name_of(p) == name).map(|(p, _)| *p)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A transport that is never called.
    fn transport(name: &'static str) -> TransportRef {
        // SAFETY: tables are made of integers, pointers and optional functions, for which zero is a value.
        let mut table: abi::TyTransportTable = unsafe { std::mem::zeroed() };
        table.name = crate::export::static_str(name);
        table.version = crate::export::static_str("1");
        table.about = crate::export::static_str("");
        TransportRef { table: Box::leak(Box::new(table)) }
    }

    fn plugin(file: &str, names: &[&'static str]) -> PluginFile {
        let transports = names.iter().map(|name| transport(name)).collect();
        PluginFile { path: Some(file.into()), transports, ..PluginFile::default() }
    }

    #[test]
    fn a_plugin_of_the_config_goes_before_a_built_in_part_and_an_installed_one_behind_both() {
        let mut registry = Registry::default();
        let built_in = PluginFile { path: None, ..plugin("", &["x-shm", "x-tcp"]) };
        registry.add(built_in).unwrap();
        registry.add(plugin("/named.so", &["x-shm", "x-ib"])).unwrap();
        registry.add_installed(plugin("/lib/x.so", &["x-tcp", "x-ib", "x-efa"])).unwrap();
        let of = |name| registry.find(ComponentKind::Transport, name).unwrap().file;
        assert_eq!(of("x-shm"), Some("/named.so".into()));
        assert_eq!(of("x-ib"), Some("/named.so".into()));
        assert_eq!(of("x-tcp"), None);
        assert_eq!(of("x-efa"), Some("/lib/x.so".into()));
        assert_eq!(registry.components().len(), 4);
    }

    #[test]
    fn a_built_in_part_goes_for_a_plugin_of_its_name_and_a_loaded_one_stays() {
        let file = Some(PathBuf::from("/lib/x.so"));
        let mut components = vec![("shm", None), ("tcp", None), ("shm", file.clone())];
        assert!(drop_built_in(&mut components, "shm", |name| name));
        assert_eq!(components, [("tcp", None), ("shm", file)]);
        assert!(!drop_built_in(&mut components, "shm", |name| name));
    }
}
