//! The objects that commands make, each with an owner that ends it.

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use tokenyard_sys_verbs::{AddressHandle, Context, Devices, Pd};

use crate::CallError;
use crate::ffi::{
    self, ContextAttr, Device, DevxObj, DevxUar, DevxUmem, DevxUmemIn, Obj, Pair, RawContext,
};
use crate::library::Library;
use crate::mailbox::{Done, Mailbox, STATUS, SYNDROME};

/// An open device that takes commands. Objects that are made of it hold it.
#[derive(Debug)]
pub struct Devx {
    library: &'static Library,
    context: Arc<Context>,
}

impl Library {
    /// Whether the device named `name` is one of libmlx5's; `None` if there is none of this name.
    pub fn is_supported(&self, devices: &Devices, name: &str) -> Option<bool> {
        // SAFETY: a device of a live list.
        devices.with(name, |device| unsafe { (self.is_supported)(device) })
    }

    /// # Safety
    /// A device of a live list of libibverbs.
    unsafe fn open(&self, device: *mut Device) -> Result<NonNull<RawContext>, CallError> {
        let mut attr = ContextAttr { flags: ffi::CONTEXT_FLAGS_DEVX, comp_mask: 0 };
        // SAFETY: by this function's contract; `attr` is valid for the call.
        let raw = unsafe { (self.open_device)(device, &mut attr) };
        NonNull::new(raw).ok_or_else(|| last("mlx5dv_open_device"))
    }
}

impl Devx {
    /// Opens the device named `name` with the right to send commands; `None` if there is none of this name. It is
    /// one of libmlx5's ([`Library::is_supported`]).
    ///
    /// # Errors
    /// The library's error; `EACCES` without the right to `/dev/infiniband`, `EOPNOTSUPP` or `EINVAL` where kernel
    /// or firmware have no DEVX.
    pub fn open(
        library: &'static Library,
        devices: &Devices,
        name: &str,
    ) -> Result<Option<Arc<Self>>, CallError> {
        // SAFETY: a device of a live list; the context is new, and libibverbs closes it.
        let context = unsafe { devices.open_by(name, |device| library.open(device)) }?;
        Ok(context.map(|context| Arc::new(Self { library, context })))
    }

    /// The device, for the calls of libibverbs.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn raw(&self) -> *mut RawContext {
        self.context.raw()
    }

    /// The number by which commands name a protection domain of this device.
    ///
    /// # Errors
    /// The library's error.
    pub fn pd_number(&self, pd: &Pd) -> Result<u32, CallError> {
        let mut facts = ffi::Pd::default();
        let mut obj = Obj { pd: Pair { input: pd.raw(), output: &mut facts }, ..Obj::NONE };
        // SAFETY: a live domain; `obj` and the memory that it points to are valid for the call.
        let status = unsafe { (self.library.init_obj)(&mut obj, ffi::OBJ_PD) };
        check("mlx5dv_init_obj", status)?;
        Ok(facts.pdn)
    }

    /// The MAC address of the next hop of a RoCE route.
    ///
    /// # Errors
    /// The library's error.
    pub fn next_hop(&self, address: &AddressHandle) -> Result<[u8; 6], CallError> {
        let mut facts = ffi::Ah { av: std::ptr::null(), comp_mask: 0 };
        let mut obj = Obj { ah: Pair { input: address.raw(), output: &mut facts }, ..Obj::NONE };
        // SAFETY: a live address; `obj` and the memory that it points to are valid for the call.
        let status = unsafe { (self.library.init_obj)(&mut obj, ffi::OBJ_AH) };
        check("mlx5dv_init_obj", status)?;
        // SAFETY: the library fills in a pointer into the address, which lives; null is no address.
        let av = unsafe { facts.av.as_ref() };
        av.map(|av| av.rmac).ok_or_else(|| CallError {
            call: "mlx5dv_init_obj",
            source: io::Error::from_raw_os_error(libc::EOPNOTSUPP),
        })
    }

    /// Sends a command that makes nothing, and reads its answer.
    ///
    /// # Errors
    /// The library, or the device by the answer's status.
    pub fn command<I: Mailbox, O: Mailbox>(&self, command: &I) -> Result<O, CallError> {
        let (input, mut output) = (command.to_bytes(), vec![0; O::BYTES]);
        // SAFETY: an open device; both buffers are valid for the call and have the given lengths.
        let status = unsafe {
            let to = output.as_mut_ptr().cast();
            let from = input.as_ptr().cast();
            (self.library.general_cmd)(self.raw(), from, input.len(), to, output.len())
        };
        answer(I::NAME, status, &output)
    }

    /// The number of the event queue of completion vector `vector`.
    ///
    /// # Errors
    /// The library's error.
    pub fn event_queue(&self, vector: u32) -> Result<u32, CallError> {
        let mut eqn = 0;
        // SAFETY: an open device, and room for the answer.
        let status = unsafe { (self.library.query_eqn)(self.raw(), vector, &mut eqn) };
        check("mlx5dv_devx_query_eqn", status)?;
        Ok(eqn)
    }
}

