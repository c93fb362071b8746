//! libibverbs by straight calls: one reliable queue pair, writes with immediate data.

use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_core::bootstrap::World;
use tokenyard_core::transport::Team;
use tokenyard_sys_verbs::ffi::{self, SendWr, Sge, Wc, WrRdma, WrTarget};
use tokenyard_sys_verbs::{Address, Cq, Mr, Pd, Qp, QpRequest, Receive, Rts, Send, Srq};
use tokenyard_verbs::VerbsConfig;
use tokenyard_verbs::port::Port;

use super::super::{DEPTH, LARGE, SMALL};
use super::{Raw, Seen};

/// Work requests that were not polled yet.
const QUEUE: u32 = 64;
/// One of this many small puts has a completion, which frees their places in the queue.
const REPORT_EVERY: u64 = 16;
/// Receives that are posted, and the number that are posted again at once. There are never more
/// puts of the other rank in flight.
const RECEIVES: u32 = 256;
const REFILL: usize = 32;
/// The work request to which a completion belongs.
const SMALL_PUT: u64 = 0;
const LARGE_PUT: u64 = 1;

/// The address of the other rank, and of its memory.
#[derive(Serialize, Deserialize)]
struct VerbsPeer {
    gid: [u8; 16],
    lid: u16,
    mtu: u8,
    queue: u32,
    base: u64,
    key: u32,
}

/// A write of the memory here to that of the other rank.
struct RdmaWrite {
    /// Offset in the local memory.
    from: usize,
    /// Offset in the other rank's memory.
    to: usize,
    bytes: usize,
    /// The id of its completion.
    id: u64,
    /// Flags of libibverbs, such as `SEND_INLINE`.
    flags: u32,
}

/// One queue pair, one completion queue, one region. Fields drop in order: the queue pair and the
/// region, which the other rank writes through, before the memory.
pub(super) struct Verbs {
    qp: Qp<Rts>,
    region: Mr,
    cq: Arc<Cq>,
    receives: Arc<Srq>,
    memory: Vec<u8>,
    there: VerbsPeer,
    name: String,
    first: bool,
    seen: Seen,
    /// Small puts that were posted.
    small: u64,
    /// Receives that were used up.
    used: usize,
}

impl Verbs {
    pub(super) fn open(world: &World, table: &str) -> Result<Self> {
        let config: VerbsConfig = toml::from_str(table).context("read the table of `verbs`")?;
        // The port that the transport uses for this rank.
        let team = Team::world(world.rank(), world.ranks());
        let port = config.ports().open(Some(&team))?.pop();
        let (context, facts) = port.context("found no port of a device; expected one")?;
        let port = Port::new(&context, &facts, config.gid_index, config.mtu)?;
        let pd = Pd::new(&context)?;
        let cq = Cq::new(&context, 2 * QUEUE + RECEIVES)?;
        let receives = Srq::new(&pd, RECEIVES)?;
        for _ in 0..RECEIVES as usize / REFILL {
            receives.post(REFILL)?;
        }
        // Sources, then places that the other rank writes.
        let mut memory = vec![1; 2 * DEPTH * LARGE];
        let access = ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE;
        // SAFETY: the memory is dropped after the region, and no code reads it while the region
        // lives.
        let region = unsafe { Mr::new(&pd, memory.as_mut_ptr(), memory.len(), access)? };
        let request = QpRequest {
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            srq: Some(Arc::clone(&receives)),
            depth: QUEUE,
            inline: SMALL as u32,
        };
        let qp = Qp::new(&pd, &request)?.init(port.number, config.pkey_index, access)?;
        let mine = VerbsPeer {
            gid: port.gid.gid.raw,
            lid: port.attr.lid,
            mtu: port.mtu,
            queue: qp.number(),
            base: memory.as_ptr() as u64,
            key: region.rkey(),
        };
        let all = world.all_gather("bare link", &serde_json::to_vec(&mine)?)?;
        let first = world.rank() == 0;
        let other = all.get(usize::from(first)).context("two ranks")?;
        let there: VerbsPeer = serde_json::from_slice(other)?;
        let (class, level) = (config.traffic_class, config.service_level);
        let route = port.route(there.lid, there.gid, class, level);
        let mtu = i32::from(mine.mtu.min(there.mtu));
        let to = Address { route, qpn: there.queue, mtu };
        let qp = qp.receive(&to, &Receive { psn: 0, reads: 1, rnr_timer: 12 })?.send(&Send {
            psn: 0,
            reads: 1,
            timeout: config.timeout,
            retries: config.retry_count,
            rnr_retries: config.rnr_retry,
        })?;
        // A write to a queue pair that does not receive yet waits for a retry.
        world.barrier("bare link connected")?;
        let name = format!("verbs on {} port {}", facts.device, facts.port);
        let seen = Seen::default();
        Ok(Self { qp, region, cq, receives, memory, there, name, first, seen, small: 0, used: 0 })
    }

