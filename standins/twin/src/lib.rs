//! A tool for measurements: the transport `twin`, with which two GPUs, or four, have the load of some of many.
//!
//! The ranks of a world are processes on these GPUs, but only the first ones, one for each GPU, run operations. In the
//! device API of each of these, the window of every other rank is that of another GPU. Kernels write there under the
//! number of the rank that they mean (`writer_at`). So each sends as many rows as one of R ranks, and gets as many.
//! Rows that the other GPU has sent to rank r arrive as if they came from rank r. All sums are exact.
//!
//! Inside one of several domains it does the same. Between domains, `paced` with its key `twin` makes each rail a loop.
//!
//! Its times are those of these GPUs, whose links carry what a switch would spread over R. Other ranks only open and
//! close.
//!
//! Watched by the tests in this file, and on GPUs by `python/tests/gpu_twin.py`.

use std::sync::{Arc, OnceLock};

use serde::Deserialize;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Transport, TransportOpen, Window,
};
use tokenyard_core::{Result, abi};
use tokenyard_cuda::{Nvlink, PLATFORM};
use tokenyard_device_put::twins::{Mirror, defines};
use tokenyard_gpu::driver::{Context, Device};
use tokenyard_gpu::twin::{GPUS, stand_in};
use tokenyard_gpu::{Devices, PeersConfig};

tokenyard_core::export_transports!(Twin);

const COMPONENT: &str = "twin";

/// The component's own table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TwinConfig {
    /// The GPUs, one for each of the first ranks of a domain: 2 or 4.
    #[serde(default = "two")]
    pub gpus: u32,
    /// The device that this rank drives. Default: as `nvlink` chooses.
    #[serde(default)]
    pub device: Option<Devices>,
}

fn two() -> u32 {
    2
}

impl TwinConfig {
    fn inner(&self) -> PeersConfig {
        PeersConfig { device: self.device.clone(), ..PeersConfig::default() }
    }
}

/// The transport; see the crate.
#[derive(Debug)]
pub struct Twin {
    mirror: OnceLock<Mirror>,
    nvlink: Nvlink,
    context: Arc<Context>,
    gpus: u32,
    windows: u32,
    me: u32,
    peers: u32,
}

impl Transport for Twin {
    const NAME: &'static str = COMPONENT;
    const ABOUT: &'static str =
        "a tool for measurements: two GPUs, or four, with the load of some of many";
    type Config = TwinConfig;

    fn configure(table: &ComponentTable) -> Result<TwinConfig> {
        let config: TwinConfig = table.parse(COMPONENT)?;
        if !GPUS.contains(&config.gpus) {
            let found = format!("found {}; expected one of {GPUS:?}", config.gpus);
            return Err(table.invalid(COMPONENT, "gpus", &found));
        }
        Ok(config)
    }

    fn probe(config: &TwinConfig) -> Result<Capabilities> {
        Nvlink::probe(&config.inner())
    }

    fn open(config: TwinConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, .. } = *open;
        let device = config.device.as_ref().map(Devices::mine).or(open.device);
        Ok(Self {
            mirror: OnceLock::new(),
            context: Context::retain(Device::choose(&PLATFORM, device)?)?,
            nvlink: Nvlink::open(config.inner(), open)?,
            gpus: config.gpus,
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
        let mirror = match self.mirror.get() {
            Some(made) => made,
            None => {
                let sizes = [self.windows, self.peers];
                let stands_for = |peer| stand_in(self.gpus, self.me, peer);
                let made = Mirror::new(&self.nvlink, &self.context, sizes, stands_for)?;
                self.mirror.get_or_init(|| made)
            }
        };
        let defines = defines(self.gpus);
        Ok(abi::TyDeviceApi {
            defines: defines.as_ptr(),
            define_count: defines.len(),
            params: mirror.params().as_ptr().cast(),
            ..Self::device_source()?
        })
    }

    fn device_source() -> Result<abi::TyDeviceApi> {
        let (below, defines) = (Nvlink::device_source()?, defines(two()));
        Ok(abi::TyDeviceApi {
            defines: defines.as_ptr(),
            define_count: defines.len(),
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
    use super::*;

    #[test]
    fn two_gpus_are_the_default_and_other_numbers_than_2_and_4_are_refused() {
        let read = |text| Twin::configure(&ComponentTable::from_text(text, "a.toml"));
        assert_eq!(read("").unwrap(), TwinConfig { gpus: 2, device: None });
        assert_eq!(read("gpus = 4").unwrap().gpus, 4);
        let text = read("gpus = 3").unwrap_err().to_string();
        assert!(text.contains("found 3; expected one of [2, 4]"), "{text}");
    }
}
