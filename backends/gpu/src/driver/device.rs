//! Devices and their contexts.

use std::cell::Cell;
use std::sync::Arc;

use tokenyard_core::bootstrap::environment;
use tokenyard_core::{Error, ErrorKind, Result};

use super::{DeviceFacts, Driver, RawContext, RawDevice, Reach, Uuid};
use crate::platform::Platform;

thread_local! {
    /// The current device of the thread for which this one brings a communicator up.
    static OF_CALLER: Cell<Option<RawDevice>> = const { Cell::new(None) };
}

/// The current device of this thread for [`take_over`], or 0.
pub fn of_thread(platform: &'static Platform) -> usize {
    let driver = platform.driver;
    let current = driver.load(None).ok().and_then(|()| driver.current_device());
    current.map_or(0, |device| device.0 as usize + 1)
}

/// Has [`Device::choose`] take what [`of_thread`] was on another thread.
pub fn take_over(device: usize) {
    OF_CALLER.set(device.checked_sub(1).map(|device| RawDevice(device as i32)));
}

/// A device of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    pub(crate) ordinal: i32,
    pub(crate) platform: &'static Platform,
    raw: RawDevice,
}

impl Device {
    /// The device that this rank drives. The config may name it. Otherwise it is the device of the calling
    /// thread's current context, which the framework chose; without a context it is the rank's index on its
    /// machine, as the launcher states it.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] with the fix, if there is no such device.
    pub fn choose(platform: &'static Platform, configured: Option<u32>) -> Result<Self> {
        let driver = platform.driver;
        let count = Self::count(platform)?;
        let ordinal = match configured {
            Some(ordinal) => i32::try_from(ordinal).unwrap_or(i32::MAX),
            None => match OF_CALLER.get().or_else(|| driver.current_device()) {
                Some(raw) => {
                    let mut all = Self::all(platform, count)?.into_iter();
                    return all.find(|device| device.raw == raw).ok_or_else(|| none(platform));
                }
                None => ordinal_of(local_rank(), count),
            },
        };
        if ordinal >= count {
            let names = &platform.names;
            let found = format!("found {count} {} devices", names.interface);
            return Err(Error::new(
                ErrorKind::Unavailable,
                "choose device",
                format!("{found}; expected one with ordinal {ordinal}"),
            )
            .with_fix(format!(
                "correct `device`, start one rank per GPU, or see {}",
                names.see_devices
            )));
        }
        Self::get(platform, ordinal)
    }

    /// Number of devices that this process sees; at least one. Loads the driver.
    pub(crate) fn count(platform: &'static Platform) -> Result<i32> {
        platform.driver.load(None)?;
        let count = platform.driver.device_count()?;
        if count == 0 { Err(none(platform)) } else { Ok(count) }
    }

    fn all(platform: &'static Platform, count: i32) -> Result<Vec<Self>> {
        (0..count).map(|ordinal| Self::get(platform, ordinal)).collect()
    }

    fn get(platform: &'static Platform, ordinal: i32) -> Result<Self> {
        Ok(Self { ordinal, platform, raw: platform.driver.device(ordinal)? })
    }

