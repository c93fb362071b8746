//! The kernel set: the direct algorithm over a transport's device API, or through the host. With
//! several domains it runs once between them and once inside each.
//!
//! Every rank has two windows: *control* (entry records, at equal offsets on all ranks) and *arena* (outputs;
//! a receiver chooses the place and states it when it enters). A dispatch is one persistent kernel that
//! counts, enters, moves rows and waits for the rows of others. A combine is one persistent kernel, too: it
//! enters, reads partial rows at their owners, sums them, and waits until all ranks have read. Where send and
//! receive are separate calls, a second, small kernel waits. The host learns sizes through pinned memory
//! while rows move.
//!
//! Where rows are put, kernels stage outgoing data in these windows, and post it themselves or through a
//! ring that a thread of the host reads: see `path.rs`, `puts.cuh` and `gpu_ring.rs`.
//!
//! See `args.cuh` and `moe_args.cuh` for the arguments of the kernels, and `entry.cuh` for how ranks enter.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use tokenyard_core::abi;
use tokenyard_core::call::{AgreeCall, CombineCall, DispatchCall};
use tokenyard_core::device::Device as DeviceTools;
use tokenyard_core::export::DeviceComponent;
use tokenyard_core::kernels::two_levels::ExchangePair;
use tokenyard_core::kernels::{
    Copies, KernelNeeds, KernelSet, KernelShape, Limits, NO_KERNEL_NEEDS,
};
use tokenyard_core::transport::{Capabilities, MemoryNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::compile;
use crate::config::GpuConfig;
use crate::decode;
use crate::driver::{self, Context, Device, Graph, Pooled, RawStream, Stream};
use crate::engine::counters::Counters;
use crate::engine::path::{Path, WindowMemory, unsupported};
use crate::engine::window::Memory;
use crate::moe::capabilities::capabilities;
use crate::moe::exchange::Exchange;
use crate::moe::exchanger::Exchanger;
use crate::moe::exchanges::Exchanges;
use crate::moe::foresight;
use crate::moe::limits::{BlockLimits, check};
use crate::moe::sizes::{ARENA, CONTROL, Sizes};
use crate::moe::state::PlannedExchange;
use crate::ops::{self, OtherOperation};
use crate::platform::Components;

pub(crate) use crate::engine::device_api::DeviceApi;
pub(crate) use crate::engine::gpu_ring::{Ring, gpu_ring_api};

/// The kernel set. See the [module](self).
#[derive(Debug)]
pub struct GpuKernels<C: Components> {
    config: GpuConfig,
    shape: KernelShape,
    context: Arc<Context>,
    /// Set by `needs`: one exchange, or one inside the domain and one between domains. Each has its
    /// windows.
    exchanges: Vec<(Exchange, Sizes)>,
    /// Set by `plan`. Dropped before the memory it points to.
    planned: Option<Exchanges>,
    /// Set by `plan` of an instance for an operation beside MoE. Dropped before the memory, too.
    beside: Option<OtherOperation>,
    /// Set by `plan`, too: kernels write there.
    counters: Option<Counters>,
    /// Memory of the windows that no transport owns, by window id.
    memory: BTreeMap<u32, Memory>,
    /// Tensors of tools, by address.
    tensors: HashMap<u64, Pooled>,
    /// Streams of tools.
    streams: Vec<Stream>,
    /// Graphs of tools.
    graphs: Vec<Graph>,
    _components: PhantomData<C>,
}

impl<C: Components> GpuKernels<C> {
    /// Waits for the kernels of operations that were sent, received or not. All ranks have entered
    /// those, so they end without action of another rank. Also waits for work that tools have
    /// queued.
    fn settle(&self) -> Result<()> {
        self.planned.as_ref().map_or(Ok(()), Exchanges::synchronize)?;
        self.beside.as_ref().map_or(Ok(()), OtherOperation::synchronize)?;
        self.streams.iter().try_for_each(Stream::synchronize)
    }

    fn stream(&self, pointer: *mut c_void) -> Result<&Stream> {
        self.streams.iter().find(|stream| stream.name().pointer() == pointer).ok_or_else(|| {
            let text =
                format!("found {pointer:p}; expected a stream that this kernel set has made");
            Error::new(ErrorKind::InvalidInput, "use stream", text)
        })
    }

    fn planned(&mut self) -> Result<&mut Exchanges> {
        self.planned.as_mut().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "run kernels", "an operation came before `plan`")
        })
    }

    fn beside(&mut self) -> Result<&mut OtherOperation> {
        self.beside.as_mut().ok_or_else(|| {
            let text = "the instance was planned for another operation";
            Error::new(ErrorKind::Internal, "run operation", text)
        })
    }

    /// The exchanges that the levels allow.
    fn exchanges(&self, limits: &Limits) -> Result<Vec<Exchange>> {
        let Limits { scale_up, scale_out, .. } = limits;
        let exchanges = |level, inside, between| {
            foresight::exchanges(&self.shape, self.config.decode, level, inside, between)
        };
        if self.shape.domains > 1 {
            let paths = [self.path(scale_up)?, self.path(scale_out)?];
            return exchanges(abi::TY_LEVEL_SCALE_UP, paths[0], Some(paths[1]));
        }
        let (level, limits) = if scale_up.max_queues > 0 {
            (abi::TY_LEVEL_SCALE_UP, scale_up)
        } else {
            (abi::TY_LEVEL_SCALE_OUT, scale_out)
        };
        exchanges(level, self.path(limits)?, None)
    }

    fn path(&self, limits: &Capabilities) -> Result<Path> {
        Path::of(limits, C::PLATFORM.memory, self.config.windows)
    }

    /// The address of a window for kernels. Its owner may be a transport, which then has it in this
    /// device's memory.
    fn address_of(&self, window: &Window) -> Result<u64> {
        if let Some(memory) = self.memory.get(&window.id) {
            return Ok(memory.address());
        }
        let device = self.context.device.ordinal;
        if window.kind == C::PLATFORM.memory && window.device == device {
            return Ok(window.pointer as u64);
        }
        unsupported(format!(
            "found window {} of a transport in memory of kind {:#x} on device {}; expected kind {:#x} on \
             device {device}",
            window.id,
            window.kind,
            window.device,
            C::PLATFORM.memory
        ))
    }

    /// Whether a host thread puts from a window, and into it.
    fn is_for_nic(&self, window: u32) -> bool {
        let exchange = self.exchanges.get(window as usize / WINDOWS);
        exchange.is_some_and(|(exchange, _)| exchange.path.has_ring())
    }

    /// Where a window lies.
    fn memory_of(&self, window: u32) -> WindowMemory {
        let exchange = self.exchanges.get(window as usize / WINDOWS);
        exchange.map_or(WindowMemory::Device, |(exchange, _)| exchange.path.memory)
    }
}

