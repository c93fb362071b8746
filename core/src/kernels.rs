//! The kernel set contract: the compute on one kind of device.
//!
//! An author of a kernel set implements [`KernelSet`]. A set in the same image gets the typed calls of the
//! communicator as they are; for a loaded one [`export_kernels!`](crate::export_kernels) derives the C table.
//!
//! Core promises that shapes, types, strides and lengths of tensors fit the shape that the set was opened
//! for, and that `topk_idx` is valid. Handles are in range, and hold a dispatch where one is needed.
//! Operation numbers count up by one, and at most `in_flight` operations are open. If a rank's input is bad,
//! core passes a refusal in its place, and the kernel set sends the refusal to the other ranks. So all ranks
//! end the operation together before rows move, and the communicator stays usable.
//!
//! A kernel set promises the semantics of `docs/semantics.md` and a deterministic order. No wait is without a
//! bound: it reads the abort word of the [`WaitBoard`](crate::wait::WaitBoard), and has a cap of its own. The
//! set touches no memory outside windows, tensors and its own state.

mod calls;
pub mod two_levels;

pub(crate) use calls::{KernelCall, kernel_calls};

use crate::abi;
use crate::call::{AgreeCall, CombineCall, DispatchCall};
use crate::moe::Shape;
use crate::transport::{MemoryNeeds, Window};
use crate::{Error, ErrorKind, Result};

/// The shape that a kernel set is opened for. See [`abi::TyShape`].
pub type KernelShape = abi::TyShape;
/// The capabilities of the transports of both levels. See [`abi::TyLimits`].
pub type Limits = abi::TyLimits;
/// The resources of one transport that a kernel set uses. See [`abi::TyLinkNeeds`].
pub type LinkNeeds = abi::TyLinkNeeds;
/// The needs of a kernel set. See [`abi::TyKernelNeeds`].
pub type KernelNeeds = abi::TyKernelNeeds;
/// The times of the steps of an operation. See [`abi::TyTrace`].
pub(crate) type Trace = abi::TyTrace;

/// Copies of arrays of one output.
#[derive(Clone, Copy, Debug)]
pub struct Copies<'a> {
    /// The arrays.
    pub copies: &'a [abi::TyCopy],
    /// `totals` of the output, whose first number is that of the rows that arrived.
    pub totals: *const i64,
    /// The stream in whose order they are made; without one they have ended when the call returns.
    pub stream: Option<*mut std::ffi::c_void>,
}

impl From<&KernelShape> for Shape {
    fn from(shape: &KernelShape) -> Self {
        let KernelShape { ranks, experts, topk, hidden, max_tokens, .. } = *shape;
        Self { ranks, experts, topk, hidden, max_tokens }
    }
}

/// The shape that a kernel set gets, of rank 0 of a world of `domains` equal domains, with so many operations in flight
/// and handles.
pub const fn kernel_shape(
    shape: &Shape,
    domains: u32,
    in_flight: u32,
    handles: u32,
) -> KernelShape {
    let Shape { ranks, experts, topk, hidden, max_tokens } = *shape;
    KernelShape {
        size: size_of::<KernelShape>(),
        rank: 0,
        ranks,
        domains,
        experts,
        topk,
        hidden,
        max_tokens,
        in_flight,
        handles,
        runs: abi::TY_RUNS_MOE,
        message_bytes: 0,
        entries: 0,
        layers: 0,
        reserved: 0,
    }
}

