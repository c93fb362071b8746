//! The kernel, its command line, and its modules.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::Fact;

/// The running kernel and what it runs on.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Kernel {
    /// `6.8.0-45-generic`.
    pub release: Fact<String>,
    /// Words of the command line: `iommu=pt`.
    pub command_line: Fact<Vec<String>>,
    /// The processors run under a hypervisor.
    pub is_virtual: Fact<bool>,
    /// Model of the processors.
    pub processor: Fact<String>,
    /// Maker and name of the machine: `NVIDIA DGXH100`.
    pub product: Fact<String>,
    /// `CONFIG_PCI_P2PDMA`, from the configuration that `boot` keeps.
    pub has_p2pdma: Fact<bool>,
    /// `CONFIG_DMABUF_MOVE_NOTIFY`, from the same.
    pub has_dmabuf_move_notify: Fact<bool>,
}

/// A kernel module that is loaded (or built in and visible).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Module {
    /// Version, where the module has one.
    pub version: Fact<String>,
    /// Parameters that can be read.
    pub parameters: BTreeMap<String, Fact<String>>,
}
