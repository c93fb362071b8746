//! Libraries found in the usual folders.

use serde::Serialize;

use crate::Fact;

/// What is installed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Libraries {
    /// Libraries that a part uses, or that other communication libraries are made of.
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
    /// Where it is, from the root.
    pub path: String,
    /// Version, from the name of the file that links end at: `2.27.3`. A file named `libx.so.2`
    /// tells `2`, and `libx.so` nothing.
    pub version: Option<String>,
}
