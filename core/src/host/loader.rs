use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use object::read::ReadCache;

use super::registry::{BuiltIn, KernelsRef, TopologyRef, TransportRef};
use super::{attended, elf, writable};
use crate::abi;
use crate::{Error, ErrorKind, Result, files};

/// Keep the library: Rust's thread-local destructors make unloading unsafe. From `dlfcn.h`.
const RTLD_NODELETE: i32 = 0x1000;

/// Most components of one kind in one plugin: a larger count is a damaged export, not a plugin.
const MAX_COMPONENTS: usize = 64;

/// The judged components of one plugin.
#[derive(Debug, Default)]
pub struct PluginFile {
    /// The library, or nothing for built-in components.
    pub path: Option<PathBuf>,
    /// Its transports.
    pub transports: Vec<TransportRef>,
    /// Its kernel sets.
    pub kernels: Vec<KernelsRef>,
    /// Its topologies.
    pub topologies: Vec<TopologyRef>,
}

/// The plugin files of `paths` (files or folders), in order. Of a folder, every `*.so`, by name.
///
/// # Errors
/// [`ErrorKind::Plugin`]: a relative or missing path, or a folder that cannot be read.
pub fn plugin_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_absolute() {
            return Err(refused(path, "the path is relative; expected an absolute path")
                .with_fix("write the whole path: the current folder decides nothing"));
        }
        let meta = std::fs::metadata(path).map_err(|e| {
            refused(path, "the file cannot be read").with_source(e).with_fix(
                "correct [plugins] paths, or build the plugin (cargo build --release -p ...)",
            )
        })?;
        if meta.is_dir() {
            let entries =
                std::fs::read_dir(path).map_err(|e| refused(path, "read folder").with_source(e))?;
            let mut found = entries
                .map(|e| e.map(|e| e.path()))
                .collect::<std::io::Result<Vec<_>>>()
                .map_err(|e| refused(path, "read folder").with_source(e))?;
            found.retain(|p| p.extension().is_some_and(|e| e == "so"));
            found.sort();
            files.append(&mut found);
        } else {
            files.push(path.clone());
        }
    }
    Ok(files)
}

/// Loads one plugin and judges it. No function of it is called.
///
/// # Errors
/// [`ErrorKind::Plugin`]: the failed check, the values found and expected, and the fix.
pub fn load_file(path: &Path) -> Result<PluginFile> {
    let (file, _) = files::open(path).map_err(|e| refused(path, e.problem()).with_fix(e.fix()))?;
    // The loader maps the file by its path again: a user who can swap it in between can also write it.
    elf::judge(&ReadCache::new(file)).map_err(|e| refused(path, e.problem).with_fix(e.fix))?;
    writable::warn(path);
    // SAFETY: loading runs the library's initialisers. The operator named it by absolute path in
    // the config, or installed it with the program: the documented acts of trust
    // (docs/plugin-abi.md).
    let library = attended("plugin", path.display().to_string(), "dlopen", || unsafe {
        Library::open(Some(path), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)
    })
    .map_err(|e| {
        refused(path, format!("it cannot be loaded: {}", loading_text(&e)))
            .with_fix(loading_fix(path, &e))
    })?;
    let mut file = PluginFile { path: Some(path.to_path_buf()), ..PluginFile::default() };
    let mut symbols = 0;
    // SAFETY: each symbol is data of the stated export type by the ABI; only its header is read
    // before it was judged.
    unsafe {
        if let Some(export) = symbol::<abi::TyTransportExport>(&library, TRANSPORT.symbol) {
            symbols += 1;
            file.transports = judge_transports(path, export)?;
        }
        if let Some(export) = symbol::<abi::TyKernelsExport>(&library, KERNELS.symbol) {
            symbols += 1;
            file.kernels = judge_kernels(path, export)?;
        }
        if let Some(export) = symbol::<abi::TyTopologyExport>(&library, TOPOLOGY.symbol) {
            symbols += 1;
            file.topologies = judge_topologies(path, export)?;
        }
    }
    if symbols == 0 {
        return Err(refused(
            path,
            format!(
                "it is a library but not a tokenyard plugin: found none of the symbols {}, {}, {}",
                TRANSPORT.symbol, KERNELS.symbol, TOPOLOGY.symbol
            ),
        )
        .with_fix("name a plugin, or export one of these symbols (docs/plugin-abi.md)"));
    }
    // Libraries are never unloaded: dropping the handle would unload it.
    std::mem::forget(library);
    Ok(file)
}