    fn driver(&self) -> &'static dyn Driver {
        self.platform.driver
    }

    pub(super) fn raw(&self) -> RawDevice {
        self.raw
    }

    /// The numbers of this device.
    pub(crate) fn facts(&self) -> Result<DeviceFacts> {
        self.driver().facts(self.raw)
    }

    /// The name that its maker gives it.
    pub(crate) fn name(&self) -> Result<String> {
        self.driver().name(self.raw)
    }

    /// An identity of the device that is the same in every process.
    pub(crate) fn uuid(&self) -> Result<Uuid> {
        self.driver().uuid(self.raw)
    }

    /// The device with this identity, if this process sees it.
    pub(crate) fn with_uuid(&self, uuid: Uuid) -> Result<Option<Self>> {
        for device in Self::all(self.platform, Self::count(self.platform)?)? {
            if device.uuid()? == uuid {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// Every visible device but this one.
    pub(crate) fn others(&self) -> Result<Vec<Self>> {
        let all = Self::all(self.platform, Self::count(self.platform)?)?;
        Ok(all.into_iter().filter(|other| other.raw != self.raw).collect())
    }

    /// The access of this device to the memory of another.
    pub(crate) fn reach(&self, other: Self) -> Result<Reach> {
        self.driver().reach(self.raw, other.raw)
    }
}

fn none(platform: &Platform) -> Error {
    let text = format!("found no {} device; expected one", platform.names.interface);
    let fix = format!("see {}", platform.names.see_devices);
    Error::new(ErrorKind::Unavailable, "choose device", text).with_fix(fix)
}

/// The device of the rank with this index on its machine, which may not exist. Launchers that show
/// each rank one device show it as the first.
fn ordinal_of(index: u32, count: i32) -> i32 {
    if count == 1 { 0 } else { i32::try_from(index).unwrap_or(i32::MAX) }
}

/// Variables in which launchers state a rank's index on its machine. Slurm comes last: under mpirun and
/// torchrun its index is that of the process that started the ranks, the same for all of them.
const LOCAL_RANKS: [&str; 5] = [
    "TOKENYARD_LOCAL_RANK",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
];

/// The index on its machine of the rank of this process.
pub(crate) fn local_rank() -> u32 {
    launched_as(&environment)
}

/// The rank's index on its machine, as launchers state it; 0 where no launcher does.
fn launched_as(env: &dyn Fn(&str) -> Option<String>) -> u32 {
    LOCAL_RANKS.iter().find_map(|name| env(name)?.parse().ok()).unwrap_or(0)
}

/// A device's primary context, which frameworks share. Retained while this lives.
#[derive(Debug)]
pub struct Context {
    pub(crate) device: Device,
    raw: RawContext,
}

impl Context {
    /// Retains the context of a device.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn retain(device: Device) -> Result<Arc<Self>> {
        let raw = device.driver().context_retain(device.raw)?;
        Ok(Arc::new(Self { device, raw }))
    }

    /// Makes the context current on this thread until the result is dropped.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn enter(&self) -> Result<Entered> {
        // SAFETY: a context that lives; popped on drop, in reverse order.
        let previous = unsafe { self.driver().context_push(self.raw)? };
        Ok(Entered { driver: self.driver(), previous, _not_send: std::marker::PhantomData })
    }

    pub(crate) fn driver(&self) -> &'static dyn Driver {
        self.device.driver()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`.
        unsafe { self.driver().context_release(self.device.raw) };
    }
}

/// A context that is current on this thread.
#[derive(Debug)]
#[must_use = "the context is current only while this lives"]
pub struct Entered {
    driver: &'static dyn Driver,
    previous: RawContext,
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: pushed by `enter` on this thread.
        unsafe { self.driver.context_pop(self.previous) };
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

    #[test]
    fn ranks_of_mpirun_within_a_job_of_slurm_do_not_share_the_device_of_the_batch_script() {
        for (variables, index) in [
            (&[("SLURM_LOCALID", "0"), ("OMPI_COMM_WORLD_LOCAL_RANK", "3")][..], 3),
            (&[("SLURM_LOCALID", "0"), ("MPI_LOCALRANKID", "2")], 2),
            (&[("SLURM_LOCALID", "0"), ("LOCAL_RANK", "5")], 5),
            (&[("SLURM_LOCALID", "1")], 1),
            (&[("LOCAL_RANK", "5"), ("TOKENYARD_LOCAL_RANK", "7")], 7),
            (&[], 0),
        ] {
            let env = |name: &str| {
                let found = variables.iter().find(|(variable, _)| *variable == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            assert_eq!(launched_as(&env), index, "{variables:?}");
        }
    }
}