/// How a page of doorbell registers is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UarKind {
    /// Not cached, and used by this caller alone: a GPU needs this kind. rdma-core 44 does not know it.
    Dedicated,
    /// Not cached; one per device that is opened.
    Uncached,
    /// Write-combining: for the processor.
    BlueFlame,
}

/// A page of doorbell registers.
#[derive(Debug)]
pub struct Uar {
    raw: NonNull<DevxUar>,
    devx: Arc<Devx>,
}

// SAFETY: only `drop` changes it.
unsafe impl Send for Uar {}
// SAFETY: as above.
unsafe impl Sync for Uar {}

impl Uar {
    /// Maps a page.
    ///
    /// # Errors
    /// The library's error; `EOPNOTSUPP` where it does not know the kind.
    pub fn new(devx: &Arc<Devx>, kind: UarKind) -> Result<Self, CallError> {
        let flags = match kind {
            UarKind::Dedicated => ffi::UAR_ALLOC_TYPE_NC_DEDICATED,
            UarKind::Uncached => ffi::UAR_ALLOC_TYPE_NC,
            UarKind::BlueFlame => ffi::UAR_ALLOC_TYPE_BF,
        };
        // SAFETY: an open device.
        let raw = unsafe { (devx.library.alloc_uar)(devx.raw(), flags) };
        let raw = NonNull::new(raw).ok_or_else(|| last("mlx5dv_devx_alloc_uar"))?;
        Ok(Self { raw, devx: Arc::clone(devx) })
    }

    /// The number by which commands name it.
    pub fn page(&self) -> u32 {
        // SAFETY: the page lives.
        unsafe { self.raw.as_ref().page_id }
    }

    /// The first register. A store of 8 bytes to it rings.
    pub fn register(&self) -> *mut u64 {
        // SAFETY: the page lives.
        unsafe { self.raw.as_ref().reg_addr.cast() }
    }

    /// The page itself.
    pub fn base(&self) -> *mut u8 {
        // SAFETY: the page lives.
        unsafe { self.raw.as_ref().base_addr.cast() }
    }
}

impl Drop for Uar {
    fn drop(&mut self) {
        // SAFETY: made by the library, freed once.
        unsafe { (self.devx.library.free_uar)(self.raw.as_ptr()) };
    }
}

/// Memory for a queue.
#[derive(Clone, Copy, Debug)]
pub struct UmemRequest {
    /// The address of its first byte; with a dmabuf: the offset in the dmabuf.
    pub address: u64,
    /// Length.
    pub bytes: usize,
    /// A dmabuf, where the memory belongs to another device.
    pub dmabuf: Option<RawFd>,
}

/// Memory that commands can name.
#[derive(Debug)]
pub struct Umem {
    raw: NonNull<DevxUmem>,
    devx: Arc<Devx>,
}

// SAFETY: only `drop` changes it.
unsafe impl Send for Umem {}
// SAFETY: as above.
unsafe impl Sync for Umem {}

impl Umem {
    /// Gives the device the right to read and write the memory.
    ///
    /// # Errors
    /// The library's error; `ENOMEM` where the limit on locked memory is too low.
    ///
    /// # Safety
    /// The memory stays where it is while this lives, and all code that uses it allows the device to write
    /// it.
    pub unsafe fn new(devx: &Arc<Devx>, request: &UmemRequest) -> Result<Self, CallError> {
        let access = tokenyard_sys_verbs::ffi::ACCESS_LOCAL_WRITE as u32;
        let mut input = DevxUmemIn {
            addr: std::ptr::without_provenance_mut(request.address as usize),
            size: request.bytes,
            access,
            // Any size of a page.
            pgsz_bitmap: !(PAGE - 1),
            comp_mask: if request.dmabuf.is_some() { ffi::UMEM_MASK_DMABUF } else { 0 },
            dmabuf_fd: request.dmabuf.unwrap_or(-1),
        };
        // SAFETY: an open device; `input` is valid for the call; the memory by this function's contract.
        let raw = unsafe { (devx.library.umem_reg_ex)(devx.raw(), &mut input) };
        let raw = NonNull::new(raw).ok_or_else(|| last("mlx5dv_devx_umem_reg_ex"))?;
        Ok(Self { raw, devx: Arc::clone(devx) })
    }