impl PluginFile {
    /// Judges a built-in component like a loaded one.
    ///
    /// # Errors
    /// As [`load_file`].
    pub(super) fn from_built_in(component: &BuiltIn) -> Result<Self> {
        let path = Path::new("(built in)");
        let mut file = Self::default();
        // SAFETY: built-in exports are statics of this image.
        unsafe {
            match component {
                BuiltIn::Transport(e) => file.transports = judge_transports(path, &raw const e.0)?,
                BuiltIn::Kernels(e) => file.kernels = judge_kernels(path, &raw const e.0)?,
                BuiltIn::KernelSets(sets) => {
                    file.kernels = sets.iter().map(KernelsRef::in_process).collect();
                }
                BuiltIn::Topology(e) => file.topologies = judge_topologies(path, &raw const e.0)?,
            }
        }
        Ok(file)
    }
}

/// The required form of one kind of export.
struct ExportKind {
    symbol: &'static str,
    name: &'static str,
    major: u32,
    layout: u64,
    /// Layouts of earlier minor versions: this one only appends to their structures.
    earlier: &'static [u64],
    export_size: usize,
}

const TRANSPORT: ExportKind = ExportKind {
    symbol: "tokenyard_transport_v1",
    name: "transport",
    major: abi::TY_TRANSPORT_MAJOR,
    layout: abi::TY_TRANSPORT_LAYOUT,
    earlier: &abi::earlier_transport_layouts(),
    export_size: size_of::<abi::TyTransportExport>(),
};
const KERNELS: ExportKind = ExportKind {
    symbol: "tokenyard_kernels_v0",
    name: "kernel set",
    major: abi::TY_KERNELS_MAJOR,
    layout: abi::TY_KERNELS_LAYOUT,
    earlier: &[],
    export_size: size_of::<abi::TyKernelsExport>(),
};
const TOPOLOGY: ExportKind = ExportKind {
    symbol: "tokenyard_topology_v1",
    name: "topology",
    major: abi::TY_TOPOLOGY_MAJOR,
    layout: abi::TY_TOPOLOGY_LAYOUT,
    earlier: &[],
    export_size: size_of::<abi::TyTopologyExport>(),
};

fn refused(path: &Path, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Plugin, "load plugin", message.into())
        .with_context("path", path.display())
}

