//! The link of one user of a session that has several: the transport's own, with the user's numbers of windows,
//! queues and signals. A user counts them from 0, and so does not know of the others.

use std::ffi::c_void;

use super::needs::Base;
use crate::abi;
use crate::link::Link;
use crate::transport::{Command, Event, NO_COMMAND};

/// Commands that are renumbered at a time, on the stack.
const BATCH: usize = 16;

/// A view of a link. The user's plan points to it, so it stays where it is and outlives the user.
#[derive(Debug)]
pub(crate) struct SharedLink {
    /// The table of the transport, with the slots of this module.
    table: abi::TyTransportTable,
    link: abi::TyLink,
    base: Base,
}

// SAFETY: the view is never changed; what it points to may be used from several threads by the rules of `Link`.
unsafe impl Send for SharedLink {}
// SAFETY: as above.
unsafe impl Sync for SharedLink {}

impl SharedLink {
    /// A view of `link` in which numbers begin at `base`. Kernels of a device compile the transport in, and do not go
    /// through the view: it has a device API where the transport gives one for a part of its numbers.
    pub(crate) fn new(link: &Link, base: Base) -> Box<Self> {
        let link = link.as_abi();
        // SAFETY: a link points to a table that is never freed.
        let table = unsafe { *link.table };
        let table = abi::TyTransportTable {
            post: Some(post),
            poll: Some(poll),
            read_signal: Some(read_signal),
            health: table.health.map(|_| health as _),
            progress: table.progress.map(|_| progress as _),
            peer_address: table.peer_address.map(|_| peer_address as _),
            link_name: table.link_name.map(|_| link_name as _),
            device_api: table.device_api_of.map(|_| device_api as _),
            serve_ring: None,
            device_api_of: None,
            ..table
        };
        Box::new(Self { table, link, base })
    }

    /// The view in the form of the ABI. It is valid for as long as `self`.
    pub(crate) fn as_abi(&self) -> abi::TyLink {
        abi::TyLink {
            table: &raw const self.table,
            instance: std::ptr::from_ref(self).cast_mut().cast(),
            capabilities: self.link.capabilities,
        }
    }

    /// # Safety
    /// `instance` is that of [`as_abi`](Self::as_abi), and the view lives.
    unsafe fn of<'a>(instance: *mut c_void) -> &'a Self {
        // SAFETY: by this function's contract.
        unsafe { &*instance.cast::<Self>() }
    }

    fn slots(&self) -> &abi::TyTransportTable {
        // SAFETY: a link points to a table that is never freed.
        unsafe { &*self.link.table }
    }

    fn renumbered(&self, command: &Command) -> Command {
        let mut command = *command;
        // Numbers that wrap are beyond those of the transport, which refuses them.
        command.queue = command.queue.wrapping_add(self.base.queue);
        command.signal = command.signal.wrapping_add(self.base.signal);
        // A command without windows names none: its numbers stay.
        if command.op != abi::TY_OP_SIGNAL {
            let window = self.base.window as u16;
            command.src_window = command.src_window.wrapping_add(window);
            command.dst_window = command.dst_window.wrapping_add(window);
        }
        command
    }
}

unsafe extern "C" fn post(
    instance: *mut c_void,
    queue: u32,
    commands: *const Command,
    count: usize,
    accepted: *mut usize,
) -> i32 {
    // SAFETY: the caller uses the link that `as_abi` gave, by the contract of the slot.
    let (this, commands) = unsafe { (SharedLink::of(instance), commands_of(commands, count)) };
    let Some(post) = this.slots().post else { return abi::TY_INTERNAL };
    let mut done = 0;
    for batch in commands.chunks(BATCH) {
        let mut own = [NO_COMMAND; BATCH];
        for (own, command) in own.iter_mut().zip(batch) {
            *own = this.renumbered(command);
        }
        let mut taken = 0;
        // SAFETY: the transport's own slot and instance; the rest is the contract of the slot.
        let status = unsafe {
            post(
                this.link.instance,
                queue.wrapping_add(this.base.queue),
                own.as_ptr(),
                batch.len(),
                &raw mut taken,
            )
        };
        // Commands that were accepted before count; a failure shows again at the next call.
        if status != abi::TY_OK && done == 0 {
            return status;
        }
        if status != abi::TY_OK {
            break;
        }
        if taken > batch.len() {
            return abi::TY_INTERNAL;
        }
        done += taken;
        if taken < batch.len() {
            break;
        }
    }
    // SAFETY: valid for the call, by the contract of the slot.
    unsafe { *accepted = done };
    abi::TY_OK
}

