//! Finds the plugins that are installed with the running program.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::config::{ComponentChoice, Config};
use crate::{Error, ErrorKind, Result};

use super::registry::{ComponentKind, Registry};

/// The plugins of this project with components that a program may lack: the component, and its plugin.
const OWN: [(&str, &str); 9] = [
    ("cuda", "cuda"),
    ("nvlink", "cuda"),
    ("rocm", "rocm"),
    ("xgmi", "rocm"),
    ("verbs", "verbs"),
    ("libfabric", "libfabric"),
    ("efa", "libfabric"),
    ("gin", "gin"),
    ("faulty", "faulty"),
];

/// The folder of plugins, below the folder that holds `bin`.
const LIB: &str = "lib/tokenyard";

/// The file of the plugin that provides `component`.
fn file_name(component: &str) -> String {
    let own = own_plugin(component).unwrap_or(component);
    format!("libtokenyard_plugin_{}.so", own.replace('-', "_"))
}

fn own_plugin(component: &str) -> Option<&'static str> {
    OWN.iter().find(|(name, _)| *name == component).map(|(_, plugin)| *plugin)
}

/// Folders that [`add_plugin_folder`] has added.
static ADDED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Searches `folder`, too, for the plugins of components that a config names. It is for an image whose
/// package is not that of the running program: `folder` is in the image's package. A repeated call is no
/// error.
///
/// # Errors
/// A path that is not absolute: its meaning would depend on the current folder.
pub fn add_plugin_folder(folder: &Path) -> Result<()> {
    if !folder.is_absolute() {
        let text = format!("found {}; expected an absolute path", folder.display());
        return Err(Error::new(ErrorKind::InvalidInput, "add plugin folder", text));
    }
    let mut added = ADDED.lock().unwrap_or_else(PoisonError::into_inner);
    if !added.iter().any(|known| known == folder) {
        added.push(folder.to_path_buf());
    }
    Ok(())
}

/// The folders that are searched, in order: that of the program, `../lib/tokenyard` of it, and the added
/// ones.
///
/// The kernel gives the path of the running file (`/proc/self/exe`), independent of the program's
/// arguments. Neither the current folder nor a variable decides which code is loaded.
fn folders() -> Vec<PathBuf> {
    let mut folders = std::env::current_exe().map(|file| beside(&file)).unwrap_or_default();
    folders.extend(ADDED.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned());
    folders
}

fn beside(program: &Path) -> Vec<PathBuf> {
    let mut above = program.ancestors().skip(1).map(Path::to_path_buf);
    let (own, prefix) = (above.next(), above.next().map(|prefix| prefix.join(LIB)));
    own.into_iter().chain(prefix).filter(|folder| folder.is_absolute()).collect()
}

/// The first file of the plugin that provides `component`. No file is opened, and no other name is
/// searched for.
fn find(component: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    // Links count, whatever their target: opening the file reports its faults.
    let there = |file: &PathBuf| std::fs::symlink_metadata(file).is_ok();
    folders.iter().map(|folder| folder.join(file_name(component))).find(there)
}

/// The installed plugins of the components that `config` names and `registry` lacks, each one once, with
/// the first choice that asks for it.
pub(super) fn wanted<'a>(
    config: &'a Config,
    registry: &Registry,
) -> Vec<(PathBuf, &'a ComponentChoice)> {
    let folders = folders();
    let mut files: Vec<(PathBuf, &ComponentChoice)> = Vec::new();
    for (_, choice) in registry.missing(config) {
        if let Some(file) = find(&choice.name, &folders)
            && !files.iter().any(|(known, _)| *known == file)
        {
            files.push((file, choice));
        }
    }
    files
}

/// Text for an unknown component: the places where its plugin was searched, and the fix.
pub(super) fn explain(kind: ComponentKind, component: &str) -> (String, String) {
    explain_in(kind, component, &folders())
}

