//! Libraries that this process has loaded, as files.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use tokenyard_core::{Error, ErrorKind, Result};

/// The file of a library, where this process has it loaded: the first whose name starts like this.
pub fn mapped(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    library_in(&maps, name).map(PathBuf::from)
}

/// The path of a library in the list of a process's mappings.
fn library_in<'a>(maps: &'a str, name: &str) -> Option<&'a str> {
    maps.lines()
        .filter_map(|line| line.find('/').map(|path| &line[path..]))
        .find(|path| path.rsplit('/').next().is_some_and(|file| file.starts_with(name)))
}

/// The size and the time of a loaded library's file: releases of a compiler that share a version differ in
/// these.
///
/// # Errors
/// It is not loaded, or its file cannot be looked at.
pub fn mapped_identity(name: &str) -> Result<String> {
    let library = mapped(name).ok_or_else(|| {
        let message = format!("found no {name} among the files that are mapped; expected it there");
        Error::new(ErrorKind::System, "ask compiler", message)
    })?;
    let file = std::fs::metadata(library)
        .map_err(|e| Error::system("ask compiler", "its library cannot be looked at", e))?;
    Ok(format!("{} bytes of {}.{:09}", file.len(), file.mtime(), file.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_among_mapped_files_by_its_name() {
        let maps = "\
7f0000000000-7f0000001000 r--p 00000000 08:01 17  /opt/libnvrtc.so.d/libother.so.1
7f0000001000-7f0000002000 rw-p 00000000 00:00 0
7f0000002000-7f0000003000 r-xp 00001000 08:01 18  /opt/a b/lib/libnvrtc-builtins.so.13.0
7f0000003000-7f0000004000 r-xp 00001000 08:01 19  /opt/a b/lib/libnvrtc.so.13
";
        assert_eq!(library_in(maps, "libnvrtc.so"), Some("/opt/a b/lib/libnvrtc.so.13"));
        let stack = "7f0000000000-7f0000001000 r--p 00000000 00:00 0 [stack]\n";
        assert_eq!(library_in(stack, "libnvrtc.so"), None);
    }

    #[test]
    fn a_library_that_is_not_loaded_has_no_identity() {
        let error = mapped_identity("libtokenyard_none.so").unwrap_err();
        assert!(error.to_string().contains("found no libtokenyard_none.so"), "{error}");
    }
}
