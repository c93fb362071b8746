//! The device side: the source text, how it is compiled, and the parameters of kernels.

use tokenyard_core::{Result, abi};
use tokenyard_gpu::driver::{Buffer, Context};

use super::communicator::DeviceParts;
use crate::config::GinType;

const SOURCE: &str = include_str!("gin.cuh");
/// NCCL's headers open namespaces of their own, so they come before the namespace of the level.
const PRELUDE: &str = "TY_UP_PRELUDE=<nccl_device.h>";

/// `DeviceApi::Params` of `gin.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RawParams {
    comm: u64,
    windows: u64,
    tickets: u64,
    issued: u64,
    settled: u64,
    limit: u32,
    me: u32,
    peers: u32,
    reserved: u32,
}

/// The parameters, and the memory that they point to.
#[derive(Debug)]
pub(super) struct Params {
    raw: Box<RawParams>,
    _memory: Vec<Buffer>,
}

impl Params {
    /// `numbers`: credits per peer, this rank in its team, peers.
    pub(super) fn new(
        context: &std::sync::Arc<Context>,
        parts: &DeviceParts,
        numbers: [u32; 3],
    ) -> Result<Self> {
        let [limit, me, peers] = numbers;
        let counts = vec![0_u64; peers as usize];
        let memory = [&parts.comm, &parts.windows, &counts, &counts, &counts]
            .map(|words| Buffer::of(context, words));
        let memory = memory.into_iter().collect::<Result<Vec<_>>>()?;
        let at = |index: usize| memory.get(index).map_or(0, Buffer::address);
        let raw = Box::new(RawParams {
            comm: at(0),
            windows: at(1),
            tickets: at(2),
            issued: at(3),
            settled: at(4),
            limit,
            me,
            peers,
            reserved: 0,
        });
        Ok(Self { raw, _memory: memory })
    }
}

/// The source that is compiled into kernels. The texts that it points to live as long as it does.
#[derive(Debug)]
pub struct DeviceSide {
    /// Owns the text that `folders` and `defines` point to.
    _include: String,
    folders: Vec<abi::TyStr>,
    defines: Vec<abi::TyStr>,
    params: Option<Params>,
}

// SAFETY: the texts point to `_include`, whose bytes do not move, or to static memory.
unsafe impl Send for DeviceSide {}
// SAFETY: as above; nothing changes.
unsafe impl Sync for DeviceSide {}

fn text(text: &str) -> abi::TyStr {
    abi::TyStr { data: text.as_ptr(), bytes: text.len() }
}

impl DeviceSide {
    pub(super) fn new(include: String, choice: GinType, params: Params) -> Self {
        Self { params: Some(params), ..Self::source_only(include, choice) }
    }

    /// The device side without parameters, for a caller that only compiles: with NCCL's headers in the folder
    /// `include`.
    pub fn source_only(include: String, choice: GinType) -> Self {
        let folders = vec![text(&include)];
        let defines = std::iter::once(PRELUDE).chain(choice.switches()).map(text).collect();
        Self { _include: include, folders, defines, params: None }
    }

    /// This device API in the form of the plugin ABI.
    pub fn device_api(&self) -> abi::TyDeviceApi {
        let params = self.params.as_ref();
        abi::TyDeviceApi {
            size: size_of::<abi::TyDeviceApi>(),
            version: abi::TY_DEVICE_API_VERSION,
            dialect: abi::TY_DIALECT_CUDA,
            compiler: abi::TY_COMPILER_NVCC,
            flags: 0,
            source: text(SOURCE),
            include_folders: self.folders.as_ptr(),
            include_folder_count: self.folders.len(),
            defines: self.defines.as_ptr(),
            define_count: self.defines.len(),
            params: params.map_or(std::ptr::null(), |params| (&raw const *params.raw).cast()),
            param_bytes: size_of::<RawParams>(),
            param_alignment: align_of::<RawParams>(),
        }
    }
}