fn loading_text(error: &libloading::Error) -> String {
    use std::error::Error as _;
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// The fix of a loading error. The dynamic loader's error is only a text; these texts need a fix of
/// their own.
fn loading_fix(path: &Path, error: &libloading::Error) -> String {
    let text = loading_text(error);
    if let Some((library, _)) = text.split_once(": cannot open shared object file") {
        if Path::new(library) == path {
            return "correct the path, or make the file readable".into();
        }
        return format!(
            "install the system library `{library}` that this plugin needs, or add its folder to \
             the loader's path (ldconfig)"
        );
    }
    if text.contains("undefined symbol") {
        return "link the plugin with the library that defines the symbol, or install a version \
                of that library which has it"
            .into();
    }
    if text.contains("' not found") {
        return "build the plugin on a system no newer than this one".into();
    }
    "name a shared library built for this machine (`file PATH` shows its type)".into()
}

/// # Safety
/// The symbol, if it exists, is data of type `T`.
unsafe fn symbol<T>(library: &Library, name: &str) -> Option<*const T> {
    // SAFETY: a data symbol is read as a pointer to it; by this function's contract.
    let symbol = unsafe { library.get::<*const T>(name) }.ok()?;
    Some(symbol.as_raw_ptr().cast::<T>().cast_const())
}

/// The first steps of the judgement: magic, major, layout, size of the export.
///
/// # Safety
/// `header` points to at least a `TyExportHeader` of constant data.
unsafe fn judge_header(
    path: &Path,
    kind: &ExportKind,
    header: *const abi::TyExportHeader,
) -> Result<()> {
    // SAFETY: by this function's contract.
    let found = unsafe { &*header };
    let fail = |what: String, fix: &str| {
        Err(refused(path, what).with_context("symbol", kind.symbol).with_fix(fix))
    };
    if found.magic != abi::TY_MAGIC {
        return fail(
            format!("wrong magic: found {:#018x}, expected {:#018x}", found.magic, abi::TY_MAGIC),
            "fill header.magic with TY_MAGIC; if it is filled, the file is damaged",
        );
    }
    if found.major != kind.major {
        return fail(
            format!(
                "wrong major version of the {} ABI: found {}, expected {}",
                kind.name, found.major, kind.major
            ),
            "rebuild the plugin against this version's tokenyard_plugin.h",
        );
    }
    if found.layout != kind.layout && !kind.earlier.contains(&found.layout) {
        return fail(
            format!(
                "wrong layout of the {} ABI: found {:#018x}, expected {:#018x}",
                kind.name, found.layout, kind.layout
            ),
            "rebuild the plugin against this version's tokenyard_plugin.h (before 1.0 the layout \
             must be equal, or that of an earlier version which this one only appends to)",
        );
    }
    if found.size < kind.export_size {
        return fail(
            format!(
                "short export structure: found {} bytes, expected at least {}",
                found.size, kind.export_size
            ),
            "fill header.size with sizeof of the export structure",
        );
    }
    Ok(())
}

/// Copies the tables of an export, each with its address there, and never reads beyond a table's own size.
///
/// # Safety
/// `components` has `count` pointers to tables that start with their size.
unsafe fn copy_tables<T: Copy>(
    path: &Path,
    kind: &ExportKind,
    components: *const *const T,
    count: usize,
) -> Result<Vec<(usize, T)>> {
    let fail = |what: String, fix: &str| {
        Err(refused(path, what).with_context("symbol", kind.symbol).with_fix(fix))
    };
    if count == 0 || components.is_null() {
        return fail(
            "the export names no component: `components` is null or `count` is 0; expected 1 to 64"
                .into(),
            "let `components` point to the tables, and set `count` to their number",
        );
    }
    if count > MAX_COMPONENTS {
        return fail(
            format!("the export names {count} components; expected 1 to {MAX_COMPONENTS}"),
            "fill `count` with the number of tables",
        );
    }
    let mut tables = Vec::new();
    for index in 0..count {
        // SAFETY: by this function's contract.
        let table = unsafe { *components.add(index) };
        if table.is_null() {
            return fail(
                format!("table {index} of {count} is null"),
                "let every entry of `components` point to a table",
            );
        }
        // SAFETY: every table starts with its size.
        let size = unsafe { *table.cast::<usize>() };
        // The first four fields (size, name, version, about) are needed for any message.
        let smallest = size_of::<usize>() + 3 * size_of::<abi::TyStr>();
        if size < smallest {
            return fail(
                format!("short table {index}: found {size} bytes, expected at least {smallest}"),
                "fill the table's size with sizeof of the table structure",
            );
        }
        // SAFETY: all tables are made of integers, pointers and optional functions, for which zero
        // is a value; no more than the table's own size is read.
        let copy = unsafe {
            let mut copy = std::mem::zeroed::<T>();
            std::ptr::copy_nonoverlapping(
                table.cast::<u8>(),
                (&raw mut copy).cast::<u8>(),
                size.min(size_of::<T>()),
            );
            copy
        };
        tables.push((table as usize, copy));
    }
    Ok(tables)
}

/// # Safety
/// The string is null or points to `bytes` bytes of constant data.
unsafe fn judge_name(path: &Path, kind: &ExportKind, name: abi::TyStr) -> Result<&'static str> {
    let fail = |what: String| {
        Err(refused(path, what)
            .with_context("symbol", kind.symbol)
            .with_fix("name the component with 1 to 64 characters of [a-z0-9_-]"))
    };
    if name.data.is_null() || name.bytes == 0 || name.bytes > 64 {
        return fail(format!(
            "a component's name has {} bytes; expected 1 to 64",
            if name.data.is_null() { 0 } else { name.bytes }
        ));
    }
    // SAFETY: by this function's contract.
    let bytes = unsafe { std::slice::from_raw_parts(name.data, name.bytes) };
    let good = bytes
        .iter()
        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'_' || *b == b'-');
    match std::str::from_utf8(bytes) {
        Ok(text) if good => Ok(text),
        _ => fail(format!(
            "the component's name `{}` has characters outside [a-z0-9_-]",
            bytes.escape_ascii()
        )),
    }
}