/// A kernel set. All calls of one instance come from one thread at a time, in the order of
/// [`abi::TyKernelsTable`].
pub trait KernelSet: Sized + Send + 'static {
    /// The name that a config writes.
    const NAME: &'static str;
    /// One line of text for display.
    const ABOUT: &'static str;
    /// The component's own table.
    type Config: serde::de::DeserializeOwned;
    /// The table of a set that works on a device: [`DeviceComponent::<Self>::TABLE`](crate::export::DeviceComponent).
    const DEVICE: Option<&'static abi::TyDeviceTable> = None;

    /// Checks whether the component can run here; returns the kinds of memory that it works on
    /// (`TY_MEMORY_*`).
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] with the fix.
    fn probe(config: &Self::Config) -> Result<u32>;

    /// Makes an instance.
    ///
    /// # Errors
    /// Errors of the device or the operating system.
    fn open(config: Self::Config, shape: &KernelShape) -> Result<Self>;

    /// The resources that the set will use, within `limits`.
    ///
    /// # Errors
    /// The limit that is too small for the shape.
    fn needs(&mut self, limits: &Limits) -> Result<KernelNeeds>;

    /// Allocates the memory of one window. It lives as long as the instance.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window>;

    /// Fixes every size, offset and buffer. After this call, operations allocate nothing.
    ///
    /// # Errors
    /// A fault of these links and windows.
    ///
    /// # Safety
    /// Links stay valid until the last operation has returned: transports are closed before the
    /// instance is dropped, so its drop may not use them. Windows and the board stay valid until the
    /// instance is dropped.
    unsafe fn plan(&mut self, plan: &abi::TyPlan) -> Result<()>;

    /// Starts a dispatch.
    ///
    /// # Errors
    /// `Refused` (some rank's input), `Full` (some rank's arena): the operation ended on all
    /// ranks. Anything else closes the communicator.
    ///
    /// # Safety
    /// Tensors stay valid and unchanged until `dispatch_recv` of the operation returns; where the call
    /// names a stream, until that has passed the work that `dispatch_recv` queued there.
    unsafe fn dispatch_send(&mut self, dispatch: &DispatchCall<'_>) -> Result<()>;

    /// Ends the dispatch with this operation number.
    ///
    /// # Errors
    /// As `dispatch_send`.
    fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived>;

    /// Called between the halves of a dispatch. The place of its output, as
    /// [`dispatch_recv`](Self::dispatch_recv) will describe it; nothing where it is not fixed. Its number of
    /// tokens may be 0. The host claims the region, and releases it whether the dispatch succeeds or not.
    ///
    /// # Errors
    /// No such dispatch.
    fn dispatch_output(&mut self, operation: u64) -> Result<Option<abi::TyReceived>> {
        let _ = operation;
        Ok(None)
    }

    /// Writes the rows of each local expert to `counts`, `[E/R]`, without a wait for rows. The operation is a
    /// dispatch or a replay for which the host waits; it was received, and is one of the last `in_flight`.
    ///
    /// # Errors
    /// `Unsupported` where the set has no such counts in host memory; the error that ends a wait for them.
    fn expert_counts(&mut self, operation: u64, counts: &mut [u32]) -> Result<()> {
        let _ = (operation, counts);
        let text = format!("{} gives the host no counts of experts", Self::NAME);
        Err(Error::new(ErrorKind::Unsupported, "read counts", text))
    }

    /// Copies arrays of an output that was received, at most [`abi::TY_MAX_COPIES`]. For a set that works on a device:
    /// in host memory the host copies.
    ///
    /// # Errors
    /// `Unsupported` for a set without the call; errors of the device.
    ///
    /// # Safety
    /// The arrays, and the memory that they are copied to, are valid until the copies have ended, or until the stream
    /// has passed them.
    unsafe fn copy_out(&mut self, copies: &Copies<'_>) -> Result<()> {
        let _ = copies;
        let text = format!("{} copies no arrays of outputs", Self::NAME);
        Err(Error::new(ErrorKind::Unsupported, "copy output", text))
    }

    /// Counts a routing that no dispatch has sent yet.
    ///
    /// # Errors
    /// `Unsupported` for a set without streams; errors of the device.
    ///
    /// # Safety
    /// Memory that `counts` names is valid until its stream has passed the call.
    unsafe fn count_routing(&mut self, counts: &abi::TyRoutingCounts) -> Result<()> {
        let _ = counts;
        let text = format!("{} counts no routing", Self::NAME);
        Err(Error::new(ErrorKind::Unsupported, "count routing", text))
    }

    /// Gives an arena region for the expert outputs of a handle: `[rows, H]` of `dtype`.
    ///
    /// # Errors
    /// `Full`, with the holders of regions.
    fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)>;

    /// Starts a combine.
    ///
    /// # Errors
    /// As `dispatch_send`.
    ///
    /// # Safety
    /// Tensors stay valid, and inputs unchanged, until `combine_recv` of the operation returns; where
    /// the call names a stream, until that has passed the work that `combine_recv` queued there.
    unsafe fn combine_send(&mut self, combine: &CombineCall<'_>) -> Result<()>;

    /// Ends the combine with this operation number; the outputs are written, in the order of the
    /// stream where the call named one.
    ///
    /// # Errors
    /// As `dispatch_send`.
    fn combine_recv(&mut self, operation: u64) -> Result<()>;

    /// Passes on the refusal that this rank knows in an exchange, and learns those of others. Only with several
    /// domains of several ranks: [`abi::TyKernelsTable`] has the order of calls.
    ///
    /// # Errors
    /// The first refusal, in order of ranks. Anything else closes the communicator.
    fn agree(&mut self, call: &AgreeCall<'_>) -> Result<()> {
        let text =
            format!("{:?} of operation {}: there is one exchange", call.exchange, call.operation);
        Err(Error::new(ErrorKind::Unsupported, "agree", text))
    }

    /// Sends a message to a rank, of an instance that was opened with [`abi::TY_RUNS_PIPE`]. Waits while `in_flight`
    /// messages to it are not taken.
    ///
    /// # Errors
    /// `Refused`, `Mismatch`: an earlier message was not taken as it was sent, and nothing is sent now. `Unsupported`:
    /// no link leads to the rank, and nothing was posted. Anything else closes the pipe.
    ///
    /// # Safety
    /// The memory is valid for the call.
    unsafe fn send(&mut self, message: &abi::TyMessage) -> Result<()> {
        let _ = message;
        Err(no_operation(Self::NAME, "pipe"))
    }

    /// Waits for the next message of a rank, and writes it to the memory.
    ///
    /// # Errors
    /// `Refused` with the reason of its sender, `Mismatch` where it has another length: it is taken then.
    /// `Unsupported`: no link leads to the rank. Anything else closes the pipe.
    ///
    /// # Safety
    /// The memory is valid for the call, and no other code uses it.
    unsafe fn recv(&mut self, message: &abi::TyMessage) -> Result<()> {
        let _ = message;
        Err(no_operation(Self::NAME, "pipe"))
    }

    /// Sends the shards of this rank to all ranks, of an instance that was opened with [`abi::TY_RUNS_GATHER`].
    ///
    /// # Errors
    /// Any error closes the gather.
    ///
    /// # Safety
    /// The parts are valid for the call.
    unsafe fn gather_send(&mut self, gather: &abi::TyGather) -> Result<()> {
        let _ = gather;
        Err(no_operation(Self::NAME, "gather"))
    }

    /// Waits for the shards of all ranks, and writes them to the parts.
    ///
    /// # Errors
    /// `Refused`, `Mismatch`: the gather ended so on all ranks. Anything else closes it.
    ///
    /// # Safety
    /// The parts are valid for the call, and no other code uses them.
    unsafe fn gather_recv(&mut self, gather: &abi::TyGather) -> Result<()> {
        let _ = gather;
        Err(no_operation(Self::NAME, "gather"))
    }

    /// Sends each rank its part of the tensors, of an instance that was opened with [`abi::TY_RUNS_REDUCE`].
    ///
    /// # Errors
    /// Any error closes the gather.
    ///
    /// # Safety
    /// The tensors are valid for the call.
    unsafe fn reduce_send(&mut self, reduce: &abi::TyReduce) -> Result<()> {
        let _ = reduce;
        Err(no_operation(Self::NAME, "reduce-scatter"))
    }

    /// Waits for the parts of all ranks, and writes their sums to the tensors.
    ///
    /// # Errors
    /// As [`gather_recv`](Self::gather_recv).
    ///
    /// # Safety
    /// The tensors are valid for the call, and no other code uses them.
    unsafe fn reduce_recv(&mut self, reduce: &abi::TyReduce) -> Result<()> {
        let _ = reduce;
        Err(no_operation(Self::NAME, "reduce-scatter"))
    }

    /// Writes the entries of this rank in a layer, of an instance that was opened with [`abi::TY_RUNS_TABLE`].
    ///
    /// # Errors
    /// Any error closes the table.
    ///
    /// # Safety
    /// The counts and the parts are valid for the call. No rank reads entries of this table.
    unsafe fn write_entries(&mut self, entries: &abi::TyEntries) -> Result<()> {
        let _ = entries;
        Err(no_operation(Self::NAME, "table"))
    }

    /// Starts to read entries of any ranks.
    ///
    /// # Errors
    /// Any error closes the table. An index without an entry is an error of [`fetch_recv`](Self::fetch_recv).
    ///
    /// # Safety
    /// The indices are valid for the call.
    unsafe fn fetch_send(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        let _ = fetch;
        Err(no_operation(Self::NAME, "table"))
    }

    /// Waits for the entries, and writes them to the parts.
    ///
    /// # Errors
    /// `Refused`: an index has no entry, and nothing is written. Anything else closes the table.
    ///
    /// # Safety
    /// The parts are valid for the call, and no other code uses them.
    unsafe fn fetch_recv(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        let _ = fetch;
        Err(no_operation(Self::NAME, "table"))
    }

    /// Waits until all commands that the set posted are done (INV-4), so that transports may be closed
    /// once all ranks have returned from it. No operation is open. A pipe also waits until its messages are taken.
    ///
    /// # Errors
    /// The error that ends the wait early.
    fn flush(&mut self) -> Result<()>;

    /// Frees an arena region. A region that is not held is ignored.
    fn release(&mut self, region: u64);

    /// Every region, released before this call or after it, becomes free only once a stream of the device,
    /// too, has passed the work that is queued on it now. A stream that captures a graph is passed within that
    /// graph alone: there it holds back the regions that operations of the graph may get again.
    ///
    /// # Errors
    /// `Unsupported` for a set without streams; errors of the device.
    ///
    /// # Safety
    /// A stream of the device that the set works on.
    unsafe fn release_after(&mut self, stream: *mut std::ffi::c_void) -> Result<()> {
        let _ = stream;
        let text = "found a stream; expected none: the kernel set has no streams";
        Err(Error::new(ErrorKind::Unsupported, "release after stream", text))
    }

    /// The ranks that operations leave out, by rank.
    ///
    /// # Errors
    /// `Unsupported` where the set masks no rank that lives; errors of the device.
    fn masks(&mut self) -> Result<Vec<bool>> {
        Err(no_masks())
    }

    /// Masks or unmasks a rank, behind all operations that were sent. No rank is inside an operation when one is
    /// unmasked.
    ///
    /// # Errors
    /// As [`masks`](Self::masks); a rank that is lost, or this one.
    fn set_mask(&mut self, rank: u32, is_masked: bool) -> Result<()> {
        let _ = (rank, is_masked);
        Err(no_masks())
    }

    /// The ring of a level (`TY_LEVEL_*`) on which its kernels post through the host, once it is
    /// planned; else nothing. See [`gpu_ring`](crate::gpu_ring).
    ///
    /// # Errors
    /// Errors of the device.
    fn gpu_ring(&mut self, level: u64) -> Result<Option<abi::TyGpuRing>> {
        let _ = level;
        Ok(None)
    }

    /// Its counters for reports, once it is planned; nothing where it has none. The memory stays valid
    /// until the instance is dropped.
    fn counters(&mut self) -> Option<abi::TyCounters> {
        None
    }

    /// The times of the steps of one of the last `in_flight` operations, which has ended; for tools.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the set records no times; another operation.
    fn trace(&mut self, operation: u64) -> Result<Trace> {
        let _ = operation;
        let text = format!("{} notes no times", Self::NAME);
        Err(Error::new(ErrorKind::Unsupported, "trace operation", text))
    }
}

