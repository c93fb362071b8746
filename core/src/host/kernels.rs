use std::ffi::c_void;

use super::registry::KernelsRef;
use super::transport::{blank_window, check_window, missing_slot};
use super::{blank_error, check, config_as_ty, services};
use crate::abi;
use crate::config::PartTable;
use crate::kernels::{
    KernelNeeds, KernelShape, Limits, LinkNeeds, NO_LINK_NEEDS, Trace, is_for_level,
};
use crate::transport::{Capabilities, MemoryNeeds, Window};
use crate::{Error, ErrorKind, Result};

impl KernelsRef {
    /// Asks whether the kernel set can run here; returns the memory kinds it works on.
    ///
    /// # Errors
    /// What the part says.
    pub fn probe(&self, config: &PartTable) -> Result<u32> {
        let probe = self.table.probe.ok_or_else(|| missing_slot(self.name(), "probe"))?;
        let mut kinds = 0;
        let mut error = blank_error();
        // SAFETY: a judged table; every structure is ours and valid for the call.
        let status = unsafe { probe(services(), &config_as_ty(config), &mut kinds, &mut error) };
        check("probe", status, &error).map_err(|e| e.with_context("part", self.name()))?;
        Ok(kinds)
    }

    /// Opens an instance.
    ///
    /// # Errors
    /// What the part says.
    pub fn open(&self, config: &PartTable, shape: &KernelShape) -> Result<OpenKernels> {
        let (Some(open), Some(close)) = (self.table.open, self.table.close) else {
            return Err(missing_slot(self.name(), "open"));
        };
        let mut instance = std::ptr::null_mut();
        let mut error = blank_error();
        // SAFETY: a judged table; every structure is ours and valid for the call.
        let status =
            unsafe { open(services(), &config_as_ty(config), shape, &mut instance, &mut error) };
        check("open", status, &error).map_err(|e| e.with_context("part", self.name()))?;
        Ok(OpenKernels { part: *self, instance, close })
    }
}

/// An open kernel set. One thread at a time.
#[derive(Debug)]
pub struct OpenKernels {
    part: KernelsRef,
    instance: *mut c_void,
    close: unsafe extern "C" fn(*mut c_void),
}

// SAFETY: the ABI allows an instance to be used from any thread, one at a time; `OpenKernels` has no
// `&self` call that reaches the instance.
unsafe impl Send for OpenKernels {}