/// # Safety
/// `count` commands at `commands`, valid for the call.
unsafe fn commands_of<'a>(commands: *const Command, count: usize) -> &'a [Command] {
    if count == 0 {
        return &[];
    }
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts(commands, count) }
}

unsafe extern "C" fn poll(
    instance: *mut c_void,
    queue: u32,
    events: *mut Event,
    capacity: usize,
    count: *mut usize,
) -> i32 {
    // SAFETY: as in `post`.
    let this = unsafe { SharedLink::of(instance) };
    let Some(poll) = this.slots().poll else { return abi::TY_INTERNAL };
    // SAFETY: as in `post`.
    let status = unsafe {
        poll(this.link.instance, queue.wrapping_add(this.base.queue), events, capacity, count)
    };
    if status != abi::TY_OK {
        return status;
    }
    // SAFETY: the transport has written `count` events, and not more than there is room for.
    for event in 0..unsafe { *count }.min(capacity) {
        // SAFETY: as above.
        let event = unsafe { &mut *events.add(event) };
        event.queue = event.queue.wrapping_sub(this.base.queue);
    }
    status
}

unsafe extern "C" fn read_signal(instance: *mut c_void, queue: u32, id: u32) -> u64 {
    // SAFETY: as in `post`.
    let this = unsafe { SharedLink::of(instance) };
    let Some(read_signal) = this.slots().read_signal else { return 0 };
    // SAFETY: as in `post`.
    unsafe {
        read_signal(
            this.link.instance,
            queue.wrapping_add(this.base.queue),
            id.wrapping_add(this.base.signal),
        )
    }
}

unsafe extern "C" fn health(instance: *mut c_void, error: *mut abi::TyError) -> i32 {
    // SAFETY: as in `post`.
    let this = unsafe { SharedLink::of(instance) };
    let Some(health) = this.slots().health else { return abi::TY_INTERNAL };
    // SAFETY: as in `post`.
    unsafe { health(this.link.instance, error) }
}

unsafe extern "C" fn progress(instance: *mut c_void) -> i32 {
    // SAFETY: as in `post`.
    let this = unsafe { SharedLink::of(instance) };
    let Some(progress) = this.slots().progress else { return abi::TY_OK };
    // SAFETY: as in `post`.
    unsafe { progress(this.link.instance) }
}

unsafe extern "C" fn peer_address(
    instance: *mut c_void,
    window: u32,
    peer: u32,
    address: *mut *mut u8,
    error: *mut abi::TyError,
) -> i32 {
    // SAFETY: as in `post`.
    let this = unsafe { SharedLink::of(instance) };
    let Some(slot) = this.slots().peer_address else { return abi::TY_INTERNAL };
    // SAFETY: as in `post`.
    unsafe { slot(this.link.instance, window.wrapping_add(this.base.window), peer, address, error) }
}

unsafe extern "C" fn device_api(
    instance: *mut c_void,
    device_api: *mut abi::TyDeviceApi,
    error: *mut abi::TyError,
) -> i32 {
    // SAFETY: as in `post`.
    let this = unsafe { SharedLink::of(instance) };
    let Some(slot) = this.slots().device_api_of else { return abi::TY_UNSUPPORTED };
    let Base { window, queue, signal } = this.base;
    let size = size_of::<abi::TyFirst>();
    let first = abi::TyFirst { size, window, queue, signal, reserved: 0 };
    // SAFETY: as in `post`.
    unsafe { slot(this.link.instance, &raw const first, device_api, error) }
}

unsafe extern "C" fn link_name(
    instance: *mut c_void,
    peer: u32,
    data: *mut u8,
    capacity: usize,
    bytes: *mut usize,
) -> i32 {
    // SAFETY: as in `post`.
    let this = unsafe { SharedLink::of(instance) };
    let Some(link_name) = this.slots().link_name else { return abi::TY_INTERNAL };
    // SAFETY: as in `post`.
    unsafe { link_name(this.link.instance, peer, data, capacity, bytes) }
}
