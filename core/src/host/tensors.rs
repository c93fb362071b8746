//! Memory for the tensors of a tool: that of the host, or of the device that an operation works on.

use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt;

use super::{OpenKernels, Registry};
use crate::Result;
use crate::bootstrap::World;
use crate::communicator::{CallerMemory, Stream, TensorMut, TensorRef};
use crate::config::Config;
use crate::kernels::{KernelShape, kernel_shape};
use crate::moe::{DType, Shape};

/// The kernel set of a config, open for the least exchange of a world. It holds this rank's device until it
/// is dropped.
///
/// # Errors
/// Errors of the kernel set.
pub fn open_kernels(config: &Config, world: &World) -> Result<OpenKernels> {
    let ranks = world.ranks();
    let any = Shape { ranks, experts: ranks, topk: 1, hidden: 1, max_tokens: 1 };
    let shape = KernelShape { rank: world.rank(), ..kernel_shape(&any, 1, 1, 1) };
    let kernels = Registry::for_config(config)?.choose_kernels(&config.kernels)?;
    kernels.open(&config.kernels.table, &shape)
}

/// See the [module](self).
pub enum TensorMemory {
    /// Memory of the host.
    Host,
    /// Memory of a device, through a kernel set of its own.
    Device {
        /// The set, whose calls are for one thread.
        kernels: Box<RefCell<OpenKernels>>,
        /// The device.
        ordinal: i32,
    },
}

impl fmt::Debug for TensorMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("Host"),
            Self::Device { ordinal, .. } => write!(f, "Device({ordinal})"),
        }
    }
}

/// Tensors of bytes, freed with `self`.
#[derive(Debug)]
pub struct Tensors<'m> {
    memory: &'m TensorMemory,
    /// In host memory the tensors themselves; for a device what they hold at first.
    bytes: Vec<Vec<u8>>,
    /// On a device, one for each.
    there: Vec<*mut u8>,
}

/// A stream of the device, destroyed with `self`, once it has passed all work.
#[derive(Debug)]
pub struct TensorStream<'m> {
    kernels: &'m RefCell<OpenKernels>,
    raw: *mut c_void,
}

impl TensorMemory {
    /// `device`: the one that the operation works on; none for host memory.
    ///
    /// # Errors
    /// Errors of the kernel set.
    pub fn open(config: &Config, world: &World, device: Option<i32>) -> Result<Self> {
        let Some(ordinal) = device else { return Ok(Self::Host) };
        let kernels = Box::new(RefCell::new(open_kernels(config, world)?));
        Ok(Self::Device { kernels, ordinal })
    }

    /// A new stream of the device; none for host memory.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn stream(&self) -> Result<Option<TensorStream<'_>>> {
        let Self::Device { kernels, .. } = self else { return Ok(None) };
        let raw = kernels.borrow_mut().stream_create()?;
        Ok(Some(TensorStream { kernels, raw }))
    }

    /// A tensor of the device with these bytes; none for host memory, where slices are tensors.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn on_device(&self, bytes: Vec<u8>) -> Result<Option<Tensors<'_>>> {
        match self {
            Self::Host => Ok(None),
            Self::Device { .. } => self.tensors(vec![bytes]).map(Some),
        }
    }

    /// Tensors with these bytes.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn tensors(&self, bytes: Vec<Vec<u8>>) -> Result<Tensors<'_>> {
        let mut tensors = Tensors { memory: self, bytes, there: Vec::new() };
        let Self::Device { kernels, .. } = self else { return Ok(tensors) };
        let mut kernels = kernels.borrow_mut();
        for one in &tensors.bytes {
            let pointer = kernels.tensor_alloc(one.len() as u64)?;
            tensors.there.push(pointer);
            // SAFETY: memory of this length that was just allocated.
            unsafe { kernels.copy(pointer, one.as_ptr(), one.len() as u64)? };
        }
        drop(kernels);
        Ok(tensors)
    }
}

