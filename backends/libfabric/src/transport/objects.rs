//! Owners of libfabric's objects, and the functions that open them.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr::{NonNull, null, null_mut};

use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_fabric::consts::*;
use tokenyard_sys_fabric::types::*;
use tokenyard_sys_fabric::{Library, calls};

use super::info::Info;

/// An open object; `T` is one of the `fid_*` structures, which all start with a `fid`.
#[derive(Debug)]
pub(super) struct Object<T> {
    raw: NonNull<T>,
    /// Whether the object outlives its owner.
    stays_open: bool,
}

// SAFETY: libfabric's objects belong to no thread. The lock of the rail ensures that one thread at
// a time uses them.
unsafe impl<T> Send for Object<T> {}

impl<T> Object<T> {
    /// # Safety
    /// `raw` is an open object of type `T`, or null, and no other code closes it.
    unsafe fn new(raw: *mut T) -> Result<Self> {
        let raw = NonNull::new(raw).ok_or_else(|| {
            Error::new(ErrorKind::System, "open libfabric object", "the provider made none")
        })?;
        Ok(Self { raw, stays_open: false })
    }

    pub(super) fn raw(&self) -> *mut T {
        self.raw.as_ptr()
    }

    pub(super) fn fid(&self) -> *mut fid {
        self.raw.as_ptr().cast()
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        if self.stays_open {
            return;
        }
        // SAFETY: open, and closed once. Owners hold objects in the order in which they close.
        let status = unsafe { calls::close(self.fid()) };
        if status != 0 {
            tracing::warn!("close {}: error {}", std::any::type_name::<T>(), -status);
        }
    }
}

/// The usual cause of errors of layers over connections.
const UNIVERSE: &str = "the layer makes queues for FI_UNIVERSE_SIZE peers (256 unless set), which may be \
     more than the NIC has (ibv_devinfo -v: max_cqe): set FI_UNIVERSE_SIZE to a little more than the \
     number of ranks, in the environment of all of them";

/// The error of `fi_domain` of the provider verbs for a NIC whose interface has no IP address: the
/// NIC is listed, but the connection manager does not find it. Seen with soft-RoCE and libfabric
/// 1.17.
const NO_DATA: i32 = 61;
const NO_ADDRESS: &str = "give the network interface of this NIC an IP address, by which the connection manager finds \
     it (ip addr add ADDRESS/LENGTH dev IFACE); or name other `rails`";

/// The likely fix where a layer over connections cannot make an object.
fn layer_fix(error: i32) -> &'static str {
    if error == NO_DATA { NO_ADDRESS } else { UNIVERSE }
}

/// Makes an error of a call that failed.
pub(super) fn failed(library: &Library, operation: &'static str, error: i32) -> Error {
    let words = library.strerror(error);
    match error {
        1..FI_ERRNO_OFFSET => {
            let system = std::io::Error::from_raw_os_error(error);
            Error::new(ErrorKind::System, operation, words).with_source(system)
        }
        _ => Error::new(ErrorKind::Transport, operation, words).with_context("error", error),
    }
}

/// Numbers of errors below this one are those of the system, except 0: a provider that does not say why.
const FI_ERRNO_OFFSET: i32 = 256;

/// A rail's objects, in the order in which they are closed.
#[derive(Debug)]
pub(super) struct Objects {
    regions: Vec<Object<fid_mr>>,
    /// `None`: closed.
    ep: Option<Object<fid_ep>>,
    pub(super) cq: Object<fid_cq>,
    pub(super) av: Object<fid_av>,
    domain: Object<fid_domain>,
    fabric: Object<fid_fabric>,
    pub(super) info: Info,
}

/// The first version of libfabric that registers a dmabuf.
const DMABUF_SINCE: (u32, u32) = (1, 20);

/// Memory to register.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub(super) base: *mut u8,
    pub(super) bytes: usize,
    /// One of `FI_HMEM_*`, 0 for host memory.
    pub(super) interface: u32,
    pub(super) device: u64,
    /// The same memory as a dmabuf, and the offset of the memory in it.
    pub(super) dmabuf: Option<(RawFd, u64)>,
    /// Bits `FI_WRITE`, `FI_REMOTE_WRITE`, ...
    pub(super) access: u64,
}