fn no_operation(kernels: &str, operation: &str) -> Error {
    let text = format!("kernel set `{kernels}` has no {operation}");
    Error::new(ErrorKind::Unsupported, "run operation", text)
}

fn no_masks() -> Error {
    let text =
        "found a call about masks; expected none: the kernel set leaves out lost ranks alone";
    Error::new(ErrorKind::Unsupported, "mask ranks", text)
        .with_fix("use kernels of a GPU with decode = \"low_latency\" and on_failure = \"mask\"")
}

/// True if a window belongs to a level, one of `TY_LEVEL_*`.
pub(crate) fn is_for_level(needs: &KernelNeeds, window: u32, level: u64) -> bool {
    let levels = needs.window_levels[window as usize];
    levels == 0 || levels >> level & 1 != 0
}

/// A link that is not used.
pub const NO_LINK_NEEDS: LinkNeeds =
    LinkNeeds { queues: 0, signals: 0, queue_depth: 0, reserved: 0, largest_put: 0 };

/// Needs of nothing, to be filled.
pub const NO_KERNEL_NEEDS: KernelNeeds = KernelNeeds {
    size: size_of::<KernelNeeds>(),
    windows: 0,
    capabilities: 0,
    scale_up: NO_LINK_NEEDS,
    scale_out: NO_LINK_NEEDS,
    window_bytes: [0; abi::TY_MAX_WINDOWS],
    window_levels: [0; abi::TY_MAX_WINDOWS],
    device: -1,
    reserved: 0,
};
