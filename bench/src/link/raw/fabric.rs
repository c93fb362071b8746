//! libfabric by direct calls: the ceiling of everything that uses it.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_core::bootstrap::World;
use tokenyard_sys_fabric::consts::*;
use tokenyard_sys_fabric::types::*;
use tokenyard_sys_fabric::{Library, calls};

use super::super::{DEPTH, LARGE, SMALL};
use super::{Raw, Seen};

/// The provider that a table of `libfabric` names.
pub(super) fn provider(table: &str) -> Result<String> {
    #[derive(Deserialize)]
    struct Table {
        #[serde(default = "tcp")]
        provider: String,
    }
    fn tcp() -> String {
        "tcp".to_owned()
    }
    Ok(toml::from_str::<Table>(table)?.provider)
}

/// The address of the other rank's memory.
#[derive(Serialize, Deserialize)]
struct FabricPeer {
    address: Vec<u8>,
    key: u64,
    base: u64,
}

/// One endpoint, one queue, one region.
pub(super) struct Fabric {
    library: &'static Library,
    info: *mut fi_info,
    fabric: *mut fid_fabric,
    domain: *mut fid_domain,
    av: *mut fid_av,
    cq: *mut fid_cq,
    ep: *mut fid_ep,
    mr: *mut fid_mr,
    memory: Vec<u8>,
    /// Room that a provider may need per put in flight (`fi_context2`).
    contexts: Box<[[*mut c_void; 8]; DEPTH]>,
    peer: fi_addr_t,
    there: FabricPeer,
    first: bool,
    seen: Seen,
}

impl Drop for Fabric {
    fn drop(&mut self) {
        let objects: [*mut fid; 6] = [
            self.ep.cast(),
            self.mr.cast(),
            self.av.cast(),
            self.cq.cast(),
            self.domain.cast(),
            self.fabric.cast(),
        ];
        for object in objects.into_iter().filter(|object| !object.is_null()) {
            // SAFETY: open, not used elsewhere, and closed before the object that it was made from.
            unsafe { calls::close(object) };
        }
        if !self.info.is_null() {
            // SAFETY: made by `getinfo`, freed once.
            unsafe { self.library.freeinfo(self.info) }
        }
    }
}

impl Fabric {
    pub(super) fn open(world: &World, provider: &str) -> Result<Self> {
        let library = Library::open()?;
        let info = query(library, provider)?;
        let mut raw = Self {
            library,
            info,
            fabric: null_mut(),
            domain: null_mut(),
            av: null_mut(),
            cq: null_mut(),
            ep: null_mut(),
            mr: null_mut(),
            // Sources, then places that the other rank writes. All of it is written once, as the
            // transport's memory is: reads of memory that was never written all hit one page of
            // zeros.
            memory: vec![1; 2 * DEPTH * LARGE],
            contexts: Box::new([[null_mut(); 8]; DEPTH]),
            peer: 0,
            there: FabricPeer { address: Vec::new(), key: 0, base: 0 },
            first: world.rank() == 0,
            seen: Seen::default(),
        };
        raw.open_objects()?;
        raw.meet(world)?;
        Ok(raw)
    }

    fn is_accepted(&self, status: isize) -> Result<bool> {
        let error = -status as i32;
        ensure!(matches!(error, 0 | FI_EAGAIN), "put: {}", self.library.strerror(error));
        Ok(error == 0)
    }

    fn check(&self, what: &'static str, status: i32) -> Result<()> {
        ensure!(status == 0, "{what}: {}", self.library.strerror(-status));
        Ok(())
    }

    fn open_objects(&mut self) -> Result<()> {
        // SAFETY: `info` lives as long as the objects; each call uses objects opened before it; the
        // memory does not move until the region is closed (`Drop`).
        unsafe {
            self.fabric = self
                .library
                .fabric((*self.info).fabric_attr)
                .map_err(|e| anyhow::anyhow!("fi_fabric: {}", self.library.strerror(e)))?;
            let status = calls::domain(self.fabric, self.info, &mut self.domain);
            self.check("fi_domain", status)?;
            let mut attr: fi_av_attr = std::mem::zeroed();
            attr.type_ = FI_AV_TABLE;
            attr.count = 1;
            let status = calls::av_open(self.domain, &mut attr, &mut self.av);
            self.check("fi_av_open", status)?;
            let mut attr: fi_cq_attr = std::mem::zeroed();
            attr.size = 4096;
            attr.format = FI_CQ_FORMAT_DATA;
            let status = calls::cq_open(self.domain, &mut attr, &mut self.cq);
            self.check("fi_cq_open", status)?;
            let status = calls::endpoint(self.domain, self.info, &mut self.ep);
            self.check("fi_endpoint", status)?;
            let status = calls::bind(self.ep.cast(), self.av.cast(), 0);
            self.check("bind the address vector", status)?;
            let status = calls::bind(self.ep.cast(), self.cq.cast(), FI_TRANSMIT | FI_RECV);
            self.check("bind the completion queue", status)?;
            let status = calls::enable(self.ep.cast());
            self.check("fi_enable", status)?;
            let vector =
                iovec { iov_base: self.memory.as_mut_ptr().cast(), iov_len: self.memory.len() };
            let mut attr: fi_mr_attr = std::mem::zeroed();
            attr.mr_iov = &vector;
            attr.iov_count = 1;
            attr.access = FI_WRITE | FI_REMOTE_WRITE;
            attr.requested_key = 1;
            let status = calls::mr_regattr(self.domain, &attr, 0, &mut self.mr);
            self.check("fi_mr_regattr", status)?;
            if (*(*self.info).domain_attr).mr_mode & FI_MR_ENDPOINT != 0 {
                let status = calls::bind(self.mr.cast(), self.ep.cast(), 0);
                self.check("bind the region", status)?;
                let status = calls::enable(self.mr.cast());
                self.check("enable the region", status)?;
            }
        }
        Ok(())
    }