// SAFETY: an address; each access states why it is allowed.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Objects {
    fn drop(&mut self) {
        self.close();
    }
}

impl Objects {
    /// Opens everything and enables the endpoint. `peers` is the number of peers, `entries` the
    /// number of completions that may wait to be read.
    pub(super) fn open(info: Info, peers: usize, entries: usize) -> Result<Self> {
        let library = info.library();
        let fail = |operation: &'static str, status: i32| {
            let error =
                failed(library, operation, -status).with_context("interface", info.domain());
            if info.is_layered() { error.with_fix(layer_fix(-status)) } else { error }
        };
        let opened = |operation: &'static str, status: i32| match status {
            0 => Ok(()),
            status => Err(fail(operation, status)),
        };
        // SAFETY: `info` is an entry of `fi_getinfo` and outlives the objects. Each call uses
        // objects that were opened before it, as its manual page asks.
        unsafe {
            let fabric = library.fabric((*info.raw()).fabric_attr);
            let fabric = Object::new(fabric.map_err(|e| fail("fi_fabric", -e))?)?;
            let mut domain = null_mut();
            opened("fi_domain", calls::domain(fabric.raw(), info.raw(), &mut domain))?;
            let domain = Object::new(domain)?;
            let av = open_av(&domain, peers, &opened)?;
            let cq = open_cq(&domain, entries, &opened)?;
            let mut ep = null_mut();
            opened("fi_endpoint", calls::endpoint(domain.raw(), info.raw(), &mut ep))?;
            let ep = Object::new(ep)?;
            opened("bind the address vector", calls::bind(ep.fid(), av.fid(), 0))?;
            // Completions are selective only for this rank's own operations: with a selective
            // receive side, the provider efa would not report the data of peers' writes.
            for side in [FI_TRANSMIT | FI_SELECTIVE_COMPLETION, FI_RECV] {
                opened("bind the completion queue", calls::bind(ep.fid(), cq.fid(), side))?;
            }
            keep_off_shared_memory(&ep);
            opened("fi_enable", enable(&ep))?;
            Ok(Self { regions: Vec::new(), ep: Some(ep), cq, av, domain, fabric, info })
        }
    }

    /// The endpoint, unless it was closed.
    #[inline]
    pub(super) fn ep(&self) -> Option<*mut fid_ep> {
        self.ep.as_ref().map(Object::raw)
    }

    /// Closes the regions and the endpoint: no peer or NIC reads or writes through them any more
    /// (INV-8).
    pub(super) fn close(&mut self) {
        self.regions.clear();
        self.leave_open();
        self.ep = None;
    }

    /// Under `ofi_rxm` the endpoint and the objects that it depends on stay open for the life of the process.
    /// To close an endpoint crashes if messages of a closed peer are still in its queue
    /// (<https://github.com/ofiwg/libfabric/issues/11828>). No peer reaches memory through it once the
    /// regions are closed.
    fn leave_open(&mut self) {
        if !self.info.is_over_connections() {
            return;
        }
        if let Some(ep) = &mut self.ep {
            ep.stays_open = true;
        }
        self.cq.stays_open = true;
        self.av.stays_open = true;
        self.domain.stays_open = true;
        self.fabric.stays_open = true;
    }

    fn open_ep(&self) -> Result<*mut fid_ep> {
        self.ep().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "use the endpoint", "it was closed after a failure")
        })
    }

    /// The address of the endpoint, in the provider's format.
    pub(super) fn address(&self) -> Result<Vec<u8>> {
        let mut address = vec![0_u8; 256];
        let mut bytes = address.len();
        let ep = self.open_ep()?;
        // SAFETY: the endpoint is enabled; the buffer has the stated length.
        let status = unsafe { calls::getname(ep, address.as_mut_ptr().cast(), &mut bytes) };
        if status != 0 {
            return Err(failed(self.info.library(), "fi_getname", -status));
        }
        address.truncate(bytes);
        Ok(address)
    }

    /// Registers memory; returns its index among the regions of the rail.
    ///
    /// # Safety
    /// The memory stays mapped until `self` is dropped.
    pub(super) unsafe fn register(&mut self, memory: &Memory) -> Result<usize> {
        const ATTEMPTS: u32 = 8;
        let library = self.info.library();
        for _ in 0..ATTEMPTS {
            let key = self.draw_key()?;
            // SAFETY: by this function's contract.
            match unsafe { self.register_as(memory, key) } {
                Ok(region) => {
                    self.regions.push(region);
                    return Ok(self.regions.len() - 1);
                }
                // The key is in use: draw another.
                Err(FI_ENOKEY) => {}
                Err(error) => {
                    return Err(failed(library, "register memory", error)
                        .with_context("bytes", memory.bytes)
                        .with_fix("raise the limit on locked memory (ulimit -l unlimited)"));
                }
            }
        }
        Err(failed(library, "register memory", FI_ENOKEY))
    }

    /// A key that peers cannot guess, where the provider accepts a chosen key.
    fn draw_key(&self) -> Result<u64> {
        if self.info.mr_mode() & FI_MR_PROV_KEY != 0 {
            return Ok(0);
        }
        let mut bytes = [0_u8; 8];
        let room = self.info.key_bytes().min(bytes.len());
        getrandom::fill(&mut bytes[..room]).map_err(|e| {
            Error::new(ErrorKind::System, "draw a key", "no random bits").with_source(e)
        })?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// # Safety
    /// As [`Objects::register`].
    unsafe fn register_as(&self, memory: &Memory, key: u64) -> Result<Object<fid_mr>, i32> {
        let vector = iovec { iov_base: memory.base.cast(), iov_len: memory.bytes };
        // Older libraries, and providers without a dmabuf, find the memory by its address.
        let dmabuf = memory.dmabuf.filter(|_| self.info.library().version() >= DMABUF_SINCE);
        let dmabuf = dmabuf.map(|(fd, offset)| fi_mr_dmabuf {
            fd,
            offset,
            len: memory.bytes,
            base_addr: memory.base.wrapping_sub(offset as usize).cast(),
        });
        let (mr_iov, flags) = match &dmabuf {
            Some(dmabuf) => (std::ptr::from_ref(dmabuf).cast(), FI_MR_DMABUF),
            None => (&raw const vector, 0),
        };
        let attr = fi_mr_attr {
            mr_iov,
            iov_count: 1,
            access: memory.access,
            offset: 0,
            requested_key: key,
            context: null_mut(),
            auth_key_size: 0,
            auth_key: null_mut(),
            iface: memory.interface,
            device: memory.device,
            later: [0; 8],
        };
        let mut region = null_mut();
        // SAFETY: the domain is open; the memory by this function's contract.
        let status = unsafe { calls::mr_regattr(self.domain.raw(), &attr, flags, &mut region) };
        if status != 0 {
            return Err(-status);
        }
        // SAFETY: just registered.
        let region = unsafe { Object::new(region) }.map_err(|_| FI_ENOKEY)?;
        if self.info.mr_mode() & FI_MR_ENDPOINT != 0 {
            let ep = self.ep().ok_or(FI_ENOKEY)?;
            // SAFETY: both objects are open, and the endpoint is enabled.
            let status = unsafe {
                match calls::bind(region.fid(), ep.cast(), 0) {
                    0 => calls::enable(region.fid()),
                    status => status,
                }
            };
            if status != 0 {
                return Err(-status);
            }
        }
        Ok(region)
    }

    /// The key by which peers reach a region.
    pub(super) fn key(&self, region: usize) -> u64 {
        // SAFETY: the region is open.
        unsafe { (*self.regions[region].raw()).key }
    }

    /// The descriptor by which local transfers use a region; null once all is closed.
    pub(super) fn descriptor(&self, region: usize) -> *mut c_void {
        // SAFETY: the region is open.
        self.regions.get(region).map_or(null_mut(), |region| unsafe { (*region.raw()).mem_desc })
    }

    /// Checks the length of an address. A provider reads as many bytes as its own addresses have:
    /// as many as this rank's address, or up to a zero byte.
    pub(super) fn check_address(&self, address: &[u8]) -> Result<()> {
        let message = if self.info.has_text_addresses() {
            let end = address.iter().position(|byte| *byte == 0);
            if end.is_some_and(|end| end + 1 == address.len()) {
                return Ok(());
            }
            "found an address without a zero byte at its end; expected text".to_owned()
        } else {
            let (found, own) = (address.len(), self.address()?.len());
            if found == own {
                return Ok(());
            }
            format!("found an address of {found} bytes; expected {own}")
        };
        Err(Error::new(ErrorKind::Protocol, "read endpoint", message))
    }

    /// An address in words.
    pub(super) fn words(&self, address: &[u8]) -> String {
        let mut text = [0_u8; 128];
        let mut bytes = text.len();
        // SAFETY: the vector is open, the address came from `fi_getname` or was inserted into it,
        // and the buffer has the stated length.
        let shown = unsafe {
            let (from, to) = (address.as_ptr().cast(), text.as_mut_ptr().cast());
            calls::av_straddr(self.av.raw(), from, to, &mut bytes)
        };
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        if shown { String::from_utf8_lossy(&text[..end]).into_owned() } else { "?".into() }
    }
}