    /// Posts a write with immediate data; false if the queue is full.
    fn write(&mut self, write: RdmaWrite) -> Result<bool> {
        let RdmaWrite { from, to, bytes, id, flags } = write;
        let mut piece = Sge {
            addr: self.memory[from..from + bytes].as_ptr() as u64,
            length: u32::try_from(bytes)?,
            lkey: self.region.lkey(),
        };
        let target = WrRdma { remote_addr: self.there.base + to as u64, rkey: self.there.key };
        let mut request = SendWr {
            wr_id: id,
            sg_list: &mut piece,
            num_sge: 1,
            opcode: ffi::WR_RDMA_WRITE_WITH_IMM,
            send_flags: flags,
            wr: WrTarget { rdma: target },
            ..SendWr::BLANK
        };
        // SAFETY: one request and its piece, valid for the call; the memory is registered, and no
        // code changes sources.
        match unsafe { self.qp.post(&mut request) } {
            Ok(()) => Ok(true),
            Err((error, _)) if error.source.kind() == std::io::ErrorKind::OutOfMemory => Ok(false),
            Err((error, _)) => Err(anyhow!(error).context("put")),
        }
    }
}

impl Raw for Verbs {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn is_first(&self) -> bool {
        self.first
    }

    fn seen(&self) -> Seen {
        self.seen
    }

    fn put_small(&mut self) -> Result<bool> {
        let report = (self.small + 1).is_multiple_of(REPORT_EVERY);
        let flags = ffi::SEND_INLINE | if report { ffi::SEND_SIGNALED } else { 0 };
        let write = RdmaWrite { from: 0, to: DEPTH * LARGE, bytes: SMALL, id: SMALL_PUT, flags };
        let posted = self.write(write)?;
        self.small += u64::from(posted);
        Ok(posted)
    }

    fn put_large(&mut self, slot: usize) -> Result<bool> {
        self.write(RdmaWrite {
            from: slot * LARGE,
            to: (DEPTH + slot) * LARGE,
            bytes: LARGE,
            id: LARGE_PUT,
            flags: ffi::SEND_SIGNALED,
        })
    }

    fn drive(&mut self) -> Result<()> {
        let mut completions = [Wc::default(); 16];
        let count = self.cq.poll(&mut completions)?;
        for completion in &completions[..count] {
            let status = completion.status;
            let words = self.cq.context().library().status_words(status);
            ensure!(status == ffi::WC_SUCCESS, "a put failed: {words}");
            if completion.opcode == ffi::WC_RECV_RDMA_WITH_IMM {
                self.seen.arrived += 1;
                self.used += 1;
            } else if completion.wr_id == LARGE_PUT {
                self.seen.done += 1;
            }
        }
        if self.used >= REFILL {
            self.receives.post(REFILL)?;
            self.used -= REFILL;
        }
        Ok(())
    }
}
