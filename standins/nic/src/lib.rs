//! A stand-in for libibverbs and NICs, for tests of users of `sys/verbs`: software in the process of the test, which
//! behaves like correct NICs, with the faults that a test requests.
//!
//! Work requests end while they are posted, in order. Regions, keys, states of queue pairs,
//! receives and the size of completion queues are checked. Packets, time and capabilities of real
//! devices are not modelled.

mod calls;
mod world;

use std::ffi::CString;

use tokenyard_sys_verbs::Library;
use tokenyard_sys_verbs::ffi::{self, Wc};

use world::{Device, NicState, World};

/// A stand-in NIC; it exists until the process ends.
#[derive(Clone, Copy, Debug)]
pub struct Nic {
    index: usize,
}

impl Nic {
    /// Adds a NIC of this name to those that the library lists. From the first NIC on, this process
    /// has no other libibverbs.
    ///
    /// # Panics
    /// The real library was opened before.
    pub fn new(name: &str) -> Self {
        assert!(Library::install(&calls::LIBRARY), "the real libibverbs is open in this process");
        let name = CString::new(name).unwrap_or_default();
        let mut world = World::enter();
        let index = world.nics.len();
        let device = Box::leak(Box::new(Device { name, index }));
        world.nics.push(NicState::new(device));
        Self { index }
    }

    /// From now on work requests are accepted, and none is executed.
    pub fn hold(self) {
        World::enter().nics[self.index].held = true;
    }

    /// Executes the held work requests, and goes on.
    pub fn release(self) {
        let mut world = World::enter();
        world.nics[self.index].held = false;
        world.execute_all();
    }

    /// Accepts this many more work requests and refuses the next one (`ENOMEM`), once.
    pub fn refuse_after(self, requests: usize) {
        World::enter().nics[self.index].refuse_after = Some(requests);
    }

    /// From now on, breaking a connection fails.
    pub fn refuse_to_break(self) {
        World::enter().nics[self.index].unbreakable = true;
    }

    /// Adds completions to the queue of this NIC's receives.
    pub fn arrive(self, completions: &[Wc]) {
        let mut world = World::enter();
        let queue = world.qps.iter().find(|qp| qp.nic == self.index).map(|qp| qp.recv_cq);
        for completion in completions {
            queue.into_iter().for_each(|queue| world.complete(queue, *completion));
        }
    }

    /// Lets the device report an asynchronous event.
    pub fn report(self, event: i32) {
        World::enter().nics[self.index].events.push_back((event, None));
    }

    /// Lets the queue pair of this number report an asynchronous event.
    pub fn report_of(self, event: i32, number: u32) {
        World::enter().nics[self.index].events.push_back((event, Some(number)));
    }

    /// The number of this NIC's first queue pair that is connected to `other`.
    ///
    /// # Panics
    /// There is none.
    pub fn number_to(self, other: Self) -> u32 {
        let world = World::enter();
        let leads = |qp: &world::QpState| {
            let peer = world.qps.get(qp.peer.wrapping_sub(1) as usize);
            qp.nic == self.index && peer.is_some_and(|peer| peer.nic == other.index)
        };
        let at = world.qps.iter().position(leads);
        assert!(at.is_some(), "no queue pair is connected to that NIC");
        at.unwrap_or_default() as u32 + 1
    }

    /// Takes the port down, and reports the event: requests to other NICs end unanswered.
    pub fn cut(self) {
        World::enter().nics[self.index].is_cut = true;
        self.report(ffi::EVENT_PORT_ERR);
    }

    /// Sets the port up again.
    pub fn restore(self) {
        World::enter().nics[self.index].is_cut = false;
    }

    /// Receives that are posted.
    pub fn receives(self) -> usize {
        let world = World::enter();
        let mine = world.srqs.iter().filter(|srq| srq.nic == self.index);
        mine.map(|srq| srq.posted).sum()
    }

    /// The destroyed objects so far, in order, and errors.
    pub fn journal(self) -> Vec<&'static str> {
        World::enter().nics[self.index].journal.clone()
    }
}
