use std::ffi::c_void;

use super::registry::TransportRef;
use super::{Slot, as_ty, attended, blank_error, check, config_as_ty, inside, optional, services};
use crate::abi;
use crate::config::ComponentTable;
use crate::exchange::Given;
use crate::link::{Link, NO_DEVICE_API};
use crate::transport::{
    Capabilities, Command, Event, MemoryNeeds, NO_WINDOW, TransportOpen, Window,
};
use crate::{Error, ErrorKind, Result};

/// The error for a missing slot: an optional one, or a required one, which a judged table always has.
pub(crate) fn missing_slot(component: &str, slot: &'static str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        slot,
        format!("component `{component}` does not provide `{slot}`"),
    )
}

/// Runs `call`, which calls a slot that may take long.
pub(crate) fn cold<T>(transport: &'static str, slot: Slot, call: impl FnOnce() -> T) -> T {
    attended("transport", transport, slot.name(), || inside(slot, call))
}

impl TransportRef {
    /// Gets the capabilities of the transport on this machine.
    ///
    /// # Errors
    /// Errors of the component, or an impossible set of capabilities.
    pub fn probe(&self, config: &ComponentTable) -> Result<Capabilities> {
        let probe = self.table.probe.ok_or_else(|| missing_slot(self.name(), "probe"))?;
        let mut capabilities = crate::transport::NO_CAPABILITIES;
        let mut error = blank_error();
        // SAFETY: a judged table; every structure belongs to this side and is valid for the call.
        let status = cold(self.name(), Slot::Probe, || unsafe {
            probe(services(), &config_as_ty(config), &mut capabilities, &mut error)
        });
        check("probe", status, &error)
            .map_err(|e| config.locate(e).with_context("component", self.name()))?;
        self.check_capabilities(&capabilities)?;
        Ok(capabilities)
    }

    fn check_capabilities(&self, found: &Capabilities) -> Result<()> {
        let has = |flag| found.flags & flag != 0;
        let broken = if has(abi::TY_CAP_LOAD_STORE) && self.table.peer_address.is_none() {
            "load_store without a `peer_address` slot"
        } else if has(abi::TY_CAP_OWNS_MEMORY) && self.table.alloc.is_none() {
            "owns_memory without an `alloc` slot"
        } else if has(abi::TY_CAP_MANUAL_PROGRESS) && self.table.progress.is_none() {
            "manual_progress without a `progress` slot"
        } else if has(abi::TY_CAP_DEVICE_API) && self.table.device_api.is_none() {
            "device_api without a `device_api` slot"
        } else if found.max_signals > 65_536 {
            "more than 65,536 signals"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Plugin, "probe", format!("the component declares {broken}"))
            .with_context("component", self.name())
            .with_fix("report this to the component's author"))
    }

    /// The source that kernels compile in to use this transport, without an instance; nothing where it
    /// has no such source. Its pointers are static.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn device_source(&self) -> Result<Option<abi::TyDeviceApi>> {
        let Some(slot) = self.table.device_source else { return Ok(None) };
        let mut device_api = NO_DEVICE_API;
        let mut error = blank_error();
        // SAFETY: a judged table; the structures are valid for the call.
        let status = unsafe { slot(&mut device_api, &mut error) };
        let answer = optional(check("device_source", status, &error))
            .map_err(|error| error.with_context("component", self.name()))?;
        Ok(answer.map(|()| device_api))
    }

    /// Probes, and opens an instance for a team.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn open(
        &self,
        config: &ComponentTable,
        opened: &TransportOpen<'_>,
    ) -> Result<OpenTransport> {
        let TransportOpen { team, needs, device, exchange } = *opened;
        let capabilities = self.probe(config)?;
        let table = self.table;
        let (Some(open), Some(close)) = (table.open, table.close) else {
            return Err(missing_slot(self.name(), "open"));
        };
        let nics: Vec<_> = team.nics.names.iter().map(|name| as_ty(name)).collect();
        let given = Given::new(exchange, team.world_ranks.len());
        let exchange = given.as_abi();
        let request = abi::TyTransportOpen {
            size: size_of::<abi::TyTransportOpen>(),
            config: config_as_ty(config),
            team: abi::TyTeam {
                size: size_of::<abi::TyTeam>(),
                me: team.me,
                count: team.world_ranks.len() as u32,
                world_ranks: team.world_ranks.as_ptr(),
            },
            needs: abi::TyTransportNeeds {
                size: size_of::<abi::TyTransportNeeds>(),
                windows: needs.windows,
                queues: needs.queues,
                signals: needs.signals,
                queue_depth: needs.queue_depth,
                largest_put: needs.largest_put,
                deadline_ns: needs.deadline.as_nanos().min(u128::from(u64::MAX)) as u64,
            },
            nics: nics.as_ptr(),
            nic_count: nics.len(),
            flags: if team.nics.any_rails { abi::TY_OPEN_ANY_RAILS } else { 0 },
            device: device.map_or(-1, |device| device as i32),
            exchange: &raw const exchange,
        };
        let mut instance = std::ptr::null_mut();
        let mut error = blank_error();
        // SAFETY: a judged table; every structure belongs to this side and is valid for the call.
        let status = cold(self.name(), Slot::Open, || unsafe {
            open(services(), &request, &mut instance, &mut error)
        });
        check("open", status, &error)
            .map_err(|e| config.locate(e).with_context("component", self.name()))?;
        let link = abi::TyLink { table, instance, capabilities };
        // SAFETY: judged tables live for ever; the link is dropped with the instance or passed on under
        // the same promise (`OpenTransport::link`).
        let link = unsafe { Link::from_abi(&link)? };
        Ok(OpenTransport { component: *self, instance, close, link })
    }
}