fn explain_in(kind: ComponentKind, component: &str, folders: &[PathBuf]) -> (String, String) {
    let other = "correct `use`, or add the plugin that provides it to [plugins] paths";
    if let Some(file) = find(component, folders) {
        let text = format!("{} has no {} of this name", file.display(), kind.name());
        return (text, other.to_owned());
    }
    let searched = match folders {
        [] => {
            "no folder, because the kernel does not give the path of the running program".to_owned()
        }
        folders => {
            let names: Vec<_> = folders.iter().map(|f| f.display().to_string()).collect();
            names.join(" and ")
        }
    };
    let file = file_name(component);
    let text = format!("{file} was looked for in {searched}, and was not found");
    let fix = own_plugin(component).map(|plugin| {
        format!(
            "build it (cargo build --release -p tokenyard-plugin-{plugin}, or cargo xtask install \
             PREFIX for the program and its plugins), or name its file in [plugins] paths"
        )
    });
    (text, fix.unwrap_or_else(|| other.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folders_are_that_of_the_program_and_lib_of_its_prefix() {
        let text = |program| {
            beside(Path::new(program)).iter().map(|f| f.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(text("/opt/ty/bin/tokenyard"), ["/opt/ty/bin", "/opt/ty/lib/tokenyard"]);
        assert_eq!(text("/tokenyard"), ["/"]);
        assert!(text("bin/tokenyard").is_empty());
    }

    #[test]
    fn a_folder_that_was_added_is_searched_last_and_must_be_absolute() {
        let before = folders();
        let text = add_plugin_folder(Path::new("plugins")).unwrap_err().to_string();
        assert!(text.contains("found plugins; expected an absolute path"), "{text}");
        for _ in 0..2 {
            add_plugin_folder(Path::new("/opt/package/plugins")).unwrap();
        }
        assert_eq!(folders(), [before, vec![PathBuf::from("/opt/package/plugins")]].concat());
    }

    #[test]
    fn a_plugin_is_found_by_its_exact_name_first_beside_the_program() {
        let root = tempfile::tempdir().unwrap();
        let folders = ["bin", "lib"].map(|name| root.path().join(name));
        folders.iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        for name in ["libtokenyard_plugin_my.so.1", "libtokenyard_plugin_myx.so", "my.so"] {
            std::fs::write(folders[1].join(name), "").unwrap();
        }
        assert_eq!(find("my-net", &folders), None);
        let lib = folders[1].join("libtokenyard_plugin_my_net.so");
        std::fs::write(&lib, "").unwrap();
        assert_eq!(find("my-net", &folders), Some(lib));
        let bin = folders[0].join("libtokenyard_plugin_my_net.so");
        std::os::unix::fs::symlink("/none", &bin).unwrap();
        assert_eq!(find("my-net", &folders), Some(bin));
    }

    #[test]
    fn a_missing_plugin_of_this_project_comes_with_file_folders_and_the_command_that_builds_it() {
        let folders = [PathBuf::from("/none/bin"), PathBuf::from("/none/lib/tokenyard")];
        let text = |component| {
            let (looked, fix) = explain_in(ComponentKind::Transport, component, &folders);
            format!("{looked}. Fix: {fix}")
        };
        let verbs = text("verbs");
        for words in [
            "libtokenyard_plugin_verbs.so",
            "/none/bin and /none/lib/tokenyard",
            "cargo build --release -p tokenyard-plugin-verbs",
            "cargo xtask install PREFIX",
        ] {
            assert!(verbs.contains(words), "{words}: {verbs}");
        }
        let efa = text("efa");
        assert!(efa.contains("libtokenyard_plugin_libfabric.so"), "{efa}");
        assert!(efa.contains("-p tokenyard-plugin-libfabric"), "{efa}");
        let other = text("acme");
        assert!(other.contains("libtokenyard_plugin_acme.so"), "{other}");
        assert!(other.contains("Fix: correct `use`") && !other.contains("cargo"), "{other}");
    }
}