/// Handles that a kind of memory can have.
fn handles_of(kind: u32) -> u32 {
    match kind {
        abi::TY_MEMORY_HOST => abi::TY_HANDLE_MEMFD,
        _ => abi::TY_HANDLE_POSIX | abi::TY_HANDLE_FABRIC | abi::TY_HANDLE_DMABUF,
    }
}

/// Windows of an exchange.
const WINDOWS: usize = 2;

impl<C: Components> KernelSet for GpuKernels<C> {
    const NAME: &'static str = C::KERNELS;
    const ABOUT: &'static str = C::KERNELS_ABOUT;
    type Config = GpuConfig;
    const DEVICE: Option<&'static abi::TyDeviceTable> = Some(DeviceComponent::<Self>::TABLE);

    fn probe(config: &GpuConfig) -> Result<u32> {
        config.check(&C::PLATFORM.names)?;
        C::PLATFORM.driver.load(config.libraries.as_deref())?;
        Device::choose(C::PLATFORM, config.ordinal())?;
        compile::load_compiler(C::PLATFORM, config)?;
        Ok(C::PLATFORM.memory)
    }

    fn open(config: GpuConfig, shape: &KernelShape) -> Result<Self> {
        ops::check(C::KERNELS, shape)?;
        config.check(&C::PLATFORM.names)?;
        C::PLATFORM.driver.load(config.libraries.as_deref())?;
        let context = Context::retain(Device::choose(C::PLATFORM, config.ordinal())?)?;
        Ok(Self {
            config,
            shape: *shape,
            context,
            exchanges: Vec::new(),
            planned: None,
            beside: None,
            counters: None,
            memory: BTreeMap::new(),
            tensors: HashMap::new(),
            streams: Vec::new(),
            graphs: Vec::new(),
            _components: PhantomData,
        })
    }

