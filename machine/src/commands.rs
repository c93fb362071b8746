//! What only commands tell, as they printed it.

use serde::Serialize;

use crate::Fact;

/// Outputs of commands, in a recorded tree the files of its folder `tokenyard`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Outputs {
    /// `nvidia-smi -q`: file `nvidia-smi-q.txt`.
    pub nvidia_smi: Fact<String>,
    /// `nvidia-smi nvlink -s`: file `nvidia-smi-nvlink.txt`.
    pub nvlink: Fact<String>,
    /// `ibv_devinfo`: file `ibv_devinfo.txt`.
    pub ibv_devinfo: Fact<String>,
    /// `fi_info`: file `fi_info.txt`.
    pub fi_info: Fact<String>,
}

/// One thing that libfabric offers, as `fi_info` lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FabricDomain {
    /// Provider: `efa`, `verbs;ofi_rxm`, `tcp`.
    pub provider: String,
    /// Domain: `rdmap85s0-rdm`.
    pub domain: String,
    /// Version of the provider: `122.0`.
    pub version: Option<String>,
}
