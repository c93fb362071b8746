//! The device API of a twin: windows of GPUs in the place of those of ranks that are not there, see `standins/twin`.

use std::sync::Arc;

use tokenyard_core::transport::Transport as _;
use tokenyard_core::{Result, abi};
use tokenyard_cuda::Nvlink;
use tokenyard_gpu::driver::{Buffer, Context, copy};

/// The define by which kernels know that the first `gpus` ranks are there.
pub fn defines(gpus: u32) -> &'static [abi::TyStr] {
    const fn one(text: &'static str) -> [abi::TyStr; 1] {
        [abi::TyStr { data: text.as_ptr(), bytes: text.len() }]
    }
    const ONE: &[abi::TyStr] = &one("TY_TWIN=1");
    const TWO: &[abi::TyStr] = &one("TY_TWIN=2");
    const FOUR: &[abi::TyStr] = &one("TY_TWIN=4");
    match gpus {
        1 => ONE,
        2 => TWO,
        _ => FOUR,
    }
}

/// The parameters of `nvlink`'s device API, with the windows and signals of other ranks in the place of some.
#[derive(Debug)]
pub struct Mirror {
    params: Vec<u64>,
    /// The tables that the first two parameters name.
    _tables: [Buffer; 2],
}

impl Mirror {
    /// `stands_for` gives the peer whose windows are in the place of a peer's, of `peers`.
    ///
    /// # Errors
    /// Of `nvlink`, such as a peer that is not connected, and of the driver.
    pub fn new(
        nvlink: &Nvlink,
        context: &Arc<Context>,
        [windows, peers]: [u32; 2],
        stands_for: impl Fn(u32) -> u32,
    ) -> Result<Self> {
        let inner = nvlink.device_api()?;
        // SAFETY: as many bytes as `nvlink` reports, which lives; words of 8 bytes.
        let words = unsafe {
            std::slice::from_raw_parts(inner.params.cast::<u64>(), inner.param_bytes / 8)
        };
        // `DeviceApi::Params` of nvlink.cuh begins with both tables.
        let mut params = words.to_vec();
        let mut table = |word: usize, rows: u32| {
            let mut seen = vec![0_u64; (rows * peers) as usize];
            copy(context, seen.as_mut_ptr() as u64, params[word], 8 * seen.len() as u64)?;
            let table = Buffer::of(context, &mirrored(&seen, peers, &stands_for))?;
            params[word] = table.address();
            Ok(table)
        };
        let tables = [table(0, windows)?, table(1, 1)?];
        Ok(Self { params, _tables: tables })
    }

    /// The parameters, in words.
    pub fn params(&self) -> &[u64] {
        &self.params
    }
}

/// A table of `[rows][peers]`, with the entries of the peers that others stand for.
fn mirrored(table: &[u64], peers: u32, stands_for: impl Fn(u32) -> u32) -> Vec<u64> {
    let rows = table.chunks_exact(peers.max(1) as usize);
    rows.flat_map(|row| (0..peers).map(|peer| row[stands_for(peer) as usize])).collect()
}

#[cfg(test)]
mod tests {
    use tokenyard_gpu::twin::stand_in;

    use super::*;

    #[test]
    fn every_row_of_a_table_has_the_entries_of_the_gpus_that_are_there() {
        let table = [1, 2, 3, 4, 5, 6];
        assert_eq!(mirrored(&table, 3, |peer| stand_in(2, 0, peer)), [1, 2, 2, 4, 5, 5]);
        assert_eq!(mirrored(&table, 3, |_| 0), [1, 1, 1, 4, 4, 4]);
    }
}
