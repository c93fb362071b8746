//! The end of objects. Ending an object that is in use is a violation.

use crate::hca::{Hca, Profile};
use crate::object::Inlet;
use crate::violation::Rule;

impl Hca {
    /// Ends a protection domain.
    pub fn free_pd(&mut self, pd: u32) {
        let regions = self.regions.values().filter(|region| region.pd == pd).count();
        let qps = self.qps.values().filter(|qp| qp.pd == pd).count();
        self.unused("protection domain", pd, &[("regions", regions), ("queue pairs", qps)]);
        self.pds.remove(&pd);
    }

    /// Ends a region.
    pub fn deregister(&mut self, key: u32) {
        let names = |qp: &&crate::object::QueuePair| {
            let sent = qp.sent.iter().filter(|sent| !sent.done).map(|sent| &sent.work);
            let mut works = sent.chain(&qp.waiting);
            works.any(|work| work.operation.locals().iter().any(|piece| piece.key == key))
        };
        let busy = self.qps.values().filter(names).count();
        // A user of libmlx5 may deregister memory that requests use, and then gets an error completion.
        if self.config.profile == Profile::Kernels {
            self.unused("region", key, &[("queue pairs with work under way", busy)]);
        }
        self.regions.remove(&key);
    }

    /// Ends a umem.
    pub fn free_umem(&mut self, id: u32) {
        let qps = self.qps.values().filter(|qp| qp.umems.contains(&id)).count();
        let cqs = self.cqs.values().filter(|cq| cq.umems.contains(&id)).count();
        self.unused("umem", id, &[("queue pairs", qps), ("completion queues", cqs)]);
        self.umems.remove(&id);
    }

    /// Ends a page of doorbell registers.
    pub fn free_page(&mut self, page: u32) {
        let qps = self.qps.values().filter(|qp| qp.page == page).count();
        self.unused("page of registers", page, &[("queue pairs", qps)]);
        self.pages.remove(&page);
    }

    /// Ends a completion queue.
    pub fn destroy_cq(&mut self, cqn: u32) {
        let uses = |qp: &&crate::object::QueuePair| qp.send_cq == cqn || qp.receive_cq == cqn;
        let qps = self.qps.values().filter(uses).count();
        self.unused("completion queue", cqn, &[("queue pairs", qps)]);
        self.cqs.remove(&cqn);
    }

    /// Ends a shared receive queue.
    pub fn destroy_srq(&mut self, srqn: u32) {
        let uses =
            |qp: &&crate::object::QueuePair| matches!(qp.inlet, Inlet::Shared(it) if it == srqn);
        let qps = self.qps.values().filter(uses).count();
        self.unused("shared receive queue", srqn, &[("queue pairs", qps)]);
        self.srqs.remove(&srqn);
    }

    /// Ends a queue pair.
    pub fn destroy_qp(&mut self, qpn: u32) {
        let busy = self.qps.get(&qpn).map_or(0, |qp| qp.sent.len() + qp.waiting.len());
        if self.config.profile == Profile::Kernels {
            self.unused("queue pair", qpn, &[("requests under way", busy)]);
        }
        self.qps.remove(&qpn);
    }

    fn unused(&mut self, what: &str, number: u32, uses: &[(&str, usize)]) {
        let used: Vec<String> =
            uses.iter().filter(|(_, n)| *n > 0).map(|(by, n)| format!("{n} {by}")).collect();
        if !used.is_empty() {
            let text = format!("{what} {number:#x} is freed; it is used by {}", used.join(" and "));
            self.violate(Rule::Lifetime, None, text, &[]);
        }
    }
}