    fn needs(&mut self, limits: &Limits) -> Result<KernelNeeds> {
        if self.shape.runs != abi::TY_RUNS_MOE {
            let needs = ops::needs(C::KERNELS, &self.shape, limits, C::PLATFORM.memory)?;
            return Ok(KernelNeeds { device: self.context.device.ordinal, ..needs });
        }
        let exchanges = self.exchanges(limits)?;
        let paths: Vec<_> = exchanges.iter().map(|exchange| exchange.path).collect();
        let mut needs = KernelNeeds {
            windows: (WINDOWS * exchanges.len()) as u32,
            capabilities: capabilities(&paths, exchanges.iter().any(|exchange| exchange.decodes))
                | exchanges
                    .iter()
                    .map(decode::sizes::capabilities)
                    .fold(0, |all, flags| all | flags),
            device: self.context.device.ordinal,
            ..NO_KERNEL_NEEDS
        };
        self.exchanges.clear();
        for (index, exchange) in exchanges.into_iter().enumerate() {
            let facts = self.context.device.facts()?;
            check(&exchange, BlockLimits::of(&facts))?;
            let sizes = Sizes::new(&exchange, &self.config)?;
            if let Some(decode) = &sizes.decode {
                decode.check(&exchange.shape, facts.most_shared)?;
            }
            let first = WINDOWS * index;
            needs.window_bytes[first + CONTROL] = sizes.control_bytes();
            needs.window_bytes[first + ARENA] = sizes.arena_bytes;
            needs.window_levels[first..][..WINDOWS].fill(1 << exchange.level);
            match exchange.level {
                abi::TY_LEVEL_SCALE_UP => {
                    needs.scale_up = exchange.link_needs(&sizes, &limits.scale_up);
                }
                _ => needs.scale_out = exchange.link_needs(&sizes, &limits.scale_out),
            }
            self.exchanges.push((exchange, sizes));
        }
        Ok(needs)
    }

    fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        let lies_in = self.memory_of(id);
        let (kind, name) = match lies_in {
            WindowMemory::Host => (abi::TY_MEMORY_HOST, "host memory"),
            WindowMemory::Device => (C::PLATFORM.memory, "device memory"),
        };
        if needs.kinds & kind == 0 {
            return unsupported(format!(
                "the transport wants memory kinds {:#x}; expected {name}",
                needs.kinds
            ));
        }
        let wants = |handle| needs.handles & handle != 0;
        // A host thread posts over NICs, which may need no handle, and over stand-ins, which map the windows of peers.
        let for_nic = self.is_for_nic(id) && !wants(abi::TY_HANDLE_POSIX);
        let exported = match lies_in {
            WindowMemory::Host => abi::TY_HANDLE_MEMFD,
            WindowMemory::Device if for_nic || wants(abi::TY_HANDLE_DMABUF) => {
                abi::TY_HANDLE_DMABUF
            }
            WindowMemory::Device => abi::TY_HANDLE_POSIX,
        };
        let missing = needs.handles & handles_of(kind) & !exported;
        if missing != 0 {
            return unsupported(format!(
                "the transport wants handles {missing:#x} of {name}; expected none but {exported:#x}"
            ));
        }
        let page = rustix::param::page_size() as u64;
        let pinned = lies_in == WindowMemory::Host;
        if pinned && needs.alignment > page {
            return unsupported(format!(
                "the transport wants alignment {}; expected at most a page, {page}",
                needs.alignment
            ));
        }
        let memory = Memory::new(&self.context, bytes, exported)?;
        let window = memory.window(id, self.context.device);
        self.memory.insert(id, memory);
        Ok(window)
    }

    unsafe fn plan(&mut self, plan: &abi::TyPlan) -> Result<()> {
        // SAFETY: the host's list of windows, valid for the call; they are as many as `needs` returned.
        let windows = unsafe { std::slice::from_raw_parts(plan.windows, plan.window_count) };
        if let (true, [window]) = (self.shape.runs != abi::TY_RUNS_MOE, windows) {
            let window = self.address_of(window)?;
            // SAFETY: by this function's contract.
            let beside = unsafe {
                OtherOperation::new(&self.context, &self.config, &self.shape, window, plan)?
            };
            self.beside = Some(beside);
            return Ok(());
        }
        // Dropped behind the exchangers, whatever fails.
        let counters = Counters::new(&self.context, self.shape.ranks)?;
        let mut exchangers = Vec::new();
        for (index, (exchange, sizes)) in self.exchanges.iter().enumerate() {
            let address = |id: usize| self.address_of(&windows[WINDOWS * index + id]);
            let planned = PlannedExchange {
                exchange: *exchange,
                sizes: *sizes,
                windows: [address(CONTROL)?, address(ARENA)?],
                counters: &counters,
                handles: self.shape.handles,
            };
            // SAFETY: links stay valid while there are operations, windows and the board until the
            // exchanger is dropped, by this function's contract.
            exchangers
                .push(unsafe { Exchanger::new(&self.context, &self.config, &planned, plan)? });
        }
        let mut exchangers = exchangers.into_iter();
        let Some(owners) = exchangers.next() else {
            let message = "`plan` came before `needs`";
            return Err(Error::new(ErrorKind::Internal, "plan kernels", message));
        };
        let levels = ExchangePair::new(owners, exchangers.next(), self.shape.in_flight);
        let aside = levels.rail.as_ref().map(|_| Stream::new(&self.context)).transpose()?;
        self.planned = Some(Exchanges { levels, aside });
        self.counters = Some(counters);
        Ok(())
    }

    unsafe fn dispatch_send(&mut self, dispatch: &DispatchCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.planned()?.dispatch_send(dispatch) }
    }

    fn dispatch_output(&mut self, operation: u64) -> Result<Option<abi::TyReceived>> {
        self.planned()?.dispatch_output(operation).map(Some)
    }

    fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.planned()?.dispatch_recv(operation)
    }

    fn expert_counts(&mut self, operation: u64, counts: &mut [u32]) -> Result<()> {
        self.planned()?.owners().copies().expert_counts(operation, counts)
    }

    unsafe fn copy_out(&mut self, copies: &Copies<'_>) -> Result<()> {
        if copies.stream.is_none() {
            self.settle()?;
        }
        // SAFETY: by this function's contract.
        unsafe { self.planned()?.owners().copies().copy_out(copies)? };
        if copies.stream.is_none() { self.settle() } else { Ok(()) }
    }

    unsafe fn count_routing(&mut self, counts: &abi::TyRoutingCounts) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.planned()?.owners().copies().count_routing(counts) }
    }

    fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        self.planned()?.owners().combine_input(handle, dtype)
    }

    unsafe fn combine_send(&mut self, combine: &CombineCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.planned()?.combine_send(combine) }
    }

    fn combine_recv(&mut self, operation: u64) -> Result<()> {
        self.planned()?.combine_recv(operation)
    }

    fn agree(&mut self, call: &AgreeCall<'_>) -> Result<()> {
        self.planned()?.agree(call)
    }

    unsafe fn send(&mut self, message: &abi::TyMessage) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.pipe()?.send(message) }
    }

    unsafe fn recv(&mut self, message: &abi::TyMessage) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.pipe()?.recv(message) }
    }

    unsafe fn gather_send(&mut self, gather: &abi::TyGather) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.gather()?.send(gather) }
    }

    unsafe fn gather_recv(&mut self, gather: &abi::TyGather) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.gather()?.recv(gather) }
    }

    unsafe fn write_entries(&mut self, entries: &abi::TyEntries) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.table()?.write(entries) }
    }

    unsafe fn fetch_send(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.table()?.send(fetch) }
    }

    unsafe fn fetch_recv(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.table()?.recv(fetch) }
    }

    fn flush(&mut self) -> Result<()> {
        match &mut self.beside {
            Some(beside) => beside.flush(),
            None => self.planned()?.flush(),
        }
    }

    fn gpu_ring(&mut self, level: u64) -> Result<Option<abi::TyGpuRing>> {
        Ok(self.planned.as_mut().and_then(|planned| planned.gpu_ring(level)))
    }

    fn counters(&mut self) -> Option<abi::TyCounters> {
        self.counters.as_ref().map(Counters::as_abi)
    }

    fn masks(&mut self) -> Result<Vec<bool>> {
        self.planned()?.owners().masked().read()
    }

    fn set_mask(&mut self, rank: u32, is_masked: bool) -> Result<()> {
        self.planned()?.owners().masked().set(rank, is_masked)
    }

    fn trace(&mut self, operation: u64) -> Result<abi::TyTrace> {
        self.planned()?.trace(operation)
    }

    fn release(&mut self, region: u64) {
        if let Some(planned) = &mut self.planned {
            planned.owners().engine.release(region);
        }
    }

    unsafe fn release_after(&mut self, stream: *mut c_void) -> Result<()> {
        self.planned()?.owners().engine.order.regions.free_after(RawStream::of(stream))
    }
}