type Opened<'a> = &'a dyn Fn(&'static str, i32) -> Result<()>;

fn open_av(
    domain: &Object<fid_domain>,
    peers: usize,
    opened: Opened<'_>,
) -> Result<Object<fid_av>> {
    let mut attr = fi_av_attr {
        type_: FI_AV_TABLE,
        rx_ctx_bits: 0,
        count: peers,
        ep_per_node: 0,
        name: null(),
        map_addr: null_mut(),
        flags: 0,
    };
    let mut av = null_mut();
    // SAFETY: the domain is open.
    opened("fi_av_open", unsafe { calls::av_open(domain.raw(), &mut attr, &mut av) })?;
    // SAFETY: just opened.
    unsafe { Object::new(av) }
}

fn open_cq(
    domain: &Object<fid_domain>,
    entries: usize,
    opened: Opened<'_>,
) -> Result<Object<fid_cq>> {
    let mut attr = fi_cq_attr {
        size: entries,
        flags: 0,
        format: FI_CQ_FORMAT_DATA,
        wait_obj: 0,
        signaling_vector: 0,
        wait_cond: 0,
        wait_set: null_mut(),
    };
    let mut cq = null_mut();
    // SAFETY: the domain is open.
    opened("fi_cq_open", unsafe { calls::cq_open(domain.raw(), &mut attr, &mut cq) })?;
    // SAFETY: just opened.
    unsafe { Object::new(cq) }
}

/// Enables an endpoint. The provider `shm` names its memory after the process number. A killed
/// process leaves its name behind, and in a container a new process often has its number. The
/// provider removes such a name and reports `FI_EBUSY`, so the second attempt succeeds.
///
/// # Safety
/// The endpoint is bound to all that it needs, and not enabled yet.
unsafe fn enable(ep: &Object<fid_ep>) -> i32 {
    const ATTEMPTS: u32 = 3;
    let mut status = 0;
    for _ in 0..ATTEMPTS {
        // SAFETY: by this function's contract; an attempt that failed changed nothing.
        status = unsafe { calls::enable(ep.fid()) };
        if status != -FI_EBUSY {
            break;
        }
    }
    status
}

/// Disables shared memory in a provider that would use it for traffic inside a machine (efa): such
/// a path has another order and other limits than the NIC. Other providers do not have the option.
fn keep_off_shared_memory(ep: &Object<fid_ep>) {
    let permitted = false;
    // SAFETY: the endpoint is open and not enabled; the option is a `bool`.
    let status = unsafe {
        let name = FI_OPT_SHARED_MEMORY_PERMITTED;
        calls::setopt(ep.raw(), name, (&raw const permitted).cast(), size_of::<bool>())
    };
    tracing::debug!(
        "shared memory within a machine was {}",
        match status {
            0 => "forbidden to the provider",
            _ => "not an option of the provider",
        }
    );
}