/// Version and about are for display: a text that is not short UTF-8 becomes empty.
///
/// # Safety
/// As [`judge_name`].
unsafe fn tame(text: &mut abi::TyStr) {
    let fine = !text.data.is_null()
        && text.bytes <= 1024
        // SAFETY: by this function's contract.
        && std::str::from_utf8(unsafe { std::slice::from_raw_parts(text.data, text.bytes) })
            .is_ok();
    if !fine {
        *text = crate::export::static_str("");
    }
}

fn null_slot(path: &Path, kind: &ExportKind, component: &str, slot: &str, short: bool) -> Error {
    let (what, fix) = if short {
        (
            format!(
                "short table of {} `{component}`: it ends before the required slot `{slot}`",
                kind.name
            ),
            "fill the table's size with sizeof of the table structure of this version's \
             tokenyard_plugin.h",
        )
    } else {
        (
            format!("required slot `{slot}` of {} `{component}` is null", kind.name),
            "implement the slot; tokenyard_plugin.h describes it",
        )
    };
    refused(path, what).with_context("symbol", kind.symbol).with_fix(fix)
}

/// Leaves out what a table of an earlier minor version states in another way.
fn adapt_transport(table: &mut abi::TyTransportTable, header: &abi::TyExportHeader) {
    // The entries of `TyServeRing.counters` are longer since minor version 11.
    if header.minor < 11 {
        table.serve_ring = None;
    }
}

/// A table of which only this version is accepted.
fn adapt_none<T>(_: &mut T, _: &abi::TyExportHeader) {}

macro_rules! judge {
    ($(#[$doc:meta])* $name:ident, $kind:expr, $export:ty, $table:ty, $component:ident, $adapt:ident,
     [$($slot:ident),+ $(,)?]) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// `export` points to constant data that starts with a `TyExportHeader`.
        unsafe fn $name(path: &Path, export: *const $export) -> Result<Vec<$component>> {
            // By address: every communicator makes a registry, whose tables are the same.
            static JUDGED: Mutex<Vec<(usize, $component)>> = Mutex::new(Vec::new());
            // SAFETY: by this function's contract; the export is read whole only after its header
            // was judged, and its tables only up to their own size.
            let (tables, header) = unsafe {
                judge_header(path, &$kind, export.cast())?;
                let (components, count) = ((*export).components, (*export).count);
                (copy_tables::<$table>(path, &$kind, components, count)?, (*export).header)
            };
            let mut components = Vec::new();
            for (address, mut table) in tables {
                // SAFETY: strings of an export are constant data of the library.
                let name = unsafe {
                    tame(&mut table.version);
                    tame(&mut table.about);
                    judge_name(path, &$kind, table.name)?
                };
                $(
                    if table.$slot.is_none() {
                        let end = std::mem::offset_of!($table, $slot) + size_of::<usize>();
                        let short = table.size < end;
                        return Err(null_slot(path, &$kind, name, stringify!($slot), short));
                    }
                )+
                table.size = size_of::<$table>();
                $adapt(&mut table, &header);
                let mut judged = JUDGED.lock().unwrap_or_else(PoisonError::into_inner);
                let known = judged.iter().find(|(of, _)| *of == address);
                let component = known.map(|(_, component)| *component).unwrap_or_else(|| {
                    // Judged tables live as long as the library, which is never unloaded.
                    let component = $component::judged(Box::leak(Box::new(table)));
                    judged.push((address, component));
                    component
                });
                components.push(component);
            }
            Ok(components)
        }
    };
}

judge!(
    /// Judges a transport export.
    judge_transports, TRANSPORT, abi::TyTransportExport, abi::TyTransportTable, TransportRef,
    adapt_transport,
    [probe, open, close, memory_needs, register, endpoint, connect, post, poll, read_signal,
     health]
);
judge!(
    /// Judges a kernel set export.
    judge_kernels, KERNELS, abi::TyKernelsExport, abi::TyKernelsTable, KernelsRef, adapt_none,
    [probe, open, close, needs, allocate, plan, submit, finish, query, flush, release]
);
judge!(
    /// Judges a topology export.
    judge_topologies, TOPOLOGY, abi::TyTopologyExport, abi::TyTopologyTable, TopologyRef, adapt_none,
    [discover]
);
