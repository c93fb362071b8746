//! The `cuda` kernel set: the direct algorithm over a transport's device face.
//!
//! Every rank keeps two windows: *control* (entry records, at equal offsets on all ranks) and *arena*
//! (outputs; a receiver chooses the place and says so when it enters). A dispatch is one persistent
//! kernel that counts, enters and moves rows, and a small one that waits for the rows of others; a
//! combine is one that enters, reads its partial rows at their owners and sums them, and a small one
//! that waits until all have read. The host learns sizes through pinned memory while rows move.
//!
//! See `args.cuh` for what the kernels are passed, `entry.cuh` for how ranks enter.

pub(crate) mod args;
mod combine;
mod dispatch;
mod engine;
mod face;
mod handle;
mod observer;
mod order;
mod outcome;
mod sizes;
mod waits;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use tokenyard_core::abi;
use tokenyard_core::kernels::{
    KernelNeeds, KernelSet, KernelShape, Limits, LinkNeeds, NO_LINK_NEEDS,
};
use tokenyard_core::transport::{Capabilities, MemoryNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::compile;
use crate::config::CudaConfig;
use crate::driver::{self, Context, Device, Pooled, Stream, Vmm};
use engine::Engine;
use sizes::{ARENA, CONTROL, Sizes, check_shared, moe_shape};

pub(crate) use sizes::MOST_ARENA;

/// Ranks that all hear each other's counts; more need counting in two half rounds.
const MOST_RANKS: u32 = 72;

/// One warp counts up to 2^20 of them (`kPlaceBits`), and there are 16 warps even on one processor.
const MOST_TOKENS: u32 = 1 << 24;

/// The kernel set. See the [module](self).
#[derive(Debug)]
pub struct CudaKernels {
    config: CudaConfig,
    shape: KernelShape,
    context: Arc<Context>,
    /// Set by `needs`.
    sizes: Option<Sizes>,
    /// Set by `plan`. Dropped before the memory it points to.
    engine: Option<Engine>,
    memory: Vec<Vmm>,
    /// Tensors of tools, by address.
    tensors: HashMap<u64, Pooled>,
    /// Streams of tools.
    streams: Vec<Stream>,
}

impl CudaKernels {
    /// Waits for the kernels of operations that were sent, received or not. All ranks have entered
    /// those, so they end without anybody else. And for what tools have queued.
    fn settle(&self) -> Result<()> {
        self.engine.as_ref().map_or(Ok(()), |engine| engine.stream.synchronize())?;
        self.streams.iter().try_for_each(Stream::synchronize)
    }

    fn stream(&self, pointer: *mut c_void) -> Result<&Stream> {
        self.streams.iter().find(|stream| stream.name().pointer() == pointer).ok_or_else(|| {
            let text =
                format!("found {pointer:p}; expected a stream that this kernel set has made");
            Error::new(ErrorKind::InvalidInput, "use stream", text)
        })
    }

    fn engine(&mut self) -> Result<&mut Engine> {
        self.engine.as_mut().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "run kernels", "an operation came before `plan`")
        })
    }
}

fn unsupported<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, "plan needs", message))
}

fn check_face(limits: &Capabilities) -> Result<()> {
    let wanted = abi::TY_CAP_DEVICE_FACE | abi::TY_CAP_LOAD_STORE;
    if limits.flags & wanted == wanted {
        return Ok(());
    }
    unsupported("the transport has no device face with loads and stores".to_owned())
        .map_err(|e| e.with_fix("use nvlink, or kernels = \"cpu\""))
}

impl KernelSet for CudaKernels {
    const NAME: &'static str = "cuda";
    const ABOUT: &'static str = "NVIDIA GPUs: device memory, all layouts and types, one domain";
    type Config = CudaConfig;

    fn probe(config: &CudaConfig) -> Result<u32> {
        config.check()?;
        Device::choose(config.device)?;
        compile::load()?;
        Ok(abi::TY_MEMORY_CUDA)
    }

    fn open(config: CudaConfig, shape: &KernelShape) -> Result<Self> {
        config.check()?;
        let context = Context::retain(Device::choose(config.device)?)?;
        Ok(Self {
            config,
            shape: *shape,
            context,
            sizes: None,
            engine: None,
            memory: Vec::new(),
            tensors: HashMap::new(),
            streams: Vec::new(),
        })
    }

