//! Memory, streams and graphs of a kernel set's device, for tools, which cannot make them in another
//! way.

use std::ffi::c_void;

use super::OpenKernels;
use crate::{Error, ErrorKind, Result, abi};

impl OpenKernels {
    /// The device table; nothing where the set works on host memory.
    pub(super) fn device(&self) -> Option<&'static abi::TyDeviceTable> {
        // SAFETY: a judged table and what it points to live as long as the process.
        unsafe { self.component.table.device.as_ref() }
    }

    fn call_device(
        &mut self,
        slot: &'static str,
        call: impl FnOnce(&abi::TyDeviceTable, *mut c_void, *mut abi::TyError) -> Option<i32>,
    ) -> Result<()> {
        let Some(table) = self.device() else {
            let message = "it works on host memory, and has no streams and no graphs";
            return Err(Error::new(ErrorKind::Unsupported, slot, message)
                .with_context("component", self.name()));
        };
        self.call(slot, |_, instance, error| call(table, instance, error))
    }

    /// Allocates memory of the kind that the set works on.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn tensor_alloc(&mut self, bytes: u64) -> Result<*mut u8> {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: an open instance of a judged table; the structures are valid for the call.
        self.call_device("tensor_alloc", |t, i, e| unsafe {
            t.tensor_alloc.map(|f| f(i, bytes, &mut pointer, e))
        })?;
        Ok(pointer)
    }

    /// Frees memory of [`tensor_alloc`](Self::tensor_alloc).
    ///
    /// # Safety
    /// No operation uses it, except for operations that are never received.
    pub unsafe fn tensor_free(&mut self, pointer: *mut u8) {
        if let Some(free) = self.device().and_then(|table| table.tensor_free) {
            // SAFETY: as in `tensor_alloc`, and by this function's contract.
            unsafe { free(self.instance, pointer) }
        }
    }

    /// Copies between host memory and memory of the kind that the set works on.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// Both ranges are valid; only operations that are never received still use them.
    pub unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: u64) -> Result<()> {
        // SAFETY: as in `tensor_alloc`, and by this function's contract.
        self.call_device("copy", |t, i, e| unsafe { t.copy.map(|f| f(i, to, from, bytes, e)) })
    }

    /// Creates a stream for tools.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn stream_create(&mut self) -> Result<*mut c_void> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: as in `tensor_alloc`.
        self.call_device("stream_create", |t, i, e| unsafe {
            t.stream_create.map(|f| f(i, &mut stream, e))
        })?;
        Ok(stream)
    }

    /// Destroys a stream, after all work queued on it.
    ///
    /// # Safety
    /// `stream` is of [`stream_create`](Self::stream_create), and no call names it any more.
    pub unsafe fn stream_destroy(&mut self, stream: *mut c_void) {
        if let Some(destroy) = self.device().and_then(|table| table.stream_destroy) {
            // SAFETY: as in `tensor_alloc`, and by this function's contract.
            unsafe { destroy(self.instance, stream) }
        }
    }

    /// Queues a copy between two places of the device's memory.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// `stream` is a stream of the device; it lives, and both ranges stay valid, until it has passed
    /// the copy.
    pub unsafe fn copy_on(
        &mut self,
        stream: *mut c_void,
        to: *mut u8,
        from: *const u8,
        bytes: u64,
    ) -> Result<()> {
        // SAFETY: as in `tensor_alloc`, and by this function's contract.
        self.call_device("copy_on", |t, i, e| unsafe {
            t.copy_on.map(|f| f(i, stream, to, from, bytes, e))
        })
    }

    /// Starts a capture: work queued on a tool's stream from now on is recorded.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// `stream` is of [`stream_create`](Self::stream_create).
    pub unsafe fn graph_begin(&mut self, stream: *mut c_void) -> Result<()> {
        // SAFETY: as in `tensor_alloc`, and by this function's contract.
        self.call_device("graph_begin", |t, i, e| unsafe { t.graph_begin.map(|f| f(i, stream, e)) })
    }

    /// Ends a capture.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As [`graph_begin`](Self::graph_begin).
    pub unsafe fn graph_end(&mut self, stream: *mut c_void) -> Result<*mut c_void> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: as in `tensor_alloc`, and by this function's contract.
        self.call_device("graph_end", |t, i, e| unsafe {
            t.graph_end.map(|f| f(i, stream, &mut graph, e))
        })?;
        Ok(graph)
    }

    /// Launches a graph.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// `stream` is of [`stream_create`](Self::stream_create), `graph` of [`graph_end`](Self::graph_end),
    /// and the recorded work may run again.
    pub unsafe fn graph_launch(&mut self, stream: *mut c_void, graph: *mut c_void) -> Result<()> {
        // SAFETY: as in `tensor_alloc`, and by this function's contract.
        self.call_device("graph_launch", |t, i, e| unsafe {
            t.graph_launch.map(|f| f(i, stream, graph, e))
        })
    }

    /// Destroys a graph, after every launch of it.
    ///
    /// # Safety
    /// `graph` is of [`graph_end`](Self::graph_end), and no call launches it any more.
    pub unsafe fn graph_destroy(&mut self, graph: *mut c_void) {
        if let Some(destroy) = self.device().and_then(|table| table.graph_destroy) {
            // SAFETY: as in `tensor_alloc`, and by this function's contract.
            unsafe { destroy(self.instance, graph) }
        }
    }
}
