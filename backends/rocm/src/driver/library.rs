//! HIP's libraries, loaded once per process.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_hip::{Hip, Hiprtc, LoadError, consts};

use super::status::text_of;

/// The oldest version, as HIP counts: its structure of a device's properties is the one that is read.
const OLDEST: i32 = 60_000_000;
/// The folder of AMD's packages, which not every installation shows to the loader.
const USUAL: &str = "/opt/rocm/lib";

/// HIP, initialised.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) hip: Hip,
    /// The folder that was named for it.
    folder: Option<PathBuf>,
    /// Its version, as HIP counts.
    pub(crate) version: i32,
}

static LOADED: OnceLock<Loaded> = OnceLock::new();
static COMPILER: OnceLock<Hiprtc> = OnceLock::new();
/// Held while a library is loaded.
static LOADING: Mutex<()> = Mutex::new(());

/// HIP, where [`load`] has succeeded.
///
/// # Errors
/// `Internal` before that.
pub(super) fn loaded() -> Result<&'static Loaded> {
    LOADED.get().ok_or_else(|| {
        Error::new(ErrorKind::Internal, "call HIP", "a call came before the library was loaded")
    })
}

/// Loads HIP, unless it is loaded: see `Driver::load`.
pub(super) fn load(folder: Option<&Path>) -> Result<&'static Loaded> {
    let _alone = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) = LOADED.get() {
        return same_folder(loaded, folder).map(|()| loaded);
    }
    let made = open(folder)?;
    Ok(LOADED.get_or_init(|| made))
}

/// hiprtc, out of this folder, or out of that which HIP was loaded from. It may be absent where clang
/// compiles.
pub(crate) fn load_compiler(folder: Option<&Path>) -> Result<&'static Hiprtc> {
    let folder = folder.or_else(|| LOADED.get().and_then(|loaded| loaded.folder.as_deref()));
    let _alone = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(compiler) = COMPILER.get() {
        return Ok(compiler);
    }
    let found = find(folder, Hiprtc::open).map_err(|error| {
        unavailable("load compiler", &error, "ROCm's run-time compiler").with_fix(
            "install hiprtc of ROCm 6 or newer (the packages hip-runtime-amd and hip-devel), or name the folder \
             of libhiprtc.so by `libraries` in [kernels.rocm]",
        )
    })?;
    Ok(COMPILER.get_or_init(|| found))
}

fn same_folder(loaded: &Loaded, folder: Option<&Path>) -> Result<()> {
    if folder.is_none() || folder == loaded.folder.as_deref() {
        return Ok(());
    }
    let message = format!(
        "`libraries`: found {}; expected the place of {}, which this process has loaded",
        folder.map_or(String::new(), |folder| folder.display().to_string()),
        loaded.hip.file
    );
    Err(Error::new(ErrorKind::Config, "load driver", message)
        .with_fix("name the same folder in [kernels.rocm] and in [transport.scale_up.xgmi]")
        .with_key("libraries"))
}

fn unavailable(operation: &'static str, error: &LoadError, expected: &str) -> Error {
    Error::new(ErrorKind::Unavailable, operation, format!("{error}; expected {expected}"))
}

/// Opens a library in the folder that is named; else in that of `ROCM_PATH`, where the loader finds it, or in
/// that of AMD's packages.
fn find<L>(
    named: Option<&Path>,
    open: impl Fn(Option<&Path>) -> std::result::Result<L, LoadError>,
) -> std::result::Result<L, LoadError> {
    if named.is_some() {
        return open(named);
    }
    let rocm = std::env::var_os("ROCM_PATH").map(|rocm| PathBuf::from(rocm).join("lib"));
    let rocm = rocm.filter(|folder| folder.is_absolute()).map(Some);
    let mut absent = None;
    for place in rocm.into_iter().chain([None, Some(PathBuf::from(USUAL))]) {
        match open(place.as_deref()) {
            // The loader's own names say most.
            Err(error @ LoadError::Absent { .. }) if place.is_none() => absent = Some(error),
            Err(LoadError::Absent { .. }) => {}
            other => return other,
        }
    }
    Err(absent.unwrap_or(LoadError::Absent {
        file: String::new(),
        reason: String::new(),
        install: None,
    }))
}

fn open(folder: Option<&Path>) -> Result<Loaded> {
    let hip = find(folder, Hip::open).map_err(|error| {
        unavailable("load driver", &error, "ROCm's HIP library").with_fix(
            "install ROCm 6 or newer (amdgpu-install --usecase=rocm, or a container image with ROCm), or name the \
             folder of libamdhip64.so by `libraries` in [kernels.rocm] and [transport.scale_up.xgmi]",
        )
    })?;
    // SAFETY: HIP is initialised once, before any other call.
    let status = unsafe { (hip.init)(0) };
    if status != consts::SUCCESS {
        let message = format!("hipInit of {} says {}", hip.file, text_of(&hip, status));
        return Err(Error::new(ErrorKind::Unavailable, "load driver", message).with_fix(
            "see what rocm-smi says; give the user the group render, and the container /dev/kfd and \
             /dev/dri/renderD*",
        ));
    }
    let mut version = 0;
    // SAFETY: HIP is initialised; the number is ours.
    let status = unsafe { (hip.runtime_get_version)(&mut version) };
    if status != consts::SUCCESS || version < OLDEST {
        let found = version_text(version);
        let message = format!("found HIP {found} in {}; expected 6.0 or newer", hip.file);
        return Err(Error::new(ErrorKind::Unavailable, "load driver", message)
            .with_fix("install ROCm 6 or newer"));
    }
    Ok(Loaded { hip, folder: folder.map(Path::to_owned), version })
}

/// The version in words, as HIP numbers it: 60443482 is 6.4.43482.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000_000, version / 100_000 % 100, version % 100_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_hip_writes_them() {
        assert_eq!(version_text(60_443_482), "6.4.43482");
        assert_eq!(version_text(71_460_850), "7.14.60850");
        assert_eq!(version_text(0), "0.0.0");
    }

    #[test]
    fn a_folder_that_is_named_is_the_only_one_that_is_looked_at() {
        let folder = tempfile::tempdir().unwrap();
        let error = load(Some(folder.path())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let (text, folder) = (error.to_string(), folder.path().display().to_string());
        assert!(text.contains(&format!("{folder}/libamdhip64.so.7, ")), "{text}");
        assert!(text.contains(&format!("{folder}/libamdhip64.so cannot be loaded")), "{text}");
        assert!(text.contains("; expected ROCm's HIP library"), "{text}");
        assert!(error.fix().is_some_and(|fix| fix.contains("`libraries` in [kernels.rocm]")));
        assert!(LOADED.get().is_none(), "a later call may name another folder");
    }

    #[test]
    fn an_old_library_is_an_error_wherever_it_is_found() {
        let old = |_: Option<&Path>| {
            let (file, function) = ("libamdhip64.so.5".into(), "hipInit");
            Err::<(), _>(LoadError::Lacks { file, function, expected: "ROCm 6 or newer" })
        };
        assert!(matches!(find(None, old), Err(LoadError::Lacks { .. })));
        let absent = |place: Option<&Path>| {
            let file = place.map_or("by the loader".into(), |p| p.display().to_string());
            Err::<(), _>(LoadError::Absent { file, reason: String::new(), install: None })
        };
        let error = find(None, absent).unwrap_err().to_string();
        assert!(error.starts_with("by the loader"), "{error}");
    }
}
