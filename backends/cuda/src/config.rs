//! The config tables of this backend's parts.

use std::path::PathBuf;

use serde::Deserialize;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::kernels::MOST_ARENA;

/// The table `[transport.scale_up.nvlink]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NvlinkConfig {
    /// Ordinal of the device that this rank drives. Default: the device of the calling thread's
    /// current context, else the rank's index on its machine.
    pub device: Option<u32>,
}

/// How rows are moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowCopy {
    /// The best that the device has.
    #[default]
    Auto,
    /// Bulk copies through shared memory.
    Tma,
    /// Vectors of 16 bytes.
    Vector,
}

/// The table `[kernels.cuda]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CudaConfig {
    /// As in the transport's table; must name the same device.
    pub device: Option<u32>,
    /// Multiprocessors that an operation occupies, 1 to 1024.
    pub sms: u32,
    /// How rows are moved: "auto", "tma" or "vector".
    pub rows: RowCopy,
    /// Size of the arena in MiB. Absent: enough for two worst-case outputs of any layout, at most
    /// 16 GiB, but for four of flat rows, at most 64 GiB.
    pub arena_mib: Option<u64>,
    /// Folder for compiled kernels. Default: `tokenyard/cuda` in the user's cache folder.
    pub cache: Option<PathBuf>,
}

impl Default for CudaConfig {
    fn default() -> Self {
        Self { device: None, sms: 16, rows: RowCopy::Auto, arena_mib: None, cache: None }
    }
}

impl CudaConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |key: &str, found: String, expected: &str| {
            Err(Error::new(
                ErrorKind::Config,
                "check [kernels.cuda]",
                format!("{key}: found {found}; expected {expected}"),
            ))
        };
        if !(1..=1024).contains(&self.sms) {
            return refuse("sms", self.sms.to_string(), "1 to 1024");
        }
        match self.arena_mib {
            Some(mib) if mib == 0 || mib > MOST_ARENA >> 20 => {
                refuse("arena_mib", mib.to_string(), "1 to 65536 (64 GiB)")
            }
            _ => Ok(()),
        }
    }
}
