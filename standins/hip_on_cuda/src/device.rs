//! Devices, and the context that belongs to a thread's device.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;
use sys::CUdevice_attribute as A;
use tokenyard_sys_hip::{DeviceProp, Uuid, consts};

use crate::knobs;
use crate::status::{Answer, Failed, INSUFFICIENT_DRIVER, INVALID_VALUE, NOT_INITIALIZED, of_cuda};

/// The most bytes of shared memory that a block of gfx942 has.
pub(crate) const SHARED: c_int = 65_536;
const ARCHITECTURE: &[u8] = b"gfx942:sramecc+:xnack-\0";
/// The beginning of every device's name.
const NAME: &[u8] = b"stand-in for HIP on ";

static READY: OnceLock<Result<(), Failed>> = OnceLock::new();

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

/// `hipInit`.
pub(crate) fn init() -> Answer {
    *READY.get_or_init(|| {
        // SAFETY: opening the driver's library runs its constructors only.
        if !unsafe { sys::is_culib_present() } {
            return Err(INSUFFICIENT_DRIVER);
        }
        // SAFETY: the library is loaded.
        of_cuda(unsafe { sys::cuInit(0) })
    })
}

/// Whether NVIDIA's driver may be called.
pub(crate) fn ready() -> Answer {
    if READY.get() == Some(&Ok(())) { Ok(()) } else { Err(NOT_INITIALIZED) }
}

/// The device of this thread.
pub(crate) fn present() -> c_int {
    DEVICE.get()
}

/// `hipSetDevice`.
pub(crate) fn select(device: c_int) -> Answer {
    enter(device)?;
    DEVICE.set(device);
    Ok(())
}

/// Makes the context of this thread's device current. HIP does so in every call that needs one.
pub(crate) fn enter_present() -> Answer {
    enter(present())
}

fn enter(device: c_int) -> Answer {
    ready()?;
    let context = primary(device)?;
    // SAFETY: a context that is never released.
    of_cuda(unsafe { sys::cuCtxSetCurrent(context.0) })
}

/// A device's primary context.
#[derive(Clone, Copy)]
struct Context(sys::CUcontext);
// SAFETY: a name; the driver takes it on any thread.
unsafe impl Send for Context {}

/// Retained once for each device.
fn primary(device: c_int) -> Result<Context, Failed> {
    static RETAINED: Mutex<Vec<(c_int, Context)>> = Mutex::new(Vec::new());
    let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, context)) = retained.iter().find(|(of, _)| *of == device) {
        return Ok(*context);
    }
    let mut raw = std::ptr::null_mut();
    // SAFETY: the driver is ready, and refuses devices that are not there.
    of_cuda(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) })?;
    retained.push((device, Context(raw)));
    Ok(Context(raw))
}

/// # Safety
/// `value` is valid.
pub(crate) unsafe fn attribute(value: *mut c_int, which: c_uint, device: c_int) -> Answer {
    let cuda = match which {
        // SAFETY: by this function's contract.
        consts::ATTRIBUTE_SHARED_PER_BLOCK => return unsafe { set(value, SHARED) },
        consts::ATTRIBUTE_PROCESSORS => A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        consts::ATTRIBUTE_WAVE => match knobs::wave() {
            // SAFETY: as above.
            Some(wave) => return unsafe { set(value, wave) },
            None => A::CU_DEVICE_ATTRIBUTE_WARP_SIZE,
        },
        consts::ATTRIBUTE_VMM => A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        _ => return Err(INVALID_VALUE),
    };
    // SAFETY: as above.
    of_cuda(unsafe { sys::cuDeviceGetAttribute(value, cuda, device) })
}

/// # Safety
/// `at` is valid.
unsafe fn set<T>(at: *mut T, value: T) -> Answer {
    // SAFETY: by this function's contract.
    unsafe { at.write(value) };
    Ok(())
}

/// # Safety
/// `properties` is valid.
pub(crate) unsafe fn properties(properties: *mut DeviceProp, device: c_int) -> Answer {
    let mut found = 0;
    // SAFETY: the number is ours.
    of_cuda(unsafe { sys::cuDeviceGet(&mut found, device) })?;
    // SAFETY: by this function's contract; the name lies in the structure.
    unsafe {
        properties.write(DeviceProp::zeroed());
        let name = properties.cast::<u8>().add(DeviceProp::ARCHITECTURE_AT);
        name.copy_from_nonoverlapping(ARCHITECTURE.as_ptr(), ARCHITECTURE.len());
    }
    Ok(())
}

/// # Safety
/// `name` is valid for `bytes`.
pub(crate) unsafe fn name(name: *mut c_char, bytes: c_int, device: c_int) -> Answer {
    let room = bytes - NAME.len() as c_int;
    if room < 1 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: by this function's contract; the driver ends the rest with a zero.
    unsafe {
        name.cast::<u8>().copy_from_nonoverlapping(NAME.as_ptr(), NAME.len());
        of_cuda(sys::cuDeviceGetName(name.add(NAME.len()), room, device))
    }
}

/// # Safety
/// `uuid` is valid.
pub(crate) unsafe fn uuid(uuid: *mut Uuid, device: c_int) -> Answer {
    // SAFETY: by this function's contract; both are 16 bytes.
    of_cuda(unsafe { sys::cuDeviceGetUuid_v2(uuid.cast(), device) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_shared_memory_of_gfx942_and_unknown_attributes_are_refused() {
        let mut value = 0;
        // SAFETY: the number is ours; neither call reaches the driver.
        let [shared, unknown] = [consts::ATTRIBUTE_SHARED_PER_BLOCK, 10_000]
            .map(|which| unsafe { attribute(&mut value, which, 0) });
        assert_eq!((shared, unknown, value), (Ok(()), Err(INVALID_VALUE), 65_536));
    }

    #[test]
    fn nothing_is_done_before_the_driver_is_ready() {
        if READY.get().is_none() {
            assert_eq!(select(0), Err(NOT_INITIALIZED));
            assert_eq!(enter_present(), Err(NOT_INITIALIZED));
        }
        assert_eq!(present(), 0);
    }
}