impl OpenKernels {
    /// The part's name.
    pub fn name(&self) -> &'static str {
        self.part.name()
    }

    fn call(
        &mut self,
        slot: &'static str,
        call: impl FnOnce(&abi::TyKernelsTable, *mut c_void, *mut abi::TyError) -> Option<i32>,
    ) -> Result<()> {
        let mut error = blank_error();
        let status = call(self.part.table, self.instance, &mut error)
            .ok_or_else(|| missing_slot(self.part.name(), slot))?;
        check(slot, status, &error).map_err(|e| e.with_context("part", self.name()))
    }

    /// What the kernel set will use, within `limits`.
    ///
    /// # Errors
    /// What the part says, or needs beyond the limits.
    pub fn needs(&mut self, limits: &Limits) -> Result<KernelNeeds> {
        let mut needs = KernelNeeds {
            size: size_of::<KernelNeeds>(),
            windows: 0,
            flags: 0,
            scale_up: NO_LINK_NEEDS,
            scale_out: NO_LINK_NEEDS,
            window_bytes: [0; abi::TY_MAX_WINDOWS],
            window_levels: [0; abi::TY_MAX_WINDOWS],
        };
        // SAFETY: an open instance of a judged table; the structures are valid for the call.
        self.call("needs", |t, i, e| unsafe { t.needs.map(|f| f(i, limits, &mut needs, e)) })?;
        self.check_window_levels(&needs)?;
        for (name, level, limits, link) in [
            ("scale-up", abi::TY_LEVEL_SCALE_UP, &limits.scale_up, &needs.scale_up),
            ("scale-out", abi::TY_LEVEL_SCALE_OUT, &limits.scale_out, &needs.scale_out),
        ] {
            let windows = (0..needs.windows.min(abi::TY_MAX_WINDOWS as u32))
                .filter(|window| is_for_level(&needs, *window, level));
            self.check_needs(name, limits, (windows.count() as u32, link))?;
        }
        let known = abi::TY_NEEDS_MASKING | abi::TY_NEEDS_STREAMS | abi::TY_NEEDS_NO_SYNC;
        let unknown = needs.flags & !known;
        if unknown != 0 {
            let text =
                format!("found needs with the flags {unknown:#x}, which this core does not know");
            return Err(Error::new(ErrorKind::Plugin, "needs", text)
                .with_context("part", self.name())
                .with_fix("use a kernel set that was made for this version"));
        }
        if needs.flags & (abi::TY_NEEDS_STREAMS | abi::TY_NEEDS_NO_SYNC) != 0 {
            self.check_stream_slots()?;
        }
        if needs.flags & abi::TY_NEEDS_NO_SYNC != 0 {
            self.check_graph_slots(needs.flags)?;
        }
        Ok(needs)
    }

    /// Levels that windows are for must be known, and as many windows as there are places for them.
    fn check_window_levels(&self, needs: &KernelNeeds) -> Result<()> {
        let known = 1 << abi::TY_LEVEL_SCALE_UP | 1 << abi::TY_LEVEL_SCALE_OUT;
        let windows = needs.window_levels.iter().take(needs.windows as usize);
        let unknown = windows.fold(0, |all, levels| all | levels) & !known;
        if unknown == 0 && needs.windows as usize <= abi::TY_MAX_WINDOWS {
            return Ok(());
        }
        let text = format!(
            "found {} windows, for unknown levels {unknown:#x}; expected at most {}, for levels 0 and 1",
            needs.windows,
            abi::TY_MAX_WINDOWS
        );
        Err(Error::new(ErrorKind::Plugin, "needs", text).with_context("part", self.name()))
    }

    fn check_graph_slots(&self, flags: u32) -> Result<()> {
        if flags & abi::TY_NEEDS_STREAMS == 0 {
            let text = "found TY_NEEDS_NO_SYNC alone; expected TY_NEEDS_STREAMS with it";
            return Err(Error::new(ErrorKind::Plugin, "needs", text)
                .with_context("part", self.name())
                .with_fix("report it to the author of the kernel set"));
        }
        let table = self.part.table;
        for (slot, is_missing) in [
            ("graph_begin", table.graph_begin.is_none()),
            ("graph_end", table.graph_end.is_none()),
            ("graph_launch", table.graph_launch.is_none()),
            ("graph_destroy", table.graph_destroy.is_none()),
        ] {
            if is_missing {
                return Err(missing_slot(self.name(), slot));
            }
        }
        Ok(())
    }

    fn check_stream_slots(&self) -> Result<()> {
        let table = self.part.table;
        for (slot, is_missing) in [
            ("stream_create", table.stream_create.is_none()),
            ("stream_destroy", table.stream_destroy.is_none()),
            ("copy_on", table.copy_on.is_none()),
        ] {
            if is_missing {
                return Err(missing_slot(self.name(), slot));
            }
        }
        Ok(())
    }

    fn check_needs(
        &self,
        level: &str,
        limits: &Capabilities,
        needs: (u32, &LinkNeeds),
    ) -> Result<()> {
        let (windows, link) = needs;
        let windows = if link.lanes == 0 { 0 } else { windows };
        for (what, wanted, limit) in [
            ("windows", windows.into(), limits.max_windows.min(abi::TY_MAX_WINDOWS as u32).into()),
            ("lanes", u64::from(link.lanes), u64::from(limits.max_lanes)),
            ("signals", link.signals.into(), limits.max_signals.into()),
            ("queue depth", link.queue_depth.into(), limits.max_queue_depth.into()),
            ("bytes of a put", link.largest_put, limits.largest_put),
        ] {
            if wanted > limit {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "plan needs",
                    format!(
                        "kernel set `{}` needs {wanted} {what}; the {level} transport has {limit}",
                        self.name()
                    ),
                )
                .with_fix("choose a smaller shape or another transport"));
            }
        }
        Ok(())
    }

    /// Allocates the memory of a window.
    ///
    /// # Errors
    /// What the part says.
    pub fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        let mut window = blank_window(id, bytes);
        // SAFETY: as in `needs`.
        self.call("allocate", |t, i, e| unsafe {
            t.allocate.map(|f| f(i, needs, &mut window, e))
        })?;
        check_window(self.name(), &window, id, bytes)?;
        Ok(window)
    }

    /// Fixes sizes, offsets and buffers.
    ///
    /// # Errors
    /// What the part says.
    ///
    /// # Safety
    /// Everything the plan points to stays valid until `self` is dropped.
    pub unsafe fn plan(&mut self, plan: &abi::TyPlan) -> Result<()> {
        // SAFETY: as in `needs`, and by this function's contract.
        self.call("plan", |t, i, e| unsafe { t.plan.map(|f| f(i, plan, e)) })
    }

    /// Starts a dispatch.
    ///
    /// # Errors
    /// What the part says.
    ///
    /// # Safety
    /// Tensors stay valid and unchanged until the operation was received, and a stream that is named
    /// has passed it.
    pub unsafe fn dispatch_send(&mut self, dispatch: &abi::TyDispatch) -> Result<()> {
        // SAFETY: as in `needs`, and by this function's contract.
        self.call("dispatch_send", |t, i, e| unsafe { t.dispatch_send.map(|f| f(i, dispatch, e)) })
    }

    /// Ends a dispatch.
    ///
    /// # Errors
    /// What the part says.
    pub fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        let mut received = abi::TyReceived {
            size: size_of::<abi::TyReceived>(),
            region: 0,
            tokens: 0,
            rows: 0,
            x: NO_TENSOR,
            scales: NO_TENSOR,
            ids: NO_TENSOR,
            weights: NO_TENSOR,
            source: NO_TENSOR,
            slots: NO_TENSOR,
            expert_counts: NO_TENSOR,
            expert_starts: NO_TENSOR,
            source_counts: NO_TENSOR,
            ranges: NO_TENSOR,
            totals: NO_TENSOR,
            lost: NO_TENSOR,
        };
        // SAFETY: as in `needs`.
        self.call("dispatch_recv", |t, i, e| unsafe {
            t.dispatch_recv.map(|f| f(i, operation, &mut received, e))
        })?;
        Ok(received)
    }

    /// Gives an arena region for expert outputs.
    ///
    /// # Errors
    /// What the part says.
    pub fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        let (mut region, mut tensor) = (0, NO_TENSOR);
        // SAFETY: as in `needs`.
        self.call("combine_input", |t, i, e| unsafe {
            t.combine_input.map(|f| f(i, handle, dtype, &mut region, &mut tensor, e))
        })?;
        Ok((region, tensor))
    }

    /// Starts a combine.
    ///
    /// # Errors
    /// What the part says.
    ///
    /// # Safety
    /// Tensors stay valid until the operation was received, and a stream that is named has passed it.
    pub unsafe fn combine_send(&mut self, combine: &abi::TyCombine) -> Result<()> {
        // SAFETY: as in `needs`, and by this function's contract.
        self.call("combine_send", |t, i, e| unsafe { t.combine_send.map(|f| f(i, combine, e)) })
    }

    /// Ends a combine.
    ///
    /// # Errors
    /// What the part says.
    pub fn combine_recv(&mut self, operation: u64) -> Result<()> {
        // SAFETY: as in `needs`.
        self.call("combine_recv", |t, i, e| unsafe { t.combine_recv.map(|f| f(i, operation, e)) })
    }

    /// Waits until everything it posted is done.
    ///
    /// # Errors
    /// What the part says.
    pub fn flush(&mut self) -> Result<()> {
        // SAFETY: as in `needs`.
        self.call("flush", |t, i, e| unsafe { t.flush.map(|f| f(i, e)) })
    }

    /// Takes back an arena region.
    pub fn release(&mut self, region: u64) {
        if let Some(release) = self.part.table.release {
            // SAFETY: as in `needs`.
            unsafe { release(self.instance, region) }
        }
    }
}

