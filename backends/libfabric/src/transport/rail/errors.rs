//! Errors of a rail, in words (INV-7).

use std::ptr::null_mut;

use tokenyard_sys_fabric::calls;
use tokenyard_sys_fabric::types::fi_cq_err_entry;

use crate::transport::objects::Objects;
use crate::transport::shared::{Failure, Shared};

/// Reports a message of a peer that no correct peer sends.
#[cold]
pub(super) fn distrust(interface: &str, shared: &Shared, peer: Option<u32>, what: &str) {
    let message = format!(
        "a peer sent {what}; the ranks run different programs, or a stranger \
         writes to this rank"
    );
    shared.fail(Failure { peer, message, interface: interface.to_owned() });
}

/// The reason why a read of the queue failed, where no error entry says it.
pub(super) fn unreadable(objects: &Objects, status: isize) -> String {
    let message = objects.info.library().strerror(-status as i32);
    format!("the completion queue cannot be read: {message}")
}

/// Takes the next error entry of the queue.
pub(super) fn next(objects: &Objects) -> Option<fi_cq_err_entry> {
    let mut entry = blank_error();
    // SAFETY: the queue is open.
    let count = unsafe { calls::cq_readerr(objects.cq.raw(), &mut entry) };
    (count == 1).then_some(entry)
}

/// The last entry that was taken, in words.
pub(super) fn in_words(objects: &Objects, entry: &fi_cq_err_entry) -> String {
    let mut room = [0_u8; 160];
    // SAFETY: the entry is the last that was read from this queue; the buffer has the stated
    // length, and its text ends with a zero byte.
    let detail = unsafe {
        let text = room.as_mut_ptr().cast();
        let text = calls::cq_strerror(objects.cq.raw(), entry, text, room.len());
        match text.is_null() {
            true => String::new(),
            false => std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    };
    let text = objects.info.library().strerror(entry.err);
    format!("{text} (error {}; the provider says: {} {detail})", entry.err, entry.prov_errno)
}

fn blank_error() -> fi_cq_err_entry {
    fi_cq_err_entry {
        op_context: null_mut(),
        flags: 0,
        len: 0,
        buf: null_mut(),
        data: 0,
        tag: 0,
        olen: 0,
        err: 0,
        prov_errno: 0,
        err_data: null_mut(),
        err_data_size: 0,
    }
}
