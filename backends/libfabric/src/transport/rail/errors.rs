//! Errors of a rail, in words (INV-7).

use std::ptr::null_mut;

use tokenyard_core::abi;
use tokenyard_sys_fabric::calls;
use tokenyard_sys_fabric::types::fi_cq_err_entry;

use super::{EAVAIL, State};
use crate::transport::shared::{Failure, Shared};

impl State {
    /// Reports a message of a peer that no correct peer sends.
    #[cold]
    pub(super) fn distrust(&self, shared: &Shared, peer: Option<u32>, what: &str) {
        let message = format!(
            "a peer sent {what}; the ranks run different programs, or a stranger \
             writes to this rank"
        );
        shared.fail(Failure { peer, message, interface: self.interface.clone() });
    }

    /// Reads the error entries after a failed read of the queue (INV-7).
    #[cold]
    pub(super) fn complain(&mut self, shared: &Shared, status: isize) {
        if status != EAVAIL {
            let message = self.objects.info.library().strerror(-status as i32);
            let message = format!("the completion queue cannot be read: {message}");
            return shared.fail(Failure { peer: None, message, interface: self.interface.clone() });
        }
        let mut entry = blank_error();
        // SAFETY: the queue is open.
        while unsafe { calls::cq_readerr(self.objects.cq.raw(), &mut entry) } == 1 {
            let slot = shared.slots.find(entry.op_context);
            if entry.op_context == self.fence.get().cast() {
                self.fence_is_out = false;
            }
            let marked = || self.marked(entry.op_context);
            let peer = slot.map(|slot| shared.slots.peer(slot)).or_else(marked);
            let message = self.words(&entry);
            shared.fail(Failure { peer, message, interface: self.interface.clone() });
            if let Some(slot) = slot {
                shared.slots.complete(slot, abi::TY_TRANSPORT);
            }
            entry = blank_error();
        }
    }

    fn words(&self, entry: &fi_cq_err_entry) -> String {
        let mut room = [0_u8; 160];
        // SAFETY: the entry is the last that was read from this queue; the buffer has the stated
        // length, and its text ends with a zero byte.
        let detail = unsafe {
            let text = room.as_mut_ptr().cast();
            let text = calls::cq_strerror(self.objects.cq.raw(), entry, text, room.len());
            match text.is_null() {
                true => String::new(),
                false => std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned(),
            }
        };
        let text = self.objects.info.library().strerror(entry.err);
        format!("{text} (error {}; the provider says: {} {detail})", entry.err, entry.prov_errno)
    }
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