impl Tensors<'_> {
    /// The tensors, for a call.
    ///
    /// # Errors
    /// None; the memory is valid.
    pub fn refs(&self) -> Result<Vec<TensorRef<'_>>> {
        match self.memory {
            TensorMemory::Host => {
                self.bytes.iter().map(|one| TensorRef::from_slice(one, 1, one.len())).collect()
            }
            TensorMemory::Device { ordinal, .. } => {
                // SAFETY: memory of this length that lives as long as `self`.
                let tensor = |memory| unsafe { TensorRef::from_memory(&memory) };
                self.all_there(*ordinal).map(tensor).collect()
            }
        }
    }

    /// As [`refs`](Self::refs), to be written.
    ///
    /// # Errors
    /// None; the memory is valid.
    pub fn muts(&mut self) -> Result<Vec<TensorMut<'_>>> {
        match self.memory {
            TensorMemory::Host => {
                let bytes = self.bytes.iter_mut().map(|one| (one.len(), one));
                bytes.map(|(length, one)| TensorMut::from_slice(one, 1, length)).collect()
            }
            TensorMemory::Device { ordinal, .. } => {
                // SAFETY: as above, borrowed exclusively.
                let tensor = |memory| unsafe { TensorMut::from_memory(&memory) };
                self.all_there(*ordinal).map(tensor).collect()
            }
        }
    }

    /// The tensor of a device, as elements of a type.
    ///
    /// # Errors
    /// None; the memory is valid.
    pub fn typed(&self, dtype: DType) -> Result<Option<TensorRef<'_>>> {
        let TensorMemory::Device { ordinal, .. } = self.memory else { return Ok(None) };
        let Some(bytes) = self.all_there(*ordinal).next() else { return Ok(None) };
        let elements = bytes.shape[1] / dtype.bytes();
        let shape = [1, elements];
        let memory = CallerMemory { dtype, shape, stride: [elements, 1], ..bytes };
        // SAFETY: memory of this length that lives as long as `self`.
        unsafe { TensorRef::from_memory(&memory).map(Some) }
    }

    fn all_there(&self, ordinal: i32) -> impl Iterator<Item = CallerMemory> {
        self.bytes.iter().zip(&self.there).map(move |(one, pointer)| CallerMemory {
            data: *pointer,
            dtype: DType::U8,
            shape: [1, one.len()],
            stride: [one.len(), 1],
            device: Some(ordinal),
        })
    }

    /// The present bytes of the tensors.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn into_bytes(mut self) -> Result<Vec<Vec<u8>>> {
        let mut bytes = std::mem::take(&mut self.bytes);
        if let TensorMemory::Device { kernels, .. } = self.memory {
            for (one, pointer) in bytes.iter_mut().zip(&self.there) {
                // SAFETY: memory of this length; the calls that use it have ended.
                unsafe {
                    kernels.borrow_mut().copy(one.as_mut_ptr(), *pointer, one.len() as u64)?;
                }
            }
        }
        Ok(bytes)
    }
}

impl Drop for Tensors<'_> {
    fn drop(&mut self) {
        if let TensorMemory::Device { kernels, .. } = self.memory {
            for pointer in &self.there {
                // SAFETY: allocated by `tensors`; the calls that use it have ended.
                unsafe { kernels.borrow_mut().tensor_free(*pointer) };
            }
        }
    }
}

impl TensorStream<'_> {
    /// The stream, for calls that end before `self`.
    pub fn name(&self) -> Stream {
        // SAFETY: a stream of the device. Calls of a case end before it, and tensors live longer than their calls.
        unsafe { Stream::new(self.raw) }
    }

    /// Queues copies of tensors over others of the same lengths.
    ///
    /// # Errors
    /// Errors of the device.
    ///
    /// # Safety
    /// Both live until the stream has passed the copies.
    pub unsafe fn copy(&self, to: &Tensors<'_>, from: &Tensors<'_>) -> Result<()> {
        for ((to, from), one) in to.there.iter().zip(&from.there).zip(&from.bytes) {
            // SAFETY: memory of this length; the rest by this function's contract.
            unsafe {
                let mut kernels = self.kernels.borrow_mut();
                kernels.copy_on(self.raw, *to, *from, one.len() as u64)?;
            }
        }
        Ok(())
    }
}

impl Drop for TensorStream<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `stream`; no call uses it any more.
        unsafe { self.kernels.borrow_mut().stream_destroy(self.raw) };
    }
}
