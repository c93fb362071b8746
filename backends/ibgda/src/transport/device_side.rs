//! The source that kernels compile in, and the parameters that they get.

use std::sync::Arc;

use tokenyard_core::{Result, abi};
use tokenyard_gpu::driver::{Buffer, Context};
use tokenyard_verbs::connection::Memory;

use super::commands::RemoteMemory;
use super::kernels::Kernels;
use super::memory::{Signals, sink};
use crate::device_api::{MemoryKey, Params, SOURCE, flags};

/// The parameters, and the memory that they point to.
#[derive(Debug)]
pub(super) struct DeviceSide {
    params: Box<Params>,
    _memory: [Buffer; 4],
}

/// The sources of parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) memory: &'a Memory,
    pub(super) signals: &'a Signals,
    /// Memory of all ranks of the team, this one included.
    pub(super) remotes: &'a [Arc<RemoteMemory>],
    pub(super) queues: u32,
    pub(super) signal_count: u32,
    pub(super) fence: bool,
}

impl DeviceSide {
    pub(super) fn new(context: &Arc<Context>, parts: &Parts<'_>) -> Result<Self> {
        let local = parts.memory.regions.iter();
        let local: Vec<_> =
            local.map(|region| MemoryKey::new(region.address, region.mr.lkey())).collect();
        let windows = parts.remotes.iter().flat_map(|remote| &remote.windows);
        let remote: Vec<_> =
            windows.map(|window| MemoryKey::new(window.address, window.key.0)).collect();
        let tables = parts.remotes.iter().map(|remote| remote.signals);
        let tables: Vec<_> = tables.map(|(address, key)| MemoryKey::new(address, key)).collect();
        let memory = [
            Buffer::of(context, &parts.kernels.device_queues())?,
            Buffer::of(context, &local)?,
            Buffer::of(context, &remote)?,
            Buffer::of(context, &tables)?,
        ];
        let [queues, local_keys, remote_keys, signal_keys] = memory.each_ref().map(Buffer::address);
        let sink = sink(parts.memory);
        let bit = |is: bool, bit: u32| if is { bit } else { 0 };
        let params = Box::new(Params {
            queues,
            local: local_keys,
            remote: remote_keys,
            tables: signal_keys,
            totals: parts.signals.address(),
            sink: MemoryKey::new(sink.address, sink.key),
            fault: parts.kernels.fault_record(),
            peers: parts.remotes.len() as u32,
            queue_count: parts.queues,
            windows: parts.memory.regions.len() as u32,
            signals: parts.signal_count,
            flags: bit(parts.fence, flags::FENCE_SIGNALS)
                | bit(parts.kernels.host_rings(), flags::HOST_RINGS),
            unused: 0,
        });
        Ok(Self { params, _memory: memory })
    }

    pub(super) fn device_api(&self) -> abi::TyDeviceApi {
        abi::TyDeviceApi { params: (&raw const *self.params).cast(), ..source() }
    }
}

/// The source without parameters, for callers that only compile.
pub(super) fn source() -> abi::TyDeviceApi {
    abi::TyDeviceApi {
        size: size_of::<abi::TyDeviceApi>(),
        version: abi::TY_DEVICE_API_VERSION,
        dialect: abi::TY_DIALECT_CUDA,
        compiler: abi::TY_COMPILER_NVRTC,
        flags: 0,
        source: abi::TyStr { data: SOURCE.as_ptr(), bytes: SOURCE.len() },
        include_folders: std::ptr::null(),
        include_folder_count: 0,
        defines: std::ptr::null(),
        define_count: 0,
        params: std::ptr::null(),
        param_bytes: size_of::<Params>(),
        param_alignment: align_of::<Params>(),
    }
}