    /// Exchanges addresses with the other rank.
    fn meet(&mut self, world: &World) -> Result<()> {
        let mut address = vec![0_u8; 256];
        let mut bytes = address.len();
        // SAFETY: the endpoint is enabled, the buffer has the stated length; the region is open.
        let (status, key, virtual_addresses) = unsafe {
            (
                calls::getname(self.ep, address.as_mut_ptr().cast(), &mut bytes),
                (*self.mr).key,
                (*(*self.info).domain_attr).mr_mode & FI_MR_VIRT_ADDR != 0,
            )
        };
        self.check("fi_getname", status)?;
        address.truncate(bytes);
        let base = if virtual_addresses { self.memory.as_ptr() as u64 } else { 0 };
        let mine = serde_json::to_vec(&FabricPeer { address, key, base })?;
        let all = world.all_gather("bare link", &mine)?;
        let other = all.get(usize::from(self.first)).context("two ranks")?;
        self.there = serde_json::from_slice(other)?;
        // SAFETY: the vector is open; the address is one of the same provider.
        let taken = unsafe {
            calls::av_insert(self.av, self.there.address.as_ptr().cast(), &mut self.peer)
        };
        ensure!(taken == 1, "fi_av_insert: the address was not taken");
        Ok(())
    }
}

impl Raw for Fabric {
    fn name(&self) -> String {
        // SAFETY: libfabric fills all attributes of what it returns, and its names end with zero.
        unsafe {
            let text = |p: *const std::ffi::c_char| {
                std::ffi::CStr::from_ptr(p).to_string_lossy().into_owned()
            };
            let info = &*self.info;
            let provider = text((*info.fabric_attr).prov_name);
            format!("{provider} on {}", text((*info.domain_attr).name))
        }
    }

    fn is_first(&self) -> bool {
        self.first
    }

    fn seen(&self) -> Seen {
        self.seen
    }

    fn put_small(&mut self) -> Result<bool> {
        let FabricPeer { key, base, .. } = self.there;
        // SAFETY: the endpoint is enabled; 8 bytes are there, and injected.
        let status = unsafe {
            let from = self.memory.as_ptr().cast::<c_void>();
            calls::inject_writedata(self.ep, from, SMALL, 1, self.peer, base, key)
        };
        self.is_accepted(status)
    }

    fn put_large(&mut self, slot: usize) -> Result<bool> {
        let from = self.memory[slot * LARGE..].as_mut_ptr();
        let vector = iovec { iov_base: from.cast(), iov_len: LARGE };
        let to = fi_rma_iov {
            addr: self.there.base + ((DEPTH + slot) * LARGE) as u64,
            len: LARGE,
            key: self.there.key,
        };
        // SAFETY: the region is open.
        let mut descriptor = unsafe { (*self.mr).mem_desc };
        let message = fi_msg_rma {
            msg_iov: &vector,
            desc: &mut descriptor,
            iov_count: 1,
            addr: self.peer,
            rma_iov: &to,
            rma_iov_count: 1,
            context: self.contexts[slot].as_mut_ptr().cast(),
            data: 1,
        };
        // SAFETY: the endpoint is enabled; the source is not touched while puts are in flight.
        let status =
            unsafe { calls::writemsg(self.ep, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION) };
        self.is_accepted(status)
    }

    fn drive(&mut self) -> Result<()> {
        // SAFETY: plain data.
        let mut entries: [fi_cq_data_entry; 16] = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open; there is room for as many.
        let count = unsafe { calls::cq_read(self.cq, entries.as_mut_ptr(), entries.len()) };
        if count < 0 {
            let error = -count as i32;
            ensure!(error == FI_EAGAIN, "read completions: {}", self.library.strerror(error));
            return Ok(());
        }
        for entry in &entries[..count as usize] {
            if entry.flags & FI_REMOTE_CQ_DATA != 0 {
                self.seen.arrived += 1;
            } else {
                self.seen.done += 1;
            }
        }
        Ok(())
    }
}

/// The first interface of the provider, for a program with one thread.
fn query(library: &'static Library, provider: &str) -> Result<*mut fi_info> {
    let name = CString::new(library.provider(provider))?;
    let hints = library.allocinfo();
    ensure!(!hints.is_null(), "fi_dupinfo: memory is short");
    // SAFETY: fresh hints whose structures libfabric made; the name is owned here and removed
    // again.
    let found = unsafe {
        let info = &mut *hints;
        info.caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
        info.mode = FI_CONTEXT | FI_CONTEXT2;
        (*info.ep_attr).type_ = FI_EP_RDM;
        let domain = &mut *info.domain_attr;
        domain.mr_mode =
            FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
        domain.threading = FI_THREAD_DOMAIN;
        domain.control_progress = FI_PROGRESS_MANUAL;
        domain.data_progress = FI_PROGRESS_MANUAL;
        domain.resource_mgmt = FI_RM_ENABLED;
        (*info.fabric_attr).prov_name = name.as_ptr().cast_mut();
        let found = library.getinfo(hints);
        (*info.fabric_attr).prov_name = null_mut();
        library.freeinfo(hints);
        found
    };
    found.map_err(|e| anyhow::anyhow!("fi_getinfo for {provider}: {}", library.strerror(e)))
}