    /// The number by which commands name it.
    pub fn id(&self) -> u32 {
        // SAFETY: the umem lives.
        unsafe { self.raw.as_ref().umem_id }
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        // SAFETY: made by the library, freed once. Objects that use it hold it.
        unsafe { (self.devx.library.umem_dereg)(self.raw.as_ptr()) };
    }
}

/// The smallest page of a umem.
const PAGE: u64 = 4096;

/// A queue, or a queue pair, that a command made. All that the command named must outlive it.
#[derive(Debug)]
pub struct Object {
    raw: NonNull<DevxObj>,
    devx: Arc<Devx>,
}

// SAFETY: libmlx5 stores nothing but a handle; the kernel locks.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Object {
    /// Sends a command that makes something, and reads its answer.
    ///
    /// # Errors
    /// The library, or the device by the answer's status.
    ///
    /// # Safety
    /// All that the command names (umems, a page of registers, queues) lives until the object is dropped.
    pub unsafe fn new<I: Mailbox, O: Mailbox>(
        devx: &Arc<Devx>,
        command: &I,
    ) -> Result<(Self, O), CallError> {
        let (input, mut output) = (command.to_bytes(), vec![0; O::BYTES]);
        // SAFETY: an open device; both buffers are valid for the call and have the given lengths.
        let raw = unsafe {
            let to = output.as_mut_ptr().cast();
            let from = input.as_ptr().cast();
            (devx.library.obj_create)(devx.raw(), from, input.len(), to, output.len())
        };
        let Some(raw) = NonNull::new(raw) else { return Err(refused(I::NAME, &output)) };
        Ok((Self { raw, devx: Arc::clone(devx) }, O::from_answer(&output)))
    }

    /// Sends a command that changes the object.
    ///
    /// # Errors
    /// The library, or the device by the answer's status.
    pub fn modify<I: Mailbox>(&self, command: &I) -> Result<(), CallError> {
        let (input, mut output) = (command.to_bytes(), vec![0; Done::BYTES]);
        // SAFETY: the object lives; both buffers are valid for the call and have the given lengths.
        let status = unsafe {
            let to = output.as_mut_ptr().cast();
            let from = input.as_ptr().cast();
            (self.devx.library.obj_modify)(self.raw.as_ptr(), from, input.len(), to, output.len())
        };
        answer::<Done>(I::NAME, status, &output).map(drop)
    }

    /// Sends a command that queries the object.
    ///
    /// # Errors
    /// The library, or the device by the answer's status.
    pub fn query<I: Mailbox, O: Mailbox>(&self, command: &I) -> Result<O, CallError> {
        let (input, mut output) = (command.to_bytes(), vec![0; O::BYTES]);
        // SAFETY: the object lives; both buffers are valid for the call and have the given lengths.
        let status = unsafe {
            let to = output.as_mut_ptr().cast();
            let from = input.as_ptr().cast();
            (self.devx.library.obj_query)(self.raw.as_ptr(), from, input.len(), to, output.len())
        };
        answer(I::NAME, status, &output)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: made by the library, freed once.
        unsafe { (self.devx.library.obj_destroy)(self.raw.as_ptr()) };
    }
}

fn last(call: &'static str) -> CallError {
    CallError { call, source: io::Error::last_os_error() }
}

/// Checks the status of calls that return an errno; some return -1 and set errno.
fn check(call: &'static str, status: i32) -> Result<(), CallError> {
    match status {
        0 => Ok(()),
        -1 => Err(last(call)),
        errno => Err(CallError { call, source: io::Error::from_raw_os_error(errno.abs()) }),
    }
}

fn answer<O: Mailbox>(call: &'static str, status: i32, output: &[u8]) -> Result<O, CallError> {
    if STATUS.get(output) != 0 {
        return Err(refused(call, output));
    }
    check(call, status)?;
    Ok(O::from_answer(output))
}

/// A failure with the device's status, if there is one, and else with errno.
fn refused(call: &'static str, output: &[u8]) -> CallError {
    let (status, syndrome) = (STATUS.get(output), SYNDROME.get(output));
    if status == 0 {
        return last(call);
    }
    let source = io::Error::last_os_error();
    let text = format!("the device says status {status:#x}, syndrome {syndrome:#x} ({source})");
    CallError { call, source: io::Error::new(source.kind(), text) }
}
