//! Questions about devices.

use std::ffi::{c_char, c_uint};

use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_gpu::compile::Architecture;
use tokenyard_gpu::driver::{DeviceFacts, DriverDevices, RawDevice, Reach, Uuid};
use tokenyard_sys_hip::{self as sys, consts};

use super::HipDriver;
use super::library::loaded;
use super::memory::Sharing;
use super::status::check;

/// The device of this thread.
pub(super) fn present() -> Result<i32> {
    let (loaded, mut raw) = (loaded()?, 0);
    // SAFETY: as above.
    let status = unsafe { (loaded.hip.get_device)(&mut raw) };
    check(loaded, "ask for device", status).map(|()| raw)
}

/// Makes a device that of this thread.
pub(super) fn select(device: i32) -> Result<()> {
    let loaded = loaded()?;
    // SAFETY: HIP is loaded, and refuses devices that are not there.
    check(loaded, "choose device", unsafe { (loaded.hip.set_device)(device) })
}

/// One numeric attribute of a device.
pub(super) fn attribute(device: RawDevice, which: c_uint) -> Result<i32> {
    let (loaded, mut value) = (loaded()?, 0);
    // SAFETY: a device of this driver; the number is ours.
    let status = unsafe { (loaded.hip.device_get_attribute)(&mut value, which, device.0) };
    check(loaded, "ask device", status).map(|()| value)
}

fn architecture(device: RawDevice) -> Result<Architecture> {
    let (loaded, mut properties) = (loaded()?, sys::DeviceProp::zeroed());
    // SAFETY: a device of this driver; room of the structure's size.
    let status = unsafe { (loaded.hip.get_device_properties)(&mut properties, device.0) };
    check(loaded, "ask device", status)?;
    let name = properties.architecture();
    Architecture::gfx(&name).ok_or_else(|| {
        let message = format!("found architecture {name:?}; expected a name such as gfx942");
        Error::new(ErrorKind::Unsupported, "ask device", message)
    })
}

impl DriverDevices for HipDriver {
    fn device_count(&self) -> Result<i32> {
        let (loaded, mut count) = (loaded()?, 0);
        // SAFETY: HIP is loaded; the number is ours.
        let status = unsafe { (loaded.hip.get_device_count)(&mut count) };
        match status {
            consts::ERROR_NO_DEVICE => Ok(0),
            status => check(loaded, "count devices", status).map(|()| count),
        }
    }

    fn device(&self, ordinal: i32) -> Result<RawDevice> {
        let (loaded, mut raw) = (loaded()?, 0);
        // SAFETY: as above.
        let status = unsafe { (loaded.hip.device_get)(&mut raw, ordinal) };
        check(loaded, "open device", status).map(|()| RawDevice(raw))
    }

    fn current_device(&self) -> Option<RawDevice> {
        present().ok().filter(|device| *device != 0).map(RawDevice)
    }

    fn facts(&self, device: RawDevice) -> Result<DeviceFacts> {
        let number = |which| attribute(device, which).map(|value| value as u32);
        Ok(DeviceFacts {
            architecture: architecture(device)?,
            wave: number(consts::ATTRIBUTE_WAVE)?,
            processors: number(consts::ATTRIBUTE_PROCESSORS)?,
            most_shared: number(consts::ATTRIBUTE_SHARED_PER_BLOCK)?,
            shares_by: Some(Sharing::of(device)?.words()),
            starts_early: false,
        })
    }

    fn name(&self, device: RawDevice) -> Result<String> {
        let (loaded, mut text) = (loaded()?, [0 as c_char; 256]);
        // SAFETY: a device of this driver; room of this length, which HIP ends with a zero.
        let status =
            unsafe { (loaded.hip.device_get_name)(text.as_mut_ptr(), text.len() as i32, device.0) };
        check(loaded, "ask device", status)?;
        let bytes: Vec<u8> = text.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn uuid(&self, device: RawDevice) -> Result<Uuid> {
        let (loaded, mut uuid) = (loaded()?, sys::Uuid::default());
        // SAFETY: a device of this driver; the structure is ours.
        let status = unsafe { (loaded.hip.device_get_uuid)(&mut uuid, device.0) };
        check(loaded, "ask device", status).map(|()| uuid.bytes)
    }

    fn reach(&self, device: RawDevice, other: RawDevice) -> Result<Reach> {
        let (loaded, mut access, mut atomics) = (loaded()?, 0, 0);
        // SAFETY: two devices of this driver; the number is ours.
        let status = unsafe { (loaded.hip.device_can_access_peer)(&mut access, device.0, other.0) };
        check(loaded, "ask for peer access", status)?;
        if access == 0 {
            return Ok(Reach::Nothing);
        }
        let which = consts::PEER_ATOMICS;
        // SAFETY: as above.
        let status = unsafe {
            (loaded.hip.device_get_peer_attribute)(&mut atomics, which, device.0, other.0)
        };
        check(loaded, "ask for peer access", status)?;
        Ok(if atomics == 0 { Reach::WithoutAtomics } else { Reach::Whole })
    }
}
