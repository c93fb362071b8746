//! Compiled kernels.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use tokenyard_core::{Error, ErrorKind, Result};

use super::times::{CallKind, timed};
use super::{Context, Launch, RawFunction, RawModule, RawStream};

/// A loaded image of machine code.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    raw: RawModule,
}

impl Module {
    /// Loads an image that the platform's compiler has made.
    pub(crate) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Self>> {
        let _entered = context.enter()?;
        // SAFETY: an image of the compiler, out of the cache of this user.
        let raw = unsafe { context.driver().module_load(image)? };
        Ok(Arc::new(Self { context: Arc::clone(context), raw }))
    }

    /// One kernel, loaded now: a load during a kernel that spins can wait for ever.
    pub(crate) fn function(self: &Arc<Self>, name: &str) -> Result<Function> {
        let _entered = self.context.enter()?;
        let text = CString::new(name).map_err(|_| {
            Error::new(ErrorKind::Internal, "find kernel", format!("{name:?} is no name"))
        })?;
        // SAFETY: a module that lives.
        let found = unsafe { self.context.driver().module_function(self.raw, &text) };
        let raw = found.map_err(|e| e.with_context("kernel", name))?;
        Ok(Function { module: Arc::clone(self), raw })
    }

    /// One kernel whose blocks wait for each other: all blocks are resident at once.
    pub(crate) fn cooperative(self: &Arc<Self>, name: &str) -> Result<Function> {
        let mut function = self.function(name)?;
        function.raw.cooperative = true;
        Ok(function)
    }

    /// One kernel that waits for the kernel ahead of it by itself, so that it may start before that has ended.
    /// Only where [`DeviceFacts::starts_early`](super::DeviceFacts::starts_early).
    pub(crate) fn early(self: &Arc<Self>, name: &str) -> Result<Function> {
        let mut function = self.function(name)?;
        function.raw.early = true;
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: loaded by `load`; each caller that launched its kernels has synchronised.
        unsafe { self.context.driver().module_unload(self.raw) };
    }
}

/// A kernel.
#[derive(Debug)]
pub(crate) struct Function {
    module: Arc<Module>,
    raw: RawFunction,
}

impl Function {
    /// Allows this much dynamic shared memory.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<()> {
        let _entered = self.module.context.enter()?;
        // SAFETY: a kernel that lives.
        unsafe { self.module.context.driver().function_allow_shared(self.raw, bytes) }
    }

    /// Launches the kernel behind everything in the stream.
    ///
    /// # Safety
    /// `arguments` point to one value per parameter of the kernel, of its type. The objects that they
    /// name, and the stream, stay valid until the stream has passed the kernel.
    pub(crate) unsafe fn launch(
        &self,
        stream: RawStream,
        launch: Launch,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let context = &self.module.context;
        timed(CallKind::Launch, || {
            let _entered = context.enter()?;
            // SAFETY: by this function's contract.
            unsafe { context.driver().function_launch(self.raw, launch, stream, arguments) }
        })
    }
}