impl OpenKernels {
    /// Memory of the kind it works on.
    ///
    /// # Errors
    /// What the part says.
    pub fn tensor_alloc(&mut self, bytes: u64) -> Result<*mut u8> {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: as in `needs`.
        self.call("tensor_alloc", |t, i, e| unsafe {
            t.tensor_alloc.map(|f| f(i, bytes, &mut pointer, e))
        })?;
        Ok(pointer)
    }

    /// Takes such memory back.
    ///
    /// # Safety
    /// No operation uses it but those that are never received.
    pub unsafe fn tensor_free(&mut self, pointer: *mut u8) {
        if let Some(free) = self.part.table.tensor_free {
            // SAFETY: as in `needs`, and by this function's contract.
            unsafe { free(self.instance, pointer) }
        }
    }

    /// Copies between host memory and memory of the kind it works on.
    ///
    /// # Errors
    /// What the part says.
    ///
    /// # Safety
    /// Both ranges are valid; of operations only those that are never received still use them.
    pub unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: u64) -> Result<()> {
        // SAFETY: as in `needs`, and by this function's contract.
        self.call("copy", |t, i, e| unsafe { t.copy.map(|f| f(i, to, from, bytes, e)) })
    }

    /// A stream for tools.
    ///
    /// # Errors
    /// What the part says.
    pub fn stream_create(&mut self) -> Result<*mut c_void> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: as in `needs`.
        self.call("stream_create", |t, i, e| unsafe {
            t.stream_create.map(|f| f(i, &mut stream, e))
        })?;
        Ok(stream)
    }

    /// Takes such a stream back, after everything in it.
    ///
    /// # Safety
    /// `stream` is of [`stream_create`](Self::stream_create), and no call names it any more.
    pub unsafe fn stream_destroy(&mut self, stream: *mut c_void) {
        if let Some(destroy) = self.part.table.stream_destroy {
            // SAFETY: as in `needs`, and by this function's contract.
            unsafe { destroy(self.instance, stream) }
        }
    }

    /// Queues a copy between two places of the device's memory.
    ///
    /// # Errors
    /// What the part says.
    ///
    /// # Safety
    /// `stream` is one of the device's; it lives, and both ranges stay valid, until it has passed the
    /// copy.
    pub unsafe fn copy_on(
        &mut self,
        stream: *mut c_void,
        to: *mut u8,
        from: *const u8,
        bytes: u64,
    ) -> Result<()> {
        // SAFETY: as in `needs`, and by this function's contract.
        self.call("copy_on", |t, i, e| unsafe {
            t.copy_on.map(|f| f(i, stream, to, from, bytes, e))
        })
    }

    /// What is queued on a tool's stream from now on is recorded.
    ///
    /// # Errors
    /// What the part says.
    ///
    /// # Safety
    /// `stream` is of [`stream_create`](Self::stream_create).
    pub unsafe fn graph_begin(&mut self, stream: *mut c_void) -> Result<()> {
        // SAFETY: as in `needs`, and by this function's contract.
        self.call("graph_begin", |t, i, e| unsafe { t.graph_begin.map(|f| f(i, stream, e)) })
    }

    /// Ends a recording.
    ///
    /// # Errors
    /// What the part says.
    ///
    /// # Safety
    /// As [`graph_begin`](Self::graph_begin).
    pub unsafe fn graph_end(&mut self, stream: *mut c_void) -> Result<*mut c_void> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: as in `needs`, and by this function's contract.
        self.call("graph_end", |t, i, e| unsafe {
            t.graph_end.map(|f| f(i, stream, &mut graph, e))
        })?;
        Ok(graph)
    }

    /// Queues a graph.
    ///
    /// # Errors
    /// What the part says.
    ///
    /// # Safety
    /// `stream` is of [`stream_create`](Self::stream_create), `graph` of [`graph_end`](Self::graph_end),
    /// and what was recorded may run again.
    pub unsafe fn graph_launch(&mut self, stream: *mut c_void, graph: *mut c_void) -> Result<()> {
        // SAFETY: as in `needs`, and by this function's contract.
        self.call("graph_launch", |t, i, e| unsafe {
            t.graph_launch.map(|f| f(i, stream, graph, e))
        })
    }

    /// Takes a graph back, after every launch of it.
    ///
    /// # Safety
    /// `graph` is of [`graph_end`](Self::graph_end), and nobody launches it any more.
    pub unsafe fn graph_destroy(&mut self, graph: *mut c_void) {
        if let Some(destroy) = self.part.table.graph_destroy {
            // SAFETY: as in `needs`, and by this function's contract.
            unsafe { destroy(self.instance, graph) }
        }
    }

    /// The ring of kernels that post through the host on a level; nothing where they do not.
    ///
    /// # Errors
    /// What the part says; a ring that cannot be one.
    pub fn proxy_ring(&mut self, level: u64) -> Result<Option<abi::TyProxyRing>> {
        if self.part.table.proxy_ring.is_none() {
            return Ok(None);
        }
        let mut ring = abi::TyProxyRing {
            size: size_of::<abi::TyProxyRing>(),
            level,
            lane: 0,
            capacity: 0,
            commands: std::ptr::null_mut(),
            status: std::ptr::null_mut(),
            totals: std::ptr::null_mut(),
            signals: 0,
            reserved: 0,
        };
        // SAFETY: as in `needs`.
        self.call("proxy_ring", |t, i, e| unsafe { t.proxy_ring.map(|f| f(i, &mut ring, e)) })?;
        if ring.commands.is_null() {
            return Ok(None);
        }
        let there = !ring.status.is_null() && (ring.signals == 0 || !ring.totals.is_null());
        if there && ring.capacity.is_power_of_two() && ring.level == level {
            return Ok(Some(ring));
        }
        let message = format!(
            "found a ring of {} slots on level {}, status at {:p}, {} totals at {:p}; expected a power \
             of two, level {level}, and nothing at null",
            ring.capacity, ring.level, ring.status, ring.signals, ring.totals
        );
        Err(Error::new(ErrorKind::Plugin, "proxy_ring", message)
            .with_context("part", self.name())
            .with_fix("use a kernel set that was made for this version"))
    }
}

