//! Devices, and an open one.

use std::ffi::{CStr, c_int};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::ffi::{self, AsyncEvent, Device, DeviceAttr, GidEntry, PortAttr, RawContext};
use crate::library::{CallError, Library};

/// The list of a machine's devices.
#[derive(Debug)]
pub struct Devices {
    library: &'static Library,
    list: NonNull<*mut Device>,
    count: usize,
}

impl Devices {
    /// Gets the list.
    ///
    /// # Errors
    /// The library's error; `ENOSYS` where the kernel has no RDMA.
    pub fn list(library: &'static Library) -> Result<Self, CallError> {
        let mut count: c_int = 0;
        // SAFETY: `count` is valid for the call.
        let list = unsafe { (library.get_device_list)(&mut count) };
        let list = NonNull::new(list).ok_or_else(|| CallError::last("ibv_get_device_list"))?;
        Ok(Self { library, list, count: usize::try_from(count).unwrap_or(0) })
    }

    /// The names, in the list's order.
    pub fn names(&self) -> Vec<String> {
        self.devices().map(|device| self.name(device)).collect()
    }

    /// Opens the device named `name`; `None` if there is none.
    ///
    /// # Errors
    /// The library's error; `EACCES` without the right to `/dev/infiniband`.
    pub fn open(&self, name: &str) -> Result<Option<Arc<Context>>, CallError> {
        let Some(device) = self.devices().find(|device| self.name(*device) == name) else {
            return Ok(None);
        };
        // SAFETY: a device of the live list.
        let raw = unsafe { (self.library.open_device)(device) };
        let raw = NonNull::new(raw).ok_or_else(|| CallError::last("ibv_open_device"))?;
        Ok(Some(Arc::new(Context { library: self.library, raw, name: name.to_owned() })))
    }

    /// Opens the device named `name` by a call of its provider; `None` if there is none.
    ///
    /// # Errors
    /// The errors of `open`.
    ///
    /// # Safety
    /// `open` returns a context of the device that it gets, which belongs to no other owner. `ibv_close_device` closes
    /// it.
    pub unsafe fn open_by(
        &self,
        name: &str,
        open: impl FnOnce(*mut Device) -> Result<NonNull<RawContext>, CallError>,
    ) -> Result<Option<Arc<Context>>, CallError> {
        let Some(raw) = self.with(name, open).transpose()? else { return Ok(None) };
        Ok(Some(Arc::new(Context { library: self.library, raw, name: name.to_owned() })))
    }

    /// Passes the device named `name` to `then`; `None` if there is none. The pointer is valid during the call.
    pub fn with<T>(&self, name: &str, then: impl FnOnce(*mut Device) -> T) -> Option<T> {
        self.devices().find(|device| self.name(*device) == name).map(then)
    }

    fn devices(&self) -> impl Iterator<Item = *mut Device> + '_ {
        // SAFETY: the library's list has `count` devices.
        (0..self.count).map(|at| unsafe { *self.list.as_ptr().add(at) })
    }

    fn name(&self, device: *mut Device) -> String {
        // SAFETY: a device of the live list; its name is terminated text inside it.
        let name = unsafe { CStr::from_ptr((self.library.get_device_name)(device)) };
        name.to_string_lossy().into_owned()
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        // SAFETY: the list comes from the library, and is freed once. Open devices stay.
        unsafe { (self.library.free_device_list)(self.list.as_ptr()) }
    }
}

/// An open device.
#[derive(Debug)]
pub struct Context {
    library: &'static Library,
    raw: NonNull<RawContext>,
    name: String,
}

// SAFETY: libibverbs locks the data that calls on one context share.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// An asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Async {
    /// One of `EVENT_*`, or another one.
    pub event: c_int,
    /// Number of the broken queue pair, if the event is about one.
    pub queue_pair: Option<u32>,
}

impl Async {
    /// Whether the fault is permanent, unlike a port that may come up again.
    pub fn is_fatal(self) -> bool {
        matches!(
            self.event,
            ffi::EVENT_CQ_ERR
                | ffi::EVENT_QP_FATAL
                | ffi::EVENT_QP_REQ_ERR
                | ffi::EVENT_QP_ACCESS_ERR
                | ffi::EVENT_DEVICE_FATAL
                | ffi::EVENT_SRQ_ERR
        )
    }
}

