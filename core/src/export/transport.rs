use std::ffi::c_void;
use std::marker::PhantomData;

use super::call::{Instance, check_size, close, guarded, guarded_hot, slots, text};
use super::{host, static_str};
use crate::abi;
use crate::config::ComponentTable;
use crate::exchange::Taken;
use crate::gpu_ring::RingToServe;
use crate::nics::Nics;
use crate::transport::{Capabilities, MemoryNeeds, Team, Transport, TransportNeeds, TransportOpen};
use crate::{Error, ErrorKind, Result};

/// The C table of a [`Transport`].
#[derive(Debug)]
pub struct TransportComponent<T>(PhantomData<T>);

impl<T: Transport> TransportComponent<T> {
    /// The table; every slot is filled.
    pub const TABLE: &'static abi::TyTransportTable = &abi::TyTransportTable {
        size: size_of::<abi::TyTransportTable>(),
        name: static_str(T::NAME),
        version: static_str(env!("CARGO_PKG_VERSION")),
        about: static_str(T::ABOUT),
        probe: Some(Self::probe),
        open: Some(Self::open),
        close: Some(Self::close),
        memory_needs: Some(Self::memory_needs),
        alloc: Some(Self::alloc),
        register: Some(Self::register),
        endpoint: Some(Self::endpoint),
        connect: Some(Self::connect),
        peer_address: Some(Self::peer_address),
        post: Some(Self::post),
        poll: Some(Self::poll),
        read_signal: Some(Self::read_signal),
        health: Some(Self::health),
        progress: Some(Self::progress),
        link_name: Some(Self::link_name),
        device_api: Some(Self::device_api),
        device_source: Some(Self::device_source),
        commit: Some(Self::commit),
        serve_ring: Some(Self::serve_ring),
        device_api_of: Some(Self::device_api_of),
    };

    unsafe extern "C" fn probe(
        host: *const abi::TyHost,
        config: *const abi::TyConfig,
        capabilities: *mut abi::TyCapabilities,
        error: *mut abi::TyError,
    ) -> i32 {
        guarded("probe", error, || {
            // SAFETY: the host's structures are valid for the call.
            let (config, out) = unsafe {
                host::meet(host);
                (T::configure(&read_table(&*config)?)?, &mut *capabilities)
            };
            check_size("probe", out.size, size_of::<abi::TyCapabilities>())?;
            *out = Capabilities { size: out.size, ..T::probe(&config)? };
            Ok(())
        })
    }

    unsafe extern "C" fn open(
        host: *const abi::TyHost,
        open: *const abi::TyTransportOpen,
        instance: *mut *mut c_void,
        error: *mut abi::TyError,
    ) -> i32 {
        guarded("open", error, || {
            // SAFETY: the host's structures are valid for the call.
            let open = unsafe {
                host::meet(host);
                &*open
            };
            check_size("open", open.size, size_of::<abi::TyTransportOpen>())?;
            // SAFETY: as above; the list has `count` entries.
            let (config, world_ranks) = unsafe {
                (
                    T::configure(&read_table(&open.config)?)?,
                    std::slice::from_raw_parts(open.team.world_ranks, open.team.count as usize),
                )
            };
            // SAFETY: the host's list has so many entries, valid for the call.
            let names = unsafe { names(open.nics, open.nic_count)? };
            let any_rails = open.flags & abi::TY_OPEN_ANY_RAILS != 0;
            let (world_ranks, nics) = (world_ranks.to_vec(), Nics { names, any_rails });
            let team = Team { me: open.team.me, world_ranks, nics };
            let needs = TransportNeeds {
                windows: open.needs.windows,
                queues: open.needs.queues,
                signals: open.needs.signals,
                queue_depth: open.needs.queue_depth,
                largest_put: open.needs.largest_put,
                deadline: std::time::Duration::from_nanos(open.needs.deadline_ns),
            };
            // SAFETY: the host's exchange is for this team, and valid for the call.
            let exchange = unsafe { Taken::new(open.exchange, team.world_ranks.len()) };
            let device = u32::try_from(open.device).ok();
            let opened = TransportOpen { team: &team, needs: &needs, device, exchange: &exchange };
            let component = T::open(config, &opened)?;
            // SAFETY: `instance` is the host's and valid for the call.
            unsafe { *instance = Instance::into_raw(component) };
            Ok(())
        })
    }

    unsafe extern "C" fn close(instance: *mut c_void) {
        // SAFETY: the host closes an instance of this table once.
        unsafe { close::<T>(instance) }
    }

    unsafe extern "C" fn device_source(
        device_api: *mut abi::TyDeviceApi,
        error: *mut abi::TyError,
    ) -> i32 {
        guarded("device_source", error, || {
            // SAFETY: the host's structure is valid for the call.
            let room = unsafe { &mut *device_api };
            check_size("device_source", room.size, size_of::<abi::TyDeviceApi>())?;
            *room = T::device_source()?;
            Ok(())
        })
    }

    slots! { guarded_mut, &mut T:
        memory_needs(needs: *mut abi::TyMemoryNeeds) [needs] |component| {
            *needs = MemoryNeeds { size: (*needs).size, ..component.memory_needs() };
            Ok(())
        };
        alloc(window: *mut abi::TyWindow) [window] |component| {
            *window = component.alloc((*window).id, (*window).bytes)?;
            Ok(())
        };
        register(window: *const abi::TyWindow) [window] |component| component.register(&*window);
        endpoint(peer: u32, data: *mut u8, capacity: usize, bytes: *mut usize) |component| {
            let endpoint = component.endpoint(peer)?;
            if endpoint.len() > capacity {
                return Err(Error::new(
                    ErrorKind::Internal,
                    "endpoint",
                    format!("made {} bytes; expected at most {capacity}", endpoint.len()),
                ));
            }
            std::ptr::copy_nonoverlapping(endpoint.as_ptr(), data, endpoint.len());
            *bytes = endpoint.len();
            Ok(())
        };
        connect(peer: u32, data: *const u8, bytes: usize) |component| {
            let data: &[u8] =
                if bytes == 0 { &[] } else { std::slice::from_raw_parts(data, bytes) };
            component.connect(peer, data)
        };
        commit() |component| component.commit();
        serve_ring(ring: *const abi::TyServeRing) [ring] |component| {
            if component.serve_ring(RingToServe::new(&*ring))? {
                return Ok(());
            }
            let message = "the host serves the rings of kernels";
            Err(Error::new(ErrorKind::Unsupported, "serve_ring", message))
        };
    }

    slots! { guarded_ref, &T:
        peer_address(window: u32, peer: u32, address: *mut *mut u8) |component| {
            *address = component.peer_address(window, peer)?;
            Ok(())
        };
        health() |component| component.health();
        device_api(device_api: *mut abi::TyDeviceApi) [device_api] |component| {
            *device_api = component.device_api()?;
            Ok(())
        };
        device_api_of(first: *const abi::TyFirst, device_api: *mut abi::TyDeviceApi) [first, device_api] |component| {
            *device_api = component.device_api_of(&*first)?;
            Ok(())
        };
    }

    unsafe extern "C" fn post(
        instance: *mut c_void,
        queue: u32,
        commands: *const abi::TyCommand,
        count: usize,
        accepted: *mut usize,
    ) -> i32 {
        if count == 0 {
            // SAFETY: `accepted` is the host's and valid for the call.
            unsafe { *accepted = 0 };
            return abi::TY_OK;
        }
        // SAFETY: the host passes an open instance, `count` commands, and leaves their sources
        // unchanged.
        unsafe {
            guarded_hot(instance, |component: &T| {
                match component.post(queue, std::slice::from_raw_parts(commands, count)) {
                    Ok(n) => {
                        *accepted = n;
                        abi::TY_OK
                    }
                    Err(status) => status,
                }
            })
        }
    }

    unsafe extern "C" fn poll(
        instance: *mut c_void,
        queue: u32,
        events: *mut abi::TyEvent,
        capacity: usize,
        count: *mut usize,
    ) -> i32 {
        // SAFETY: the host passes an open instance and room for `capacity` events.
        unsafe {
            guarded_hot(instance, |component: &T| {
                match component.poll(queue, std::slice::from_raw_parts_mut(events, capacity)) {
                    Ok(n) => {
                        *count = n;
                        abi::TY_OK
                    }
                    Err(status) => status,
                }
            })
        }
    }

    unsafe extern "C" fn read_signal(instance: *mut c_void, queue: u32, id: u32) -> u64 {
        let mut total = 0;
        // SAFETY: the host passes an open instance. A panic leaves 0 and poisons the instance, so
        // `poll` and `health` report it.
        unsafe {
            guarded_hot(instance, |component: &T| {
                total = component.read_signal(queue, id);
                abi::TY_OK
            })
        };
        total
    }

    unsafe extern "C" fn progress(instance: *mut c_void) -> i32 {
        // SAFETY: the host passes an open instance; `progress` needs shared access only.
        unsafe {
            guarded_hot(instance, |component: &T| match component.progress() {
                Ok(moved) => i32::from(moved),
                Err(status) => status,
            })
        }
    }

    unsafe extern "C" fn link_name(
        instance: *mut c_void,
        peer: u32,
        data: *mut u8,
        capacity: usize,
        bytes: *mut usize,
    ) -> i32 {
        // SAFETY: the host passes an open instance and room for `capacity` bytes; `link_name` needs
        // shared access only.
        unsafe {
            guarded_hot(instance, |component: &T| {
                let name = component.link_name(peer);
                // The reader repairs a character that is cut in two.
                let length = name.len().min(capacity);
                std::ptr::copy_nonoverlapping(name.as_ptr(), data, length);
                *bytes = length;
                abi::TY_OK
            })
        }
    }
}

/// A component's own table.
///
/// # Safety
/// The strings of `config` are valid for the call.
pub(super) unsafe fn read_table(config: &abi::TyConfig) -> Result<ComponentTable> {
    check_size("read config", config.size, size_of::<abi::TyConfig>())?;
    // SAFETY: by this function's contract.
    let (table, file) =
        unsafe { (text("read config", config.text)?, text("read config", config.file)?) };
    Ok(ComponentTable::from_text(table, file))
}

/// A list of names of the other side.
///
/// # Safety
/// `list` has `count` valid strings.
unsafe fn names(list: *const abi::TyStr, count: usize) -> Result<Vec<String>> {
    if list.is_null() || count == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: by this function's contract.
    let list = unsafe { std::slice::from_raw_parts(list, count) };
    // SAFETY: by this function's contract.
    list.iter().map(|name| unsafe { Ok(text("open", *name)?.to_owned()) }).collect()
}
