//! Tensors of a test on a communicator's device. A test states all tensors in host memory. Where the
//! communicator works on a device, this module copies them there, and copies outputs back.

use std::sync::OnceLock;

use anyhow::Result;
use tokenyard_core::communicator::{Buffer, Communicator, Dispatch, Handle, Replay, TensorRef};
use tokenyard_core::moe::DType;
use tokenyard_core::{Error, ErrorKind};

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
