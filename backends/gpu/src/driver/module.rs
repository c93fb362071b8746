//! Compiled kernels.

use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

use tokenyard_core::{Error, ErrorKind, Result};

use super::times::{CallKind, timed};
use super::{Context, DeviceFacts, Launch, RawFunction, RawModule, RawStream, copy};

/// The constant in which the kernels state the size of their warps: see `arch.cuh`.
const WAVE: &CStr = c"ty_wave";

/// Whether kernels can run on a device at all: barriers, masks and tables count threads in warps.
fn check_wave(device: &DeviceFacts, kernels: u32) -> Result<()> {
    if device.wave == kernels {
        return Ok(());
    }
    let name = device.architecture.name();
    let message = format!(
        "found {name} with {} threads in a warp, and kernels that were compiled for {kernels}; expected the same",
        device.wave
    );
    Err(Error::new(ErrorKind::Unsupported, "load kernels", message).with_fix(
        "use a GPU with warps of that size: NVIDIA's have 32 threads, and AMD's gfx942 and gfx950 have 64",
    ))
}

/// A loaded image of machine code.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    raw: RawModule,
}

impl Module {
    /// Loads an image that the platform's compiler has made.
    ///
    /// # Errors
    /// The error of the driver; `Unsupported` for an image that was compiled for warps of another size than the
    /// device has.
    pub(crate) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Self>> {
        let _entered = context.enter()?;
        // SAFETY: an image of the compiler, out of the cache of this user.
        let raw = unsafe { context.driver().module_load(image)? };
        let this = Arc::new(Self { context: Arc::clone(context), raw });
        check_wave(&context.device.facts()?, this.wave()?)?;
        Ok(this)
    }

    /// Threads of a warp for which the kernels were compiled.
    fn wave(&self) -> Result<u32> {
        // SAFETY: a module that lives.
        let at = unsafe { self.context.driver().module_word(self.raw, WAVE) };
        let at = at.map_err(|e| e.with_context("constant", WAVE.to_string_lossy()))?;
        let mut wave = 0_u32;
        copy(&self.context, &raw mut wave as u64, at, size_of::<u32>() as u64)?;
        Ok(wave)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::Architecture;

    const MI300X: DeviceFacts = DeviceFacts {
        architecture: Architecture::Gfx(0x942),
        wave: 64,
        processors: 304,
        most_shared: 65_536,
        shares_by: None,
        starts_early: false,
    };

    #[test]
    fn kernels_for_warps_of_another_size_than_the_device_has_are_refused_and_both_sizes_are_named()
    {
        assert!(check_wave(&MI300X, 64).is_ok());
        let of_32 = DeviceFacts { wave: 32, ..MI300X };
        for (device, kernels) in [(MI300X, 32), (of_32, 64), (MI300X, 0)] {
            let error = check_wave(&device, kernels).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            let [found, compiled] = [device.wave, kernels];
            assert!(text.contains(&format!("gfx942 with {found} threads")), "{text}");
            assert!(text.contains(&format!("compiled for {compiled};")), "{text}");
        }
    }
}