impl OpenKernels {
    /// What it counts for reports; nothing where it does not.
    ///
    /// # Errors
    /// What the part says; counters that cannot be of a world of `ranks`.
    pub fn counters(&mut self, ranks: u32) -> Result<Option<abi::TyCounters>> {
        if self.part.table.counters.is_none() {
            return Ok(None);
        }
        let mut counters = abi::TyCounters {
            size: size_of::<abi::TyCounters>(),
            ranks: 0,
            signals: 0,
            queue_depth: [0; 2],
            peers: std::ptr::null(),
            raised: std::ptr::null(),
        };
        // SAFETY: as in `needs`.
        self.call("counters", |t, i, e| unsafe { t.counters.map(|f| f(i, &mut counters, e)) })?;
        if counters.peers.is_null() {
            return Ok(None);
        }
        check_counters(&counters, ranks)
            .map_err(|error| error.with_context("part", self.name()))?;
        Ok(Some(counters))
    }

    /// When things happened in an operation that has ended.
    ///
    /// # Errors
    /// A part without the slot; what the part says.
    pub fn trace(&mut self, operation: u64) -> Result<Trace> {
        let mut trace = Trace { size: size_of::<Trace>(), ..Trace::default() };
        // SAFETY: as in `needs`.
        self.call("trace", |t, i, e| unsafe { t.trace.map(|f| f(i, operation, &mut trace, e)) })?;
        Ok(trace)
    }
}

