//! Questions about devices.

use cudarc::driver::sys;
use sys::CUdevice_attribute as A;
use tokenyard_core::Result;
use tokenyard_gpu::compile::Architecture;
use tokenyard_gpu::driver::{DeviceFacts, DriverDevices, RawDevice, Reach, Uuid};

use super::{CudaDriver, check};

/// One numeric attribute of a device.
pub(super) fn attribute(device: RawDevice, which: A) -> Result<i32> {
    let mut value = 0;
    // SAFETY: a device of this driver.
    let status = unsafe { sys::cuDeviceGetAttribute(&mut value, which, device.0) };
    check("ask device", status)?;
    Ok(value)
}

impl DriverDevices for CudaDriver {
    fn device_count(&self) -> Result<i32> {
        let mut count = 0;
        // SAFETY: the driver is loaded.
        check("count devices", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        Ok(count)
    }

    fn device(&self, ordinal: i32) -> Result<RawDevice> {
        let mut raw = 0;
        // SAFETY: the driver is loaded.
        check("open device", unsafe { sys::cuDeviceGet(&mut raw, ordinal) })?;
        Ok(RawDevice(raw))
    }

    fn current_device(&self) -> Option<RawDevice> {
        let (mut context, mut raw) = (std::ptr::null_mut(), 0);
        // SAFETY: the driver is loaded; both variables are ours.
        let status = unsafe { sys::cuCtxGetCurrent(&mut context) };
        if status != sys::CUresult::CUDA_SUCCESS || context.is_null() {
            return None;
        }
        // SAFETY: as above, and a context is current.
        let status = unsafe { sys::cuCtxGetDevice(&mut raw) };
        (status == sys::CUresult::CUDA_SUCCESS).then_some(RawDevice(raw))
    }

    fn facts(&self, device: RawDevice) -> Result<DeviceFacts> {
        let ask = |which| attribute(device, which);
        let major = ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let vmm = ask(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?;
        let fds = ask(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?;
        Ok(DeviceFacts {
            architecture: Architecture::Sm((major * 10 + minor) as u32),
            wave: 32,
            processors: ask(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            most_shared: ask(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
            shares_by: (vmm != 0 && fds != 0).then_some("VMM"),
            // Kernels of compute capability 9.0 have the instruction that waits.
            starts_early: major >= 9,
        })
    }

    fn name(&self, device: RawDevice) -> Result<String> {
        let mut text = [0 as std::ffi::c_char; 256];
        // SAFETY: a device of this driver; room of this length, which the driver ends with a zero.
        let status =
            unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as i32, device.0) };
        check("ask device", status)?;
        let bytes: Vec<u8> = text.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn uuid(&self, device: RawDevice) -> Result<Uuid> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: a device of this driver; the structure is ours.
        check("ask device", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device.0) })?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    fn reach(&self, device: RawDevice, other: RawDevice) -> Result<Reach> {
        use sys::CUdevice_P2PAttribute as P;
        let ask = |which| {
            let mut value = 0;
            // SAFETY: two devices of this driver.
            let status =
                unsafe { sys::cuDeviceGetP2PAttribute(&mut value, which, device.0, other.0) };
            check("ask for peer access", status).map(|()| value != 0)
        };
        Ok(match ask(P::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? {
            false => Reach::Nothing,
            true if ask(P::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? => Reach::Whole,
            true => Reach::WithoutAtomics,
        })
    }
}
