//! A tool for measurements: the transport `twin`, with which two GPUs have the load of two of many.
//!
//! The ranks of a world are processes on two GPUs, but only ranks 0 and 1 run operations. In the device API of each of
//! these, the window of every rank from 2 on is that of the other. Low-latency kernels write there under the number of
//! the rank that they mean (`writer_at`). So each of the two sends as many rows as one of R ranks, and gets as many:
//! rows that the other has sent to rank r arrive as if they came from rank r. All sums are exact.
//!
//! Its times are those of two GPUs, whose links carry what a switch would spread over R. Ranks from 2 on only open and
//! close.
//!
//! Watched by the tests in this file, and on GPUs by `python/tests/gpu_twin.py`.

use std::sync::{Arc, OnceLock};

use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Transport, TransportOpen, Window,
};
use tokenyard_core::{Result, abi};
use tokenyard_cuda::{Nvlink, PLATFORM};
use tokenyard_gpu::driver::{Buffer, Context, Device};
use tokenyard_gpu::{Devices, PeersConfig};

tokenyard_core::export_transports!(Twin);

const DEFINE: &str = "TY_TWIN=1";
const DEFINES: &[abi::TyStr] = &[abi::TyStr { data: DEFINE.as_ptr(), bytes: DEFINE.len() }];

/// The transport; see the crate.
#[derive(Debug)]
pub struct Twin {
    /// The table that `params` names.
    table: OnceLock<(Buffer, Vec<u64>)>,
    nvlink: Nvlink,
    context: Arc<Context>,
    windows: u32,
    me: u32,
    peers: u32,
}

/// The rank whose window stands for that of `peer` on rank `me`.
fn stands_for(me: u32, peer: u32) -> u32 {
    if me < 2 && peer > 1 { 1 - me } else { peer }
}

impl Twin {
    /// The table of windows, and `DeviceApi::Params` of `nvlink` with it.
    fn params(&self) -> Result<(Buffer, Vec<u64>)> {
        let inner = self.nvlink.device_api()?;
        let mut params = vec![0u64; inner.param_bytes.div_ceil(size_of::<u64>())];
        let from = inner.params.cast::<u8>();
        // SAFETY: `nvlink`, which lives, reports as many bytes; the words have room for them, and are apart.
        unsafe {
            std::ptr::copy_nonoverlapping(from, params.as_mut_ptr().cast(), inner.param_bytes);
        }
        let places = (0..self.windows).flat_map(|window| (0..self.peers).map(move |p| (window, p)));
        let addresses = places.map(|(window, peer)| {
            let address = self.nvlink.peer_address(window, stands_for(self.me, peer))?;
            Ok(address as u64)
        });
        let table = Buffer::of(&self.context, &addresses.collect::<Result<Vec<u64>>>()?)?;
        // `DeviceApi::Params` in nvlink.cuh begins with the address of the table.
        if let Some(first) = params.first_mut() {
            *first = table.address();
        }
        Ok((table, params))
    }
}

impl Transport for Twin {
    const NAME: &'static str = "twin";
    const ABOUT: &'static str = "a tool for measurements: two GPUs with the load of two of many";
    type Config = PeersConfig;

    fn configure(table: &ComponentTable) -> Result<PeersConfig> {
        Nvlink::configure(table)
    }

    fn probe(config: &PeersConfig) -> Result<Capabilities> {
        Nvlink::probe(config)
    }

    fn open(config: PeersConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, .. } = *open;
        let device = config.device.as_ref().map(Devices::mine).or(open.device);
        Ok(Self {
            table: OnceLock::new(),
            context: Context::retain(Device::choose(&PLATFORM, device)?)?,
            nvlink: Nvlink::open(config, open)?,
            windows: 0,
            me: team.me,
            peers: team.world_ranks.len() as u32,
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.nvlink.memory_needs()
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.nvlink.register(window)? };
        self.windows += 1;
        Ok(())
    }

    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        self.nvlink.endpoint(peer)
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        self.nvlink.connect(peer, data)
    }

    fn commit(&mut self) -> Result<()> {
        self.nvlink.commit()
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        // SAFETY: by this function's contract.
        unsafe { self.nvlink.post(queue, commands) }
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        self.nvlink.poll(queue, events)
    }

    fn read_signal(&self, queue: u32, id: u32) -> u64 {
        self.nvlink.read_signal(queue, id)
    }

    fn peer_address(&self, window: u32, peer: u32) -> Result<*mut u8> {
        self.nvlink.peer_address(window, peer)
    }

    fn health(&self) -> Result<()> {
        self.nvlink.health()
    }

    fn device_api(&self) -> Result<abi::TyDeviceApi> {
        let (_, params) = match self.table.get() {
            Some(made) => made,
            None => {
                let made = self.params()?;
                self.table.get_or_init(|| made)
            }
        };
        Ok(abi::TyDeviceApi { params: params.as_ptr().cast(), ..Self::device_source()? })
    }

    fn device_source() -> Result<abi::TyDeviceApi> {
        let below = Nvlink::device_source()?;
        Ok(abi::TyDeviceApi {
            defines: DEFINES.as_ptr(),
            define_count: DEFINES.len(),
            params: std::ptr::null(),
            param_alignment: align_of::<u64>(),
            ..below
        })
    }

    fn link_name(&self, peer: u32) -> String {
        format!("twin (a tool for measurements) over {}", self.nvlink.link_name(peer))
    }
}

#[cfg(test)]
mod tests {
    use super::stands_for;

    #[test]
    fn the_windows_of_ranks_from_2_on_are_those_of_the_other_gpu() {
        assert_eq!([0, 1, 2, 7].map(|peer| stands_for(0, peer)), [0, 1, 1, 1]);
        assert_eq!([0, 1, 2, 7].map(|peer| stands_for(1, peer)), [0, 1, 0, 0]);
        assert_eq!([0, 1, 2, 7].map(|peer| stands_for(5, peer)), [0, 1, 2, 7]);
    }
}
