//! A transport from the view of its user: the hot calls of an open instance, without its ownership.

use std::ffi::c_void;

use crate::abi;
use crate::host::{Slot, cold, inside};
use crate::transport::{Capabilities, Command, Event};
use crate::{Error, ErrorKind, Result};

type PostFn = unsafe extern "C" fn(*mut c_void, u32, *const Command, usize, *mut usize) -> i32;
type PollFn = unsafe extern "C" fn(*mut c_void, u32, *mut Event, usize, *mut usize) -> i32;
type ReadSignalFn = unsafe extern "C" fn(*mut c_void, u32, u32) -> u64;

/// The hot calls of an open transport. Copies are views of the same instance; no copy may outlive the
/// instance (the promise behind [`Link::from_abi`]).
///
/// Threads: `post`, `poll` and `read_signal` of one queue from one thread at a time; the other calls
/// from any thread.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    table: &'static abi::TyTransportTable,
    instance: *mut c_void,
    capabilities: Capabilities,
    post: PostFn,
    poll: PollFn,
    read_signal: ReadSignalFn,
}

// SAFETY: the ABI allows the hot calls of different queues, and `health`, from several threads; calls
// that could break the queue rule are unsafe.
unsafe impl Send for Link {}
// SAFETY: as above.
unsafe impl Sync for Link {}

impl Link {
    /// Views an instance.
    ///
    /// # Errors
    /// A required slot that is null: the table was not judged.
    ///
    /// # Safety
    /// The table is constant and never freed; the instance is open and outlives every copy of the link.
    pub unsafe fn from_abi(link: &abi::TyLink) -> Result<Self> {
        // SAFETY: by this function's contract.
        let table: &'static abi::TyTransportTable = unsafe { &*link.table };
        let (Some(post), Some(poll), Some(read_signal)) =
            (table.post, table.poll, table.read_signal)
        else {
            return Err(Error::new(ErrorKind::Plugin, "use transport", "a required slot is null"));
        };
        Ok(Self {
            table,
            instance: link.instance,
            capabilities: link.capabilities,
            post,
            poll,
            read_signal,
        })
    }

    /// The declared capabilities.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// True if peers' windows can be loaded from and stored to.
    pub fn is_load_store(&self) -> bool {
        self.capabilities.flags & abi::TY_CAP_LOAD_STORE != 0
    }

    /// This link, without capabilities that may not be used.
    pub(crate) fn without(mut self, capabilities: u64) -> Self {
        self.capabilities.flags &= !capabilities;
        self
    }

    /// The link in the form of the ABI.
    pub fn as_abi(&self) -> abi::TyLink {
        abi::TyLink { table: self.table, instance: self.instance, capabilities: self.capabilities }
    }