    fn needs(&mut self, limits: &Limits) -> Result<KernelNeeds> {
        let KernelShape { ranks, domains, in_flight, .. } = self.shape;
        if domains > 1 || ranks > MOST_RANKS {
            return unsupported(format!(
                "found {ranks} ranks in {domains} domains; expected one domain of at most \
                 {MOST_RANKS}"
            ));
        }
        if self.shape.max_tokens > MOST_TOKENS {
            return unsupported(format!(
                "found max_tokens = {}; expected at most {MOST_TOKENS}",
                self.shape.max_tokens
            ));
        }
        let scale_up = limits.scale_up.max_lanes > 0;
        check_face(if scale_up { &limits.scale_up } else { &limits.scale_out })?;
        let shape = moe_shape(&self.shape);
        check_shared(&shape, self.context.device.most_shared()?)?;
        let sizes = Sizes::new(&shape, in_flight, &self.config)?;
        self.sizes = Some(sizes);
        let mut window_bytes = [0; abi::TY_MAX_WINDOWS];
        window_bytes[CONTROL] = sizes.control_bytes();
        window_bytes[ARENA] = sizes.arena_bytes;
        // Of each slot: the rows' arrival and the end of reading, each raised by one rank.
        let signals = 2 * ranks * sizes.slots;
        let link = LinkNeeds { lanes: 1, signals, queue_depth: 1, ..NO_LINK_NEEDS };
        let (up, out) = if scale_up { (link, NO_LINK_NEEDS) } else { (NO_LINK_NEEDS, link) };
        Ok(KernelNeeds {
            size: size_of::<KernelNeeds>(),
            windows: 2,
            flags: abi::TY_NEEDS_STREAMS,
            scale_up: up,
            scale_out: out,
            window_bytes,
        })
    }

    fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        if needs.kinds & abi::TY_MEMORY_CUDA == 0 {
            return unsupported(format!(
                "the transport wants memory kinds {:#x}; expected CUDA memory",
                needs.kinds
            ));
        }
        let memory = Vmm::new(&self.context, bytes)?;
        let window = Window {
            size: size_of::<Window>(),
            id,
            kind: abi::TY_MEMORY_CUDA,
            pointer: memory.address() as *mut u8,
            bytes: memory.bytes(),
            fd: std::os::fd::AsRawFd::as_raw_fd(memory.fd()),
            device: self.context.device.ordinal,
            fd_offset: 0,
        };
        self.memory.push(memory);
        Ok(window)
    }

    unsafe fn plan(&mut self, plan: &abi::TyPlan) -> Result<()> {
        let sizes = self.sizes.ok_or_else(|| {
            Error::new(ErrorKind::Internal, "plan kernels", "`plan` came before `needs`")
        })?;
        // SAFETY: links stay valid while there are operations, windows and the board until the
        // engine is dropped, by this function's contract.
        let engine =
            unsafe { Engine::new(&self.context, (&self.shape, sizes), plan, &self.config)? };
        self.engine = Some(engine);
        Ok(())
    }

    unsafe fn dispatch_send(&mut self, dispatch: &abi::TyDispatch) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.engine()?.dispatch_send(dispatch) }
    }

    fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.engine()?.dispatch_recv(operation)
    }

    fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        self.engine()?.combine_input(handle, dtype)
    }

    unsafe fn combine_send(&mut self, combine: &abi::TyCombine) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.engine()?.combine_send(combine) }
    }

    fn combine_recv(&mut self, operation: u64) -> Result<()> {
        self.engine()?.combine_recv(operation)
    }

    fn flush(&mut self) -> Result<()> {
        self.engine()?.flush()
    }

    fn release(&mut self, region: u64) {
        if let Some(engine) = &mut self.engine {
            engine.release(region);
        }
    }

    fn tensor_alloc(&mut self, bytes: u64) -> Result<*mut u8> {
        let tensor = Pooled::new(&self.context, bytes)?;
        let address = tensor.address();
        self.tensors.insert(address, tensor);
        Ok(address as *mut u8)
    }

    fn tensor_free(&mut self, pointer: *mut u8) {
        if let Err(error) = self.settle() {
            tracing::warn!("a tensor is freed after kernels that did not end well: {error}");
        }
        self.tensors.remove(&(pointer as u64));
    }

    unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: u64) -> Result<()> {
        self.settle()?;
        driver::copy(&self.context, to as u64, from as u64, bytes)
    }

    fn stream_create(&mut self) -> Result<*mut c_void> {
        let stream = Stream::new(&self.context)?;
        let pointer = stream.name().pointer();
        self.streams.push(stream);
        Ok(pointer)
    }

    fn stream_destroy(&mut self, stream: *mut c_void) {
        let Some(index) = self.streams.iter().position(|s| s.name().pointer() == stream) else {
            return;
        };
        let stream = self.streams.swap_remove(index);
        if let Err(error) = stream.synchronize() {
            tracing::warn!("a tool's stream did not end well: {error}");
        }
        if let Some(engine) = &mut self.engine {
            engine.forget(stream.name());
        }
    }

    unsafe fn copy_on(
        &mut self,
        stream: *mut c_void,
        to: *mut u8,
        from: *const u8,
        bytes: u64,
    ) -> Result<()> {
        self.stream(stream)?.copy(to as u64, from as u64, bytes)
    }
}
