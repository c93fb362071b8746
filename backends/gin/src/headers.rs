//! The library, and the headers of exactly its version: device code fits no other version.

use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use tokenyard_core::{Error, ErrorKind, Result, files};
use tokenyard_sys_nccl::{LoadError, Nccl};

use crate::config::GinConfig;

/// The largest `nccl.h` that is read, in bytes.
const MOST_HEADER: u64 = 4 << 20;
const DEVICE_HEADER: &str = "nccl_device.h";

/// NCCL on this machine, with a folder of its headers.
#[derive(Debug)]
pub(crate) struct Installed {
    pub(crate) nccl: Nccl,
    pub(crate) include: PathBuf,
}

impl Installed {
    /// Opens the library, and looks for its headers.
    ///
    /// # Errors
    /// `Unavailable`, with the missing file, or with both versions where they differ.
    pub(crate) fn new(config: &GinConfig) -> Result<Self> {
        let opened = match &config.nccl_library {
            Some(file) => Nccl::open_file(file),
            None => Nccl::open(),
        };
        let nccl = opened.map_err(unavailable)?;
        let include = include_of(config.nccl_include.as_deref(), &file_of(&nccl))?;
        check_versions(nccl.version(), &nccl.version_text(), &include)?;
        Ok(Self { nccl, include })
    }
}

/// The library's own error says how to install it.
fn unavailable(error: LoadError) -> Error {
    Error::new(ErrorKind::Unavailable, "load NCCL", error.to_string())
        .with_fix("do that, or name another library by `nccl_library`")
}

/// The file that the library was loaded from, as the loader reports it.
fn file_of(nccl: &Nccl) -> PathBuf {
    let mut about = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    let function = nccl.get_version as *const c_void;
    // SAFETY: any address may be asked for; the name belongs to the loader, and the library is never unloaded.
    let name = unsafe {
        if libc::dladdr(function, &mut about) == 0 || about.dli_fname.is_null() {
            return nccl.file().to_owned();
        }
        CStr::from_ptr(about.dli_fname)
    };
    PathBuf::from(OsStr::from_bytes(name.to_bytes()))
}

/// The folder that the config names, else the one beside the library: `lib` has `include` beside it, and Debian's
/// libraries lie one folder deeper.
fn include_of(named: Option<&Path>, library: &Path) -> Result<PathBuf> {
    // The file behind links: a folder may have links to libraries only.
    let real = library.canonicalize().unwrap_or_else(|_| library.to_owned());
    let places: Vec<PathBuf> = match named {
        Some(folder) => vec![folder.to_owned()],
        None => [library, &real]
            .into_iter()
            .flat_map(|file| file.ancestors().skip(2).take(2))
            .map(|folder| folder.join("include"))
            .collect(),
    };
    if let Some(place) = places.iter().find(|place| place.join(DEVICE_HEADER).is_file()) {
        return Ok(place.clone());
    }
    let looked: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
    let message = format!(
        "found no {DEVICE_HEADER} for {}; expected it, as kernels are compiled with it; looked in: {}",
        library.display(),
        looked.join(", ")
    );
    Err(Error::new(ErrorKind::Unavailable, "find NCCL's headers", message).with_fix(
        "name the folder of the library's own headers by `nccl_include` (pip's nvidia-nccl-cu13 has it; of Debian \
         packages, libnccl-dev)",
    ))
}

fn check_versions(library: i32, text: &str, include: &Path) -> Result<()> {
    let header = include.join("nccl.h");
    let read = files::read_text(&header, MOST_HEADER)
        .map_err(|e| Error::file(ErrorKind::Unavailable, "find NCCL's headers", &e))?;
    let found = version_of(&read).ok_or_else(|| {
        let message = format!("found no NCCL_VERSION_CODE in {}; expected one", header.display());
        Error::new(ErrorKind::Unavailable, "find NCCL's headers", message)
            .with_fix("name the folder of the library's own headers by `nccl_include`")
    })?;
    if found == library {
        return Ok(());
    }
    let message = format!(
        "found headers of NCCL {} in {}, and a library of {text}; expected equal versions, as device code fits no \
         other",
        version_text(found),
        include.display()
    );
    Err(Error::new(ErrorKind::Unavailable, "find NCCL's headers", message)
        .with_fix("name the folder of the library's own headers by `nccl_include`, or that library by `nccl_library`"))
}

/// `NCCL_VERSION_CODE` of `nccl.h`.
fn version_of(header: &str) -> Option<i32> {
    let mut lines =
        header.lines().filter_map(|line| line.trim().strip_prefix("#define NCCL_VERSION_CODE"));
    lines.next()?.split_whitespace().next()?.parse().ok()
}

/// A version in its usual written form.
pub(crate) fn version_text(code: i32) -> String {
    format!("{}.{}.{}", code / 10_000, code % 10_000 / 100, code % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with a library, and headers of a version beside it.
    fn installed(code: i32, include: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let (library, include) = (folder.path().join("lib"), folder.path().join(include));
        std::fs::create_dir_all(&library).unwrap();
        std::fs::create_dir_all(&include).unwrap();
        let text = format!("#ifndef A\n#define NCCL_MAJOR 2\n#define NCCL_VERSION_CODE {code}\n");
        std::fs::write(include.join("nccl.h"), text).unwrap();
        std::fs::write(include.join(DEVICE_HEADER), "").unwrap();
        let library = library.join("libnccl.so.2");
        (folder, library)
    }

    #[test]
    fn headers_are_found_beside_the_library_unless_the_config_names_them() {
        let (folder, library) = installed(23_203, "include");
        let beside = folder.path().join("include");
        assert_eq!(include_of(None, &library).unwrap(), beside);
        let deeper = folder.path().join("lib/x86_64-linux-gnu/libnccl.so.2");
        assert_eq!(include_of(None, &deeper).unwrap(), beside);
        assert_eq!(include_of(Some(&beside), Path::new("/none/libnccl.so.2")).unwrap(), beside);
        let error = include_of(Some(Path::new("/nowhere")), &library).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("looked in: /nowhere"), "{error}");
    }

    #[test]
    fn versions_that_differ_are_both_named() {
        let (folder, _) = installed(23_102, "include");
        let include = folder.path().join("include");
        assert!(check_versions(23_102, "2.31.2", &include).is_ok());
        let text = check_versions(23_203, "2.32.3", &include).unwrap_err().to_string();
        assert!(
            text.contains("headers of NCCL 2.31.2") && text.contains("library of 2.32.3"),
            "{text}"
        );
    }

    #[test]
    fn headers_without_a_version_are_refused() {
        let (folder, _) = installed(0, "include");
        let include = folder.path().join("include");
        std::fs::write(include.join("nccl.h"), "#define NCCL_MAJOR 2\n").unwrap();
        let text = check_versions(23_203, "2.32.3", &include).unwrap_err().to_string();
        assert!(text.contains("no NCCL_VERSION_CODE"), "{text}");
    }

    #[test]
    fn a_library_that_is_missing_is_named_with_the_fix() {
        let config = GinConfig {
            nccl_library: Some("/nowhere/libnccl.so.2".into()),
            ..GinConfig::default()
        };
        let error = Installed::new(&config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("/nowhere/libnccl.so.2 cannot be loaded"), "{error}");
        assert!(error.to_string().contains("pip install nvidia-nccl-cu13"), "{error}");
        assert!(error.fix().is_some_and(|fix| fix.contains("nccl_library")));
    }
}