    /// The address at which `window` of `peer` is mapped here; valid while the instance lives.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn peer_address(&self, window: u32, peer: u32) -> Result<*mut u8> {
        let Some(slot) = self.table.peer_address else {
            return Err(crate::host::missing_slot(self.name(), "peer_address"));
        };
        let mut address = std::ptr::null_mut();
        let mut error = crate::host::blank_error();
        let status = cold(self.name(), Slot::PeerAddress, || {
            // SAFETY: an open instance; the structures are valid for the call.
            unsafe { slot(self.instance, window, peer, &mut address, &mut error) }
        });
        crate::host::check("peer_address", status, &error)
            .map_err(|e| e.with_context("component", self.name()))?;
        if address.is_null() {
            return Err(Error::new(ErrorKind::Plugin, "peer_address", "the component gave null")
                .with_context("component", self.name()));
        }
        Ok(address)
    }

    /// The source that kernels compile in to use this transport; valid while the instance lives.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if it has no such device API; errors of the component.
    pub fn device_api(&self) -> Result<abi::TyDeviceApi> {
        let Some(slot) = self.table.device_api else {
            return Err(crate::host::missing_slot(self.name(), "device_api"));
        };
        let mut device_api = NO_DEVICE_API;
        let mut error = crate::host::blank_error();
        let status = cold(self.name(), Slot::DeviceApi, || {
            // SAFETY: an open instance; the structures are valid for the call.
            unsafe { slot(self.instance, &mut device_api, &mut error) }
        });
        crate::host::check("device_api", status, &error)
            .map_err(|e| e.with_context("component", self.name()))?;
        let expected = size_of::<abi::TyDeviceApi>();
        if device_api.size < expected {
            let message =
                format!("found a device API of {} bytes; expected {expected}", device_api.size);
            return Err(Error::new(ErrorKind::Plugin, "device_api", message)
                .with_context("component", self.name()));
        }
        Ok(device_api)
    }

    /// Posts commands on a queue and returns how many were accepted.
    ///
    /// # Errors
    /// A status `TY_*` below zero; [`TY_INTERNAL`](abi::TY_INTERNAL) where the transport breaks the contract of the
    /// slot.
    ///
    /// # Safety
    /// The contract of [`Transport::post`](crate::transport::Transport::post); one thread per queue.
    #[inline]
    pub unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        let mut accepted = 0;
        // SAFETY: an open instance; the rest is this function's contract.
        let status = inside(Slot::Post, || unsafe {
            (self.post)(self.instance, queue, commands.as_ptr(), commands.len(), &mut accepted)
        });
        answer(status, accepted, commands.len())
    }

    /// Drives a queue and collects events.
    ///
    /// # Errors
    /// As [`post`](Self::post).
    #[inline]
    pub fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        let mut count = 0;
        // SAFETY: an open instance; `events` has room for its length.
        let status = inside(Slot::Poll, || unsafe {
            (self.poll)(self.instance, queue, events.as_mut_ptr(), events.len(), &mut count)
        });
        answer(status, count, events.len())
    }

    /// The total of a signal on this rank, with acquire order.
    #[inline]
    pub fn read_signal(&self, queue: u32, id: u32) -> u64 {
        // SAFETY: an open instance.
        unsafe { (self.read_signal)(self.instance, queue, id) }
    }

    /// The first asynchronous error, if there was one.
    ///
    /// # Errors
    /// The transport's error.
    pub fn health(&self) -> Result<()> {
        let Some(slot) = self.table.health else {
            return Err(crate::host::missing_slot(self.name(), "health"));
        };
        let mut error = crate::host::blank_error();
        // SAFETY: an open instance; any thread may call it.
        let status = inside(Slot::Health, || unsafe { slot(self.instance, &mut error) });
        crate::host::check("health", status, &error)
            .map_err(|e| e.with_context("component", self.name()))
    }

    /// Drives the fabric, where it must be driven; does nothing elsewhere. Any thread may call it at
    /// any time. Returns whether something moved.
    ///
    /// # Errors
    /// As [`post`](Self::post).
    pub(crate) fn progress(&self) -> std::result::Result<bool, i32> {
        let Some(slot) = self.table.progress else { return Ok(false) };
        // SAFETY: an open instance; any thread may call it.
        let status = inside(Slot::Progress, || unsafe { slot(self.instance) });
        answer(status.min(0), status.max(0) as usize, 1).map(|moved| moved == 1)
    }

    /// True if a thread must call [`progress`](Self::progress).
    pub(crate) fn needs_driving(&self) -> bool {
        self.capabilities.flags & abi::TY_CAP_MANUAL_PROGRESS != 0
    }

    /// The connection from this rank to `peer`, for diagnoses: the component's name and its own text.
    pub(crate) fn link_name(&self, peer: u32) -> String {
        let mut data = [0_u8; abi::TY_LINK_NAME_BYTES];
        let mut bytes = 0_usize;
        let name = self.name();
        let Some(slot) = self.table.link_name else { return name.to_owned() };
        let status = cold(name, Slot::LinkName, || {
            // SAFETY: an open instance; any thread may call it; the buffer is valid for the call.
            unsafe { slot(self.instance, peer, data.as_mut_ptr(), data.len(), &mut bytes) }
        });
        let text = String::from_utf8_lossy(&data[..bytes.min(data.len())]);
        if status != abi::TY_OK || text.is_empty() || text == name {
            return name.to_owned();
        }
        format!("{name}: {text}")
    }

    /// The transport's name.
    pub(crate) fn name(&self) -> &'static str {
        crate::host::TransportRef { table: self.table }.name()
    }
}

/// The count that a hot slot gave, if its status is that of a slot and the count is in range.
#[inline]
fn answer(status: i32, count: usize, most: usize) -> std::result::Result<usize, i32> {
    match status {
        abi::TY_OK if count <= most => Ok(count),
        ..0 => Err(status),
        // More than there is, or a positive status: no guess what is meant.
        _ => Err(abi::TY_INTERNAL),
    }
}

/// A device API with nothing in it, to be filled.
pub const NO_DEVICE_API: abi::TyDeviceApi = abi::TyDeviceApi {
    size: size_of::<abi::TyDeviceApi>(),
    version: 0,
    dialect: 0,
    compiler: 0,
    flags: 0,
    source: NO_TEXT,
    include_folders: std::ptr::null(),
    include_folder_count: 0,
    defines: std::ptr::null(),
    define_count: 0,
    params: std::ptr::null(),
    param_bytes: 0,
    param_alignment: 1,
};
const NO_TEXT: abi::TyStr = abi::TyStr { data: std::ptr::null(), bytes: 0 };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_beyond_the_room_and_a_positive_status_are_errors_of_the_transport() {
        assert_eq!(answer(abi::TY_OK, 3, 3), Ok(3));
        assert_eq!(answer(abi::TY_TRANSPORT, 0, 3), Err(abi::TY_TRANSPORT));
        for (status, count) in [(abi::TY_OK, 4), (2, 2)] {
            assert_eq!(answer(status, count, 3), Err(abi::TY_INTERNAL), "{status}, {count}");
        }
    }
}
