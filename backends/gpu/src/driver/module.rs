//! Compiled kernels.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use tokenyard_core::{Error, ErrorKind, Result};

use super::{Context, RawStream, check, sys};

/// A loaded image of machine code.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: a module may be used from any thread; the driver locks for itself.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads an image that NVRTC made.
    pub(crate) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Self>> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image carries its own length; the driver checks it.
        check("load kernels", unsafe { sys::cuModuleLoadData(&mut raw, image.as_ptr().cast()) })?;
        Ok(Arc::new(Self { context: Arc::clone(context), raw }))
    }

    /// One kernel, loaded now: loading under a kernel that spins can wait for ever.
    pub(crate) fn function(self: &Arc<Self>, name: &str) -> Result<Function> {
        let _entered = self.context.enter()?;
        let text = CString::new(name).map_err(|_| {
            Error::new(ErrorKind::Internal, "find kernel", format!("{name:?} is no name"))
        })?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a module that lives and a text that ends.
        unsafe {
            check("find kernel", sys::cuModuleGetFunction(&mut raw, self.raw, text.as_ptr()))
                .map_err(|e| e.with_context("kernel", name))?;
            check("load kernel", sys::cuFuncLoad(raw))?;
        }
        Ok(Function { module: Arc::clone(self), raw, cooperative: false })
    }

    /// The same for a kernel whose blocks wait for each other: all are resident at once.
    pub(crate) fn cooperative(self: &Arc<Self>, name: &str) -> Result<Function> {
        Ok(Function { cooperative: true, ..self.function(name)? })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: loaded by `load`; whoever launched its kernels has synchronised.
        let _ = unsafe { sys::cuModuleUnload(self.raw) };
    }
}

/// A kernel.
#[derive(Debug)]
pub(crate) struct Function {
    module: Arc<Module>,
    raw: sys::CUfunction,
    cooperative: bool,
}

// SAFETY: as for modules.
unsafe impl Send for Function {}

/// The size of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory; at most what was allowed.
    pub(crate) shared: u32,
}

impl Function {
    /// Allows so much dynamic shared memory.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<()> {
        let _entered = self.module.context.enter()?;
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a kernel that lives.
        check("allow shared memory", unsafe {
            sys::cuFuncSetAttribute(self.raw, which, bytes as i32)
        })
    }

    /// Launches behind everything in the stream.
    ///
    /// # Safety
    /// `arguments` point to one value per parameter of the kernel, of its type. What they name, and the
    /// stream, stay valid until the stream has passed the kernel.
    pub(crate) unsafe fn launch(
        &self,
        stream: RawStream,
        launch: Launch,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let _entered = self.module.context.enter()?;
        let Launch { blocks, threads, shared } = launch;
        let (kernel, stream, arguments) = (self.raw, stream.raw(), arguments.as_mut_ptr());
        let none = std::ptr::null_mut();
        // SAFETY: by this function's contract; the driver refuses sizes that do not fit.
        let status = unsafe {
            if self.cooperative {
                sys::cuLaunchCooperativeKernel(
                    kernel, blocks, 1, 1, threads, 1, 1, shared, stream, arguments,
                )
            } else {
                sys::cuLaunchKernel(
                    kernel, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, none,
                )
            }
        };
        check("launch kernel", status)
            .map_err(|e| e.with_context("blocks", blocks).with_context("shared memory", shared))
    }
}