/// Whether counters can be read as atomic words of a world of `ranks`.
fn check_counters(counters: &abi::TyCounters, ranks: u32) -> Result<()> {
    let is_aligned = |address: usize| address.is_multiple_of(size_of::<u64>());
    let fits = is_aligned(counters.peers.addr()) && is_aligned(counters.raised.addr());
    let is_there = counters.signals == 0 || !counters.raised.is_null();
    if counters.ranks == ranks && is_there && fits {
        return Ok(());
    }
    let message = format!(
        "found counters of {} ranks at {:p}, {} signals of each at {:p}; expected {ranks} ranks, \
         nothing at null, and addresses that are multiples of 8",
        counters.ranks, counters.peers, counters.signals, counters.raised
    );
    Err(Error::new(ErrorKind::Plugin, "counters", message)
        .with_fix("use a kernel set that was made for this version"))
}

impl Drop for OpenKernels {
    fn drop(&mut self) {
        // SAFETY: the instance is open and nobody can use it after this.
        unsafe { (self.close)(self.instance) }
    }
}

/// An absent tensor.
pub const NO_TENSOR: abi::TyTensor = abi::TyTensor {
    data: std::ptr::null_mut(),
    dtype: 0,
    reserved: 0,
    shape: [0; 2],
    stride: [0; 2],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_that_cannot_be_read_as_atomic_words_are_refused() {
        let at = |address: usize| std::ptr::without_provenance(address);
        let counters = |peers: usize, signals: u32, raised: usize| abi::TyCounters {
            size: size_of::<abi::TyCounters>(),
            ranks: 2,
            signals,
            queue_depth: [0; 2],
            peers: at(peers),
            raised: at(raised).cast(),
        };
        for good in [counters(4096, 3, 8192), counters(4096, 0, 0)] {
            assert!(check_counters(&good, 2).is_ok());
            assert!(check_counters(&good, 3).is_err(), "of another world");
        }
        for bad in [counters(4100, 3, 8192), counters(4096, 3, 8193), counters(4096, 3, 0)] {
            let error = check_counters(&bad, 2).expect_err("not words").to_string();
            assert!(error.contains("addresses that are multiples of 8"), "{error}");
        }
    }
}
