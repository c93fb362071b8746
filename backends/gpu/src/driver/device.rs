//! Devices and their contexts.

use std::sync::Arc;

use tokenyard_core::{Error, ErrorKind, Result};

use super::{check, load, sys};

/// A device of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) ordinal: i32,
    raw: sys::CUdevice,
}

impl Device {
    /// The device that this rank drives: what the config says, else the device of the calling
    /// thread's current context (the framework's choice), else the rank's index on its machine as
    /// the launcher says it.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] with the fix, if there is no such device.
    pub(crate) fn choose(configured: Option<u32>) -> Result<Self> {
        load()?;
        let count = Self::count()?;
        let current = || {
            let (mut context, mut raw) = (std::ptr::null_mut(), 0);
            // SAFETY: the driver is loaded; both are ours.
            let status = unsafe { sys::cuCtxGetCurrent(&mut context) };
            if status != sys::CUresult::CUDA_SUCCESS || context.is_null() {
                return None;
            }
            // SAFETY: as above, and a context is current.
            let status = unsafe { sys::cuCtxGetDevice(&mut raw) };
            (status == sys::CUresult::CUDA_SUCCESS).then_some(raw)
        };
        let ordinal = match configured {
            Some(ordinal) => i32::try_from(ordinal).unwrap_or(i32::MAX),
            None => match current() {
                Some(raw) => {
                    return Self::all(count)?.into_iter().find(|d| d.raw == raw).ok_or_else(none);
                }
                None => ordinal_of(launched_as(), count),
            },
        };
        if ordinal >= count {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "choose device",
                format!("found {count} CUDA devices; expected one with ordinal {ordinal}"),
            )
            .with_fix("correct `device`, start one rank per GPU, or see CUDA_VISIBLE_DEVICES"));
        }
        Self::get(ordinal)
    }

    /// Devices that this process sees; at least one.
    pub(crate) fn count() -> Result<i32> {
        let mut count = 0;
        // SAFETY: the driver is loaded.
        check("count devices", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        if count == 0 { Err(none()) } else { Ok(count) }
    }

    fn all(count: i32) -> Result<Vec<Self>> {
        (0..count).map(Self::get).collect()
    }

    fn get(ordinal: i32) -> Result<Self> {
        let mut raw = 0;
        // SAFETY: the driver is loaded.
        check("open device", unsafe { sys::cuDeviceGet(&mut raw, ordinal) })?;
        Ok(Self { ordinal, raw })
    }

    /// One of the device's numbers.
    pub(crate) fn attribute(&self, which: sys::CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: a device of this driver.
        let status = unsafe { sys::cuDeviceGetAttribute(&mut value, which, self.raw) };
        check("ask device", status)?;
        Ok(value)
    }

    /// Compute capability, as major * 10 + minor.
    pub(crate) fn capability(&self) -> Result<u32> {
        use sys::CUdevice_attribute as A;
        let major = self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok((major * 10 + minor) as u32)
    }

    /// Most bytes of shared memory that a block may ask for.
    pub(crate) fn most_shared(&self) -> Result<u32> {
        use sys::CUdevice_attribute as A;
        let bytes = self.attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        Ok(bytes as u32)
    }

    /// As its maker calls it.
    pub(crate) fn name(&self) -> Result<String> {
        let mut text = [0 as std::ffi::c_char; 256];
        // SAFETY: a device of this driver; room of this length, which the driver ends with a zero.
        let status =
            unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as i32, self.raw) };
        check("ask device", status)?;
        let bytes: Vec<u8> = text.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Multiprocessors.
    pub(crate) fn processors(&self) -> Result<u32> {
        use sys::CUdevice_attribute as A;
        Ok(self.attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32)
    }

    /// Names the device wherever it is seen from.
    pub(crate) fn uuid(&self) -> Result<Uuid> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: a device of this driver; the structure is ours.
        check("ask device", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, self.raw) })?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// The visible device of this name.
    pub(crate) fn with_uuid(uuid: Uuid) -> Result<Option<Self>> {
        for device in Self::all(Self::count()?)? {
            if device.uuid()? == uuid {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// Every visible device but this one.
    pub(crate) fn others(&self) -> Result<Vec<Self>> {
        Ok(Self::all(Self::count()?)?.into_iter().filter(|other| other != self).collect())
    }

    /// What this device can do to the memory of another.
    pub(crate) fn reach(&self, other: Self) -> Result<Reach> {
        use sys::CUdevice_P2PAttribute as A;
        let ask = |which| {
            let mut value = 0;
            // SAFETY: two devices of this driver.
            let status =
                unsafe { sys::cuDeviceGetP2PAttribute(&mut value, which, self.raw, other.raw) };
            check("ask for peer access", status).map(|()| value != 0)
        };
        Ok(match ask(A::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? {
            false => Reach::Nothing,
            true if ask(A::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? => Reach::Whole,
            true => Reach::WithoutAtomics,
        })
    }
}

/// A device's name, the same in every process.
pub(crate) type Uuid = [u8; 16];

/// What one device can do to the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Nothing.
    Nothing,
    /// Loads and stores. Signals are added to by many blocks at once, which needs atomics.
    WithoutAtomics,
    /// Loads, stores and atomics.
    Whole,
}

fn none() -> Error {
    Error::new(ErrorKind::Unavailable, "choose device", "found no CUDA device; expected one")
        .with_fix("see what nvidia-smi says, and CUDA_VISIBLE_DEVICES")
}

/// The device of the rank with this index on its machine, which may not be there. Launchers that
/// show each rank one device show it as the first.
fn ordinal_of(index: u32, count: i32) -> i32 {
    if count == 1 { 0 } else { i32::try_from(index).unwrap_or(i32::MAX) }
}

/// The rank's index on its machine, as launchers say it; 0 where nobody does.
fn launched_as() -> u32 {
    ["TOKENYARD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"]
        .iter()
        .find_map(|name| std::env::var(name).ok()?.parse().ok())
        .unwrap_or(0)
}

/// A device's primary context, which frameworks share. Retained while this lives.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: Device,
    raw: sys::CUcontext,
}

// SAFETY: a context may be made current on any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn retain(device: Device) -> Result<Arc<Self>> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a device of this driver; released on drop.
        check("retain context", unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device.raw) })?;
        Ok(Arc::new(Self { device, raw }))
    }

    /// Makes it current on this thread until the result is dropped.
    pub(crate) fn enter(&self) -> Result<Entered> {
        // SAFETY: a context that lives; popped on drop, in reverse order.
        check("enter context", unsafe { sys::cuCtxPushCurrent_v2(self.raw) })?;
        Ok(Entered { _not_send: std::marker::PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.raw) };
    }
}

/// A context that is current on this thread.
#[derive(Debug)]
#[must_use = "the context is current only while this lives"]
pub(crate) struct Entered {
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut raw = std::ptr::null_mut();
        // SAFETY: pushed by `enter` on this thread.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_do_not_share_devices_where_there_are_too_few() {
        assert_eq!([0, 3, 4].map(|index| ordinal_of(index, 4)), [0, 3, 4]);
        assert_eq!(ordinal_of(5, 1), 0);
        assert_eq!(ordinal_of(u32::MAX, 8), i32::MAX);
    }
}
