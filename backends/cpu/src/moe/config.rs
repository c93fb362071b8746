use tokenyard_core::{Error, ErrorKind, Result};

/// The table `[kernels.cpu]`.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CpuConfig {
    /// Threads per rank that copy and sum rows, 1 to 256. The result is the same for every number.
    pub threads: u32,
    /// Size of the arena in MiB; absent: enough for two worst-case regions of the largest layout,
    /// but at most 16 GiB, and at least four worst-case flat regions. Memory is used only where it
    /// is touched.
    pub arena_mib: Option<u64>,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self { threads: 1, arena_mib: None }
    }
}

impl CpuConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |key: &str, found: String, expected: &str| {
            Err(Error::new(
                ErrorKind::Config,
                "check [kernels.cpu]",
                format!("`{key}`: found {found}; expected {expected}"),
            )
            .with_key(key))
        };
        if self.threads == 0 || self.threads > 256 {
            return refuse("threads", self.threads.to_string(), "1 to 256");
        }
        match self.arena_mib {
            Some(mib) if mib == 0 || mib > 1 << 22 => {
                refuse("arena_mib", mib.to_string(), "1 to 4194304 (4 TiB)")
            }
            _ => Ok(()),
        }
    }
}