impl Context {
    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The library that opened it.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    /// The context of libibverbs, which lives as long as this.
    pub fn raw(&self) -> *mut RawContext {
        self.raw.as_ptr()
    }

    /// The capabilities of the device.
    ///
    /// # Errors
    /// The library's error.
    pub fn attributes(&self) -> Result<DeviceAttr, CallError> {
        let mut attr = std::mem::MaybeUninit::<DeviceAttr>::zeroed();
        // SAFETY: an open device, and room for the answer.
        let status = unsafe { (self.library.query_device)(self.raw(), attr.as_mut_ptr()) };
        CallError::check("ibv_query_device", status)?;
        // SAFETY: zeroes are valid for every field, and the library overwrote them.
        Ok(unsafe { attr.assume_init() })
    }

    /// The attributes of port `port` (from 1).
    ///
    /// The exported symbol is the old form of the call: it fills every field except the last,
    /// `port_cap_flags2`, which stays zero. It avoids the call through the provider's extended
    /// table.
    ///
    /// # Errors
    /// The library's error.
    pub fn port(&self, port: u8) -> Result<PortAttr, CallError> {
        let mut attr = std::mem::MaybeUninit::<PortAttr>::zeroed();
        // SAFETY: an open device, and a buffer that is larger than the old structure.
        let status = unsafe { (self.library.query_port)(self.raw(), port, attr.as_mut_ptr()) };
        CallError::check("ibv_query_port", status)?;
        // SAFETY: as in `attributes`.
        Ok(unsafe { attr.assume_init() })
    }

    /// The used entries of the GID tables of all ports.
    ///
    /// # Errors
    /// The library's error.
    pub fn gids(&self) -> Result<Vec<GidEntry>, CallError> {
        let mut entries = vec![GidEntry::default(); ffi::MAX_GIDS];
        // SAFETY: an open device, and room for the stated number of entries of this size.
        let found = unsafe {
            (self.library.query_gid_table)(
                self.raw(),
                entries.as_mut_ptr(),
                entries.len(),
                0,
                size_of::<GidEntry>(),
            )
        };
        let Ok(found) = usize::try_from(found) else {
            let errno = i32::try_from(-found).unwrap_or(libc::EIO);
            return Err(CallError {
                call: "ibv_query_gid_table",
                source: std::io::Error::from_raw_os_error(errno),
            });
        };
        entries.truncate(found);
        Ok(entries)
    }

    /// Lets [`Context::next_event`] return at once when there is no event.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn make_events_nonblocking(&self) -> Result<(), CallError> {
        // SAFETY: an open device; its descriptor stays open with it.
        let set = unsafe {
            let fd = self.raw.as_ref().async_fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
        };
        if set < 0 { Err(CallError::last("fcntl")) } else { Ok(()) }
    }

    /// Takes the next asynchronous event, if there is one.
    pub fn next_event(&self) -> Option<Async> {
        let mut event = AsyncEvent { element: std::ptr::null_mut(), event_type: -1 };
        // SAFETY: an open device, and room for the event; every event that is taken is
        // acknowledged, otherwise destroying the object that it names would wait for ever. Until
        // then that object exists.
        unsafe {
            if (self.library.get_async_event)(self.raw(), &mut event) != 0 {
                return None;
            }
            let queue_pair = queue_pair(&event);
            (self.library.ack_async_event)(&mut event);
            Some(Async { event: event.event_type, queue_pair })
        }
    }
}

/// # Safety
/// The event was taken, and is not acknowledged.
unsafe fn queue_pair(event: &AsyncEvent) -> Option<u32> {
    let is_its = matches!(
        event.event_type,
        ffi::EVENT_QP_FATAL | ffi::EVENT_QP_REQ_ERR | ffi::EVENT_QP_ACCESS_ERR
    );
    if !is_its || event.element.is_null() {
        return None;
    }
    // SAFETY: the element of these events is a queue pair, which exists by this function's
    // contract.
    Some(unsafe { (*event.element.cast::<ffi::RawQp>()).qp_num })
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: every object of this device holds it by an `Arc`, so none is left. A device that
        // refuses stays open: there is no caller to report it to.
        unsafe { (self.library.close_device)(self.raw()) };
    }
}
