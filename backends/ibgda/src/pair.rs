//! A queue pair and its completion queue as objects of the device, wherever their memory lies.

use std::sync::Arc;

use tokenyard_sys_mlx5::doorbell::RECORD;
use tokenyard_sys_mlx5::mailbox::{
    CreateCq, CreateCqOut, CreateQp, CreateQpOut, Init2Rtr, QueryQp, QueryQpOut, Rst2Init, Rtr2Rts,
};
use tokenyard_sys_mlx5::wqe::BLOCK;
use tokenyard_sys_mlx5::{CallError, Devx, Object, Uar, Umem};

use crate::device_api::DEPTHS;

/// Bytes from a completion to the record of its queue. That queue is never rung for.
pub(crate) const RECORD_OF_COMPLETION: usize = BLOCK;

/// The commands that take a queue pair from its first state to the state in which it sends. `connect` fills in
/// the number of the queue pair in each.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// Port and rights.
    pub init: Rst2Init,
    /// The peer and the path to it.
    pub receive: Init2Rtr,
    /// How requests are repeated.
    pub send: Rtr2Rts,
}

/// A place in memory that commands can name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UmemPlace<'a> {
    pub(crate) umem: &'a Arc<Umem>,
    pub(crate) offset: usize,
}

/// Where the parts of a queue pair lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLayout<'a> {
    /// [`BLOCK`] bytes times the depth, at a page.
    pub(crate) requests: UmemPlace<'a>,
    /// The doorbell record, 8 bytes.
    pub(crate) record: UmemPlace<'a>,
    /// One completion, at a page, filled with `cqe::FILL`; behind it 8 zeros ([`RECORD_OF_COMPLETION`]).
    pub(crate) completion: UmemPlace<'a>,
}

/// The objects that a queue pair needs beside its memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parents<'a> {
    pub(crate) devx: &'a Arc<Devx>,
    pub(crate) uar: &'a Arc<Uar>,
    /// Number of the protection domain, which lives as long as the queue pair: a device refuses to end one that is in
    /// use.
    pub(crate) pd: u32,
}

/// A queue pair and its completion queue.
#[derive(Debug)]
pub(crate) struct Pair {
    // Dropped in this order: the objects that a command named outlive the object that it made.
    qp: Object,
    _cq: Object,
    _umems: [Arc<Umem>; 3],
    pub(crate) uar: Arc<Uar>,
    pub(crate) number: u32,
}

impl Pair {
    /// Makes a queue pair with room for `depth` requests.
    ///
    /// # Errors
    /// `EINVAL` for a depth that is not a power of two in [`DEPTHS`]; else the error of the library or the device.
    pub(crate) fn new(
        parents: &Parents<'_>,
        layout: &QueueLayout<'_>,
        depth: u32,
    ) -> Result<Self, CallError> {
        let Parents { devx, uar, pd } = *parents;
        let QueueLayout { requests, record, completion } = *layout;
        if !DEPTHS.contains(&depth) || !depth.is_power_of_two() {
            let text = format!("found depth {depth}; expected a power of two in {DEPTHS:?}");
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, text);
            return Err(CallError { call: "make queue pair", source });
        }
        let cq = CreateCq {
            dbr_umem_id: completion.umem.id(),
            log_size: 0,
            uar_page: uar.page(),
            eqn: devx.event_queue(0)? as u8,
            dbr_offset: (completion.offset + RECORD_OF_COMPLETION) as u64,
            buffer_offset: completion.offset as u64,
            buffer_umem_id: completion.umem.id(),
        };
        // SAFETY: umem and page of registers are stored beside it, and dropped after it.
        let (cq, CreateCqOut { cqn, .. }) = unsafe { Object::new(devx, &cq) }?;
        let qp = CreateQp {
            pd,
            log_sq_size: depth.ilog2() as u8,
            uar_page: uar.page(),
            user_index: 0,
            send_cqn: cqn,
            receive_cqn: cqn,
            dbr_offset: record.offset as u64,
            dbr_umem_id: record.umem.id(),
            wq_offset: requests.offset as u64,
            wq_umem_id: requests.umem.id(),
        };
        // SAFETY: as above, and the completion queue. The domain is the caller's.
        let (qp, CreateQpOut { qpn: number, .. }) = unsafe { Object::new(devx, &qp) }?;
        let umems = [requests, record, completion].map(|place| Arc::clone(place.umem));
        Ok(Self { qp, _cq: cq, _umems: umems, uar: Arc::clone(uar), number })
    }

    /// Takes the queue pair to the state in which it receives and sends.
    ///
    /// # Errors
    /// The error of the library or the device.
    pub(crate) fn connect(&self, steps: &Steps) -> Result<(), CallError> {
        let qpn = self.number;
        self.qp.modify(&Rst2Init { qpn, ..steps.init })?;
        self.qp.modify(&Init2Rtr { qpn, ..steps.receive })?;
        self.qp.modify(&Rtr2Rts { qpn, ..steps.send })
    }

    /// The state of the queue pair, one of `QP_STATE_*`, as the device knows it.
    ///
    /// # Errors
    /// The error of the library or the device.
    pub(crate) fn state(&self) -> Result<u8, CallError> {
        let found: QueryQpOut = self.qp.query(&QueryQp { qpn: self.number })?;
        Ok(found.state)
    }
}

const _: () = assert!(RECORD <= BLOCK, "two records do not overlap");
