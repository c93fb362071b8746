//! Tensors of a test on a communicator's device. A test states all tensors in host memory. Where the
//! communicator works on a device, this module copies them there, and copies outputs back. Windows of the
//! rig that lie on a device are copied in and out, too.

use std::cell::RefCell;
use std::sync::OnceLock;

use anyhow::Result;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Buffer, Communicator, Dispatch, Handle, Replay, TensorRef};
use tokenyard_core::config::Config;
use tokenyard_core::host::OpenKernels;
use tokenyard_core::host::tensors::open_kernels;
use tokenyard_core::moe::DType;
use tokenyard_core::transport::{MemoryNeeds, Window};
use tokenyard_core::{Error, ErrorKind};

/// Memory of a kernel set's device, for windows.
#[derive(Debug)]
pub(crate) struct DeviceMemory(RefCell<OpenKernels>);

impl DeviceMemory {
    /// On the device that this rank's kernel set works on.
    ///
    /// # Errors
    /// Errors of the kernel set.
    pub(crate) fn open(config: &Config, world: &World) -> Result<Self> {
        Ok(Self(RefCell::new(open_kernels(config, world)?)))
    }

    /// Allocates a window; it is freed with `self`.
    ///
    /// # Errors
    /// Errors of the kernel set.
    pub(crate) fn allocate(&self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        Ok(self.0.borrow_mut().allocate(id, bytes, needs)?)
    }

    /// Copies between host memory and a window, and waits for the end of the copy.
    ///
    /// # Safety
    /// Both ranges are valid.
    ///
    /// # Panics
    /// If the driver refuses the copy. The panic fails the test that runs.
    pub(crate) unsafe fn copy(&self, to: *mut u8, from: *const u8, bytes: usize) {
        // SAFETY: by this function's contract.
        let copied = unsafe { self.0.borrow_mut().copy(to, from, bytes as u64) };
        assert!(copied.is_ok(), "copy window memory: {copied:?}");
    }
}

/// A copy of a tensor on the device.
#[derive(Debug)]
pub struct Copied {
    buffer: Buffer,
    dtype: DType,
    shape: [usize; 2],
    stride: [usize; 2],
}

impl Copied {
    fn new(
        make: &dyn Fn(&[u8]) -> tokenyard_core::Result<Buffer>,
        tensor: &TensorRef<'_>,
    ) -> Result<Self> {
        let dtype = tensor.dtype().ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, "copy tensor", "its type is unknown")
        })?;
        Ok(Self {
            buffer: make(tensor.memory())?,
            dtype,
            shape: [tensor.rows(), tensor.cols()],
            stride: tensor.strides(),
        })
    }

    /// Copies to the device of the handle's communicator.
    ///
    /// # Errors
    /// The device refuses the memory or the copy.
    pub fn beside(handle: &Handle, tensor: &TensorRef<'_>) -> Result<Self> {
        Self::new(&|bytes| handle.buffer(bytes), tensor)
    }

    /// The copy.
    ///
    /// # Errors
    /// None; the tensor was valid.
    pub fn tensor(&self) -> Result<TensorRef<'_>> {
        Ok(self.buffer.tensor(self.dtype, self.shape, self.stride)?)
    }

    /// The copy of a contiguous tensor, writable.
    ///
    /// # Errors
    /// None; the tensor was valid.
    pub fn tensor_mut(&mut self) -> Result<tokenyard_core::communicator::TensorMut<'_>> {
        Ok(self.buffer.tensor_mut(self.dtype, self.shape)?)
    }
}

/// Copies of the inputs of a dispatch or a replay; made when a communicator on a device first needs them.
#[derive(Debug, Default)]
pub struct Copies(OnceLock<[Option<Copied>; 4]>);

impl Clone for Copies {
    /// A clone starts without copies.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Copies {
    /// `dispatch` with its tensors where `comm` works.
    ///
    /// # Errors
    /// The device refuses the memory or the copy.
    pub fn dispatch<'a>(
        &'a self,
        comm: &Communicator,
        dispatch: Dispatch<'a>,
    ) -> Result<Dispatch<'a>> {
        if !comm.works_on_device() {
            return Ok(dispatch);
        }
        let tensors =
            [Some(dispatch.x), Some(dispatch.topk_idx), dispatch.scales, dispatch.topk_weights];
        let [x, topk_idx, scales, topk_weights] = self.there(comm, tensors)?;
        Ok(Dispatch {
            x: x.unwrap_or(dispatch.x),
            topk_idx: topk_idx.unwrap_or(dispatch.topk_idx),
            scales,
            topk_weights,
            ..dispatch
        })
    }

    /// `replay` with its tensors where `comm` works.
    ///
    /// # Errors
    /// The device refuses the memory or the copy.
    pub fn replay<'a>(&'a self, comm: &Communicator, replay: Replay<'a>) -> Result<Replay<'a>> {
        if !comm.works_on_device() {
            return Ok(replay);
        }
        let tensors = [Some(replay.x), None, replay.scales, replay.topk_weights];
        let [x, _, scales, topk_weights] = self.there(comm, tensors)?;
        Ok(Replay { x: x.unwrap_or(replay.x), scales, topk_weights, ..replay })
    }

    fn there<'a>(
        &'a self,
        comm: &Communicator,
        tensors: [Option<TensorRef<'a>>; 4],
    ) -> Result<[Option<TensorRef<'a>>; 4]> {
        let copies = match self.0.get() {
            Some(copies) => copies,
            None => {
                let mut copies = [None, None, None, None];
                for (copy, tensor) in copies.iter_mut().zip(&tensors) {
                    let make = |bytes: &[u8]| comm.buffer(bytes);
                    *copy = tensor.as_ref().map(|t| Copied::new(&make, t)).transpose()?;
                }
                self.0.get_or_init(|| copies)
            }
        };
        let mut out = [None; 4];
        for (out, (copy, tensor)) in out.iter_mut().zip(copies.iter().zip(tensors)) {
            *out = match (tensor, copy) {
                (Some(_), Some(copy)) => Some(copy.tensor()?),
                (tensor, _) => tensor,
            };
        }
        Ok(out)
    }
}
