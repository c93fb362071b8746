//! Work requests to post, in lists per peer.

use std::cell::UnsafeCell;

use tokenyard_sys_verbs::ffi::{SEND_SIGNALED, SendWr, Sge};

use super::commands::Request;

/// A list of work requests that is being built: places in the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    first: usize,
    last: usize,
}

/// Work requests that point to each other.
///
/// The cells are never borrowed as values, only accessed by their pointers: a reference to a cell
/// would invalidate the pointers in other cells.
#[derive(Debug)]
pub(super) struct Batch {
    wrs: Box<[UnsafeCell<SendWr>]>,
    sges: Box<[UnsafeCell<Sge>]>,
    used: usize,
}

// SAFETY: the pointers in `wrs` point into the same batch, or into commands during one call of
// `post`; they are rewritten for every batch.
unsafe impl Send for Batch {}

impl Batch {
    /// A batch with room for this many work requests.
    pub(super) fn new(room: usize) -> Self {
        Self {
            wrs: (0..room).map(|_| UnsafeCell::new(SendWr::BLANK)).collect(),
            sges: (0..room).map(|_| UnsafeCell::new(Sge::default())).collect(),
            used: 0,
        }
    }

    /// Clears all lists.
    pub(super) fn clear(&mut self) {
        self.used = 0;
    }

    /// Adds a request to the end of a list, or starts a list with it.
    pub(super) fn add(&mut self, chain: Option<Chain>, id: u64, request: Request) -> Chain {
        let at = self.used;
        self.used += 1;
        let mut wr = SendWr { wr_id: id, ..request.wr };
        if let Some(piece) = request.sge {
            let sge = self.sges[at].get();
            // SAFETY: the batch is borrowed for this call, and no reference into it is alive.
            unsafe { sge.write(piece) };
            (wr.sg_list, wr.num_sge) = (sge, 1);
        }
        let place = self.wrs[at].get();
        // SAFETY: as above.
        unsafe { place.write(wr) };
        let Some(chain) = chain else { return Chain { first: at, last: at } };
        // SAFETY: as above.
        unsafe { (*self.wrs[chain.last].get()).next = place };
        Chain { last: at, ..chain }
    }

    /// Requests a completion of the list's last request.
    pub(super) fn report(&mut self, chain: Chain) {
        // SAFETY: as in `add`.
        unsafe { (*self.wrs[chain.last].get()).send_flags |= SEND_SIGNALED };
    }

    /// The list, linked and ended with null, until the next `add` to it or `clear`.
    pub(super) fn list(&mut self, chain: Chain) -> *mut SendWr {
        self.wrs[chain.first].get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(address: u64) -> Request {
        Request { wr: SendWr::BLANK, sge: Some(Sge { addr: address, length: 8, lkey: 0 }) }
    }

    /// (id, address, reported) of each request of a list.
    fn read(mut list: *mut SendWr) -> Vec<(u64, u64, bool)> {
        let mut found = Vec::new();
        while !list.is_null() {
            // SAFETY: a list of a live batch.
            let wr = unsafe { *list };
            // SAFETY: as above; each has one piece.
            let address = unsafe { (*wr.sg_list).addr };
            found.push((wr.wr_id, address, wr.send_flags & SEND_SIGNALED != 0));
            list = wr.next;
        }
        found
    }

    #[test]
    fn lists_that_grow_in_turns_stay_apart_and_in_order_also_when_the_batch_has_moved() {
        let mut batch = Batch::new(8);
        for round in 0..2 {
            let a = batch.add(None, 1, request(10));
            let b = batch.add(None, 2, request(20));
            let a = batch.add(Some(a), 3, request(30));
            batch.report(a);
            let mut moved = batch;
            let a = moved.add(Some(a), 4, request(40));
            moved.report(b);
            let first = [(1, 10, false), (3, 30, true), (4, 40, false)];
            assert_eq!(read(moved.list(a)), first, "round {round}");
            assert_eq!(read(moved.list(b)), [(2, 20, true)], "round {round}");
            moved.clear();
            batch = moved;
        }
    }
}