/// An open transport: its cold calls, and the [`Link`] for the hot ones.
#[derive(Debug)]
pub struct OpenTransport {
    component: TransportRef,
    instance: *mut c_void,
    close: unsafe extern "C" fn(*mut c_void),
    link: Link,
}

// SAFETY: the ABI allows an instance to be used from any thread, one at a time for cold calls.
unsafe impl Send for OpenTransport {}
// SAFETY: `&self` reaches nothing but the name and the link, which is `Sync` itself.
unsafe impl Sync for OpenTransport {}

impl OpenTransport {
    /// The component's name.
    pub(crate) fn name(&self) -> &'static str {
        self.component.name()
    }

    /// The hot calls of this transport.
    ///
    /// # Safety
    /// The link, and every copy of it, is not used after `self` is dropped.
    pub unsafe fn link(&self) -> Link {
        self.link
    }

    /// Hides capabilities from the users of the link.
    pub(crate) fn without(mut self, capabilities: u64) -> Self {
        self.link = self.link.without(capabilities);
        self
    }

    /// The capabilities that the transport declared, without hidden ones.
    pub fn capabilities(&self) -> &Capabilities {
        self.link.capabilities()
    }

    /// See [`Link::peer_address`].
    ///
    /// # Errors
    /// Errors of the component.
    pub fn peer_address(&self, window: u32, peer: u32) -> Result<*mut u8> {
        self.link.peer_address(window, peer)
    }

    /// See [`Link::post`].
    ///
    /// # Errors
    /// A status `TY_*` below zero.
    ///
    /// # Safety
    /// As [`Link::post`].
    pub unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        // SAFETY: by this function's contract.
        unsafe { self.link.post(queue, commands) }
    }

    /// See [`Link::poll`].
    ///
    /// # Errors
    /// A status `TY_*` below zero.
    pub fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        self.link.poll(queue, events)
    }

    /// See [`Link::read_signal`].
    pub fn read_signal(&self, queue: u32, id: u32) -> u64 {
        self.link.read_signal(queue, id)
    }

    /// See [`Link::health`].
    ///
    /// # Errors
    /// The transport's error.
    pub fn health(&self) -> Result<()> {
        self.link.health()
    }

    /// Drives the fabric, where it must be driven; does nothing elsewhere. Any thread may call it at any time. Returns
    /// whether something moved.
    ///
    /// # Errors
    /// A status `TY_*` below zero.
    pub fn progress(&self) -> std::result::Result<bool, i32> {
        self.link.progress()
    }

    /// The connection from this rank to `peer`, for diagnoses: the component's name and its own text.
    pub fn link_name(&self, peer: u32) -> String {
        self.link.link_name(peer)
    }

    fn cold(
        &self,
        slot: Slot,
        call: impl FnOnce(&abi::TyTransportTable, *mut abi::TyError) -> Option<i32>,
    ) -> Result<()> {
        let mut error = blank_error();
        let status = cold(self.name(), slot, || call(self.component.table, &mut error))
            .ok_or_else(|| missing_slot(self.name(), slot.name()))?;
        check(slot.name(), status, &error).map_err(|e| e.with_context("component", self.name()))
    }

    /// The requirements on window memory.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn memory_needs(&mut self) -> Result<MemoryNeeds> {
        let mut needs = abi::TyMemoryNeeds {
            size: size_of::<MemoryNeeds>(),
            kinds: 0,
            handles: 0,
            alignment: 1,
        };
        // SAFETY: an open instance of a judged table; the structures are valid for the call.
        self.cold(Slot::MemoryNeeds, |t, e| unsafe {
            t.memory_needs.map(|f| f(self.instance, &mut needs, e))
        })?;
        if !needs.alignment.is_power_of_two() {
            return Err(Error::new(
                ErrorKind::Plugin,
                "memory_needs",
                format!("found alignment {}; expected a power of two", needs.alignment),
            )
            .with_context("component", self.name()));
        }
        Ok(needs)
    }

    /// Lets the transport allocate a window.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn alloc(&mut self, id: u32, bytes: u64) -> Result<Window> {
        let mut window = Window { id, bytes, ..NO_WINDOW };
        // SAFETY: as in `memory_needs`.
        self.cold(Slot::Alloc, |t, e| unsafe {
            t.alloc.map(|f| f(self.instance, &mut window, e))
        })?;
        check_window(self.name(), &window, id, bytes)?;
        Ok(window)
    }

    /// Registers a window.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// The window's memory and descriptor stay valid until `self` is dropped.
    pub unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: as in `memory_needs`; the window's life is this function's contract.
        self.cold(Slot::Register, |t, e| unsafe { t.register.map(|f| f(self.instance, window, e)) })
    }

    /// The bytes that `peer` needs to reach this rank.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        let mut data = vec![0_u8; abi::TY_ENDPOINT_BYTES];
        let mut bytes = 0_usize;
        // SAFETY: as in `memory_needs`.
        self.cold(Slot::Endpoint, |t, e| unsafe {
            t.endpoint.map(|f| f(self.instance, peer, data.as_mut_ptr(), data.len(), &mut bytes, e))
        })?;
        if bytes > data.len() {
            return Err(Error::new(
                ErrorKind::Plugin,
                "endpoint",
                format!("the component wrote {bytes} bytes into a buffer of {}", data.len()),
            )
            .with_context("component", self.name()));
        }
        data.truncate(bytes);
        Ok(data)
    }

    /// Connects to `peer` with the bytes of its `endpoint`.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        // SAFETY: as in `memory_needs`.
        self.cold(Slot::Connect, |t, e| unsafe {
            t.connect.map(|f| f(self.instance, peer, data.as_ptr(), data.len(), e))
        })
        .map_err(|e| e.with_context("peer", peer))
    }

    /// Ends the connection phase, for components that have work to do then. Every rank of the team calls
    /// it.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn commit(&mut self) -> Result<()> {
        if self.component.table.commit.is_none() {
            return Ok(());
        }
        // SAFETY: as in `memory_needs`.
        self.cold(Slot::Commit, |t, e| unsafe { t.commit.map(|f| f(self.instance, e)) })
    }

    /// Offers the transport a ring of kernels. Returns true if it serves the ring, with a thread of its
    /// own.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// The contract of [`TyServeRing`](abi::TyServeRing); memory that must outlive `close` outlives
    /// `self`.
    pub(crate) unsafe fn serve_ring(&mut self, ring: &abi::TyServeRing) -> Result<bool> {
        if self.component.table.serve_ring.is_none() {
            return Ok(false);
        }
        // SAFETY: as in `memory_needs`, and by this function's contract.
        let served = self.cold(Slot::ServeRing, |t, e| unsafe {
            t.serve_ring.map(|f| f(self.instance, ring, e))
        });
        Ok(optional(served)?.is_some())
    }
}

impl Drop for OpenTransport {
    fn drop(&mut self) {
        // SAFETY: the instance is open and no code can use it after this.
        cold(self.name(), Slot::Close, || unsafe { (self.close)(self.instance) });
    }
}

pub(super) fn check_window(component: &str, found: &Window, id: u32, bytes: u64) -> Result<()> {
    if found.pointer.is_null() || found.id != id || found.bytes < bytes || found.kind == 0 {
        return Err(Error::new(
            ErrorKind::Plugin,
            "allocate window",
            format!(
                "the component gave window {} of {} bytes, kind {}; expected window {id} of {bytes} bytes",
                found.id, found.bytes, found.kind
            ),
        )
        .with_context("component", component));
    }
    // Records in windows are read as 64-bit words, arrays start at multiples of REGION_ALIGN.
    if !(found.pointer as u64).is_multiple_of(crate::moe::REGION_ALIGN) {
        return Err(Error::new(
            ErrorKind::Plugin,
            "allocate window",
            format!(
                "the component gave window {id} at {:p}; expected a multiple of {} bytes",
                found.pointer,
                crate::moe::REGION_ALIGN
            ),
        )
        .with_context("component", component));
    }
    Ok(())
}