impl<C: Components> DeviceTools for GpuKernels<C> {
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
        for exchanger in self.planned.iter_mut().flat_map(|planned| planned.levels.each()) {
            exchanger.forget(stream.name());
        }
    }

    unsafe fn copy_on(
        &mut self,
        stream: *mut c_void,
        to: *mut u8,
        from: *const u8,
        bytes: u64,
    ) -> Result<()> {
        RawStream::of(stream).copy(&self.context, to as u64, from as u64, bytes)
    }

    fn graph_begin(&mut self, stream: *mut c_void) -> Result<()> {
        Graph::begin(self.stream(stream)?)
    }

    fn graph_end(&mut self, stream: *mut c_void) -> Result<*mut c_void> {
        let graph = Graph::end(self.stream(stream)?)?;
        let pointer = graph.pointer();
        self.graphs.push(graph);
        Ok(pointer)
    }

    unsafe fn graph_launch(&mut self, stream: *mut c_void, graph: *mut c_void) -> Result<()> {
        let Some(graph) = self.graphs.iter().find(|g| g.pointer() == graph) else {
            let text = format!("found {graph:p}; expected a graph that this kernel set has made");
            return Err(Error::new(ErrorKind::InvalidInput, "launch graph", text));
        };
        // SAFETY: by this function's contract.
        unsafe { graph.launch(self.stream(stream)?) }
    }

    fn graph_destroy(&mut self, graph: *mut c_void) {
        if let Err(error) = self.settle() {
            tracing::warn!("a graph is destroyed after kernels that did not end well: {error}");
        }
        self.graphs.retain(|g| g.pointer() != graph);
    }
}
