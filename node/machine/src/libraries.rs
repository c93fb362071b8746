//! Libraries found in the usual folders.

use serde::Serialize;

use crate::Fact;
use crate::tree::{Tree, last_name};

/// The libraries that are installed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Libraries {
    /// Libraries that a component uses, or that belong to other communication libraries.
    pub found: Vec<Library>,
    /// Packages of the EFA installer, as `opt/amazon/efa_installed_packages` lists them.
    pub efa_packages: Fact<Vec<String>>,
    /// Version of the EFA installer, from the same file.
    pub efa_installer: Fact<String>,
}

/// A shared library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Library {
    /// Name without version: `libnccl.so`.
    pub name: String,
    /// Its path, from the root.
    pub path: String,
    /// Version, from the name of the file at the end of the links: `2.27.3`. A file named
    /// `libx.so.2` gives `2`, and `libx.so` none.
    pub version: Option<String>,
}

/// Folders that are searched, after those of `LD_LIBRARY_PATH`.
const FOLDERS: [&str; 14] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "usr/local/lib64",
    "usr/local/cuda/lib64",
    "usr/local/cuda/compat",
    "opt/amazon/efa/lib",
    "opt/amazon/efa/lib64",
    "opt/amazon/ofi-nccl/lib",
    "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "opt/rocm/lib",
    "usr/mpi/lib",
];
const NAMES: [&str; 19] = [
    "libamdhip64.so",
    "libcuda.so",
    "libefa.so",
    "libfabric.so",
    "libgdrapi.so",
    "libhiprtc.so",
    "libibverbs.so",
    "libionic.so",
    "libmlx5.so",
    "libnccl-net-ofi.so",
    "libnccl-net.so",
    "libnccl.so",
    "libnvidia-ml.so",
    "libnvrtc.so",
    "libnvshmem_host.so",
    "librccl-net.so",
    "librccl.so",
    "librdmacm.so",
    "librocshmem.so",
];
/// Most folders of `LD_LIBRARY_PATH` that are searched.
const MOST_FOLDERS: usize = 64;
const EFA: &str = "opt/amazon/efa_installed_packages";

pub(crate) fn read(tree: &Tree, search_path: &str) -> Libraries {
    let own = search_path.split(':').map(|folder| folder.trim_matches('/'));
    let mut found: Vec<Library> = Vec::new();
    for folder in own.filter(|f| !f.is_empty()).take(MOST_FOLDERS).chain(FOLDERS) {
        for entry in tree.list(folder) {
            if let Some(name) = known_name(&entry) {
                add(tree, &mut found, name, format!("{folder}/{entry}"));
            }
        }
        // The providers that libibverbs loads, one for each kind of NIC.
        for entry in tree.list(&format!("{folder}/libibverbs")) {
            if entry.contains("-rdmav") {
                found.push(Library {
                    name: entry.clone(),
                    path: format!("{folder}/libibverbs/{entry}"),
                    version: None,
                });
            }
        }
    }
    let efa = tree.text(EFA);
    Libraries {
        found,
        efa_installer: efa.clone().and_then(|text| {
            let (_, version) = text.split_once("EFA installer version:")?;
            version.split_whitespace().next().map(str::to_owned)
        }),
        efa_packages: efa.and_then(|text| Some(efa_packages(&text))),
    }
}

/// The known name that a file `libx.so` or `libx.so.1.2` has.
fn known_name(file: &str) -> Option<&'static str> {
    NAMES.into_iter().find(|name| {
        file.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

/// Adds a library once, by the file at the end of its links.
fn add(tree: &Tree, found: &mut Vec<Library>, name: &str, path: String) {
    let Fact::Known(path) = tree.resolve(&path) else { return };
    if found.iter().any(|library| library.path == path) {
        return;
    }
    let version = last_name(&path)
        .split_once(".so.")
        .map(|(_, version)| version.to_owned())
        .filter(|version| version.starts_with(|c: char| c.is_ascii_digit()));
    found.push(Library { name: name.to_owned(), path, version });
}

/// Names of packages; the head of the file is two lines.
fn efa_packages(text: &str) -> Vec<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#') && !line.ends_with(':'))
        .flat_map(|line| line.split(", "))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_once_with_the_version_of_the_file_that_links_end_at() {
        let tree = Tree::recorded(
            "usr/lib/x86_64-linux-gnu/libnccl.so.2 -> libnccl.so.2.27.3\n\
             usr/lib/x86_64-linux-gnu/libnccl.so.2.27.3 =\n\
             usr/lib/x86_64-linux-gnu/libncclx.so =\n\
             usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so -> ../libmlx5.so.1\n\
             usr/lib/x86_64-linux-gnu/libmlx5.so.1 =\n\
             srv/venv/lib/libnvshmem_host.so.3 =\n\
             opt/amazon/efa_installed_packages = # EFA installer version: 1.43.2\\n# Debug packages installed: no\\n# Packages installed:\\nefa_2.17.2-1.amzn1_amd64, libfabric1-aws_2.1.0amzn5.0_amd64\n",
        )
        .unwrap();
        let libraries = read(&tree, "/srv/venv/lib:");
        let found: Vec<_> = libraries
            .found
            .iter()
            .map(|l| (l.name.as_str(), l.version.as_deref(), l.path.as_str()))
            .collect();
        let usual = "usr/lib/x86_64-linux-gnu";
        assert_eq!(
            found,
            [
                ("libnvshmem_host.so", Some("3"), "srv/venv/lib/libnvshmem_host.so.3"),
                ("libmlx5.so", Some("1"), &format!("{usual}/libmlx5.so.1")),
                ("libnccl.so", Some("2.27.3"), &format!("{usual}/libnccl.so.2.27.3")),
                ("libmlx5-rdmav34.so", None, &format!("{usual}/libibverbs/libmlx5-rdmav34.so")),
            ]
        );
        assert_eq!(libraries.efa_installer, Fact::Known("1.43.2".into()));
        assert_eq!(libraries.efa_packages.get().unwrap().len(), 2);
    }
}
