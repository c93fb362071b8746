//! A GPU's driver, and the objects made with it: every object is a type with a drop.
//!
//! Each maker implements [`Driver`]; the objects hold the driver through their context.
//! [`Driver::load`] must have succeeded before any other call; `Device::choose` ensures this.
//!
//! A new call of a driver needs an arm in `backends/{cuda,rocm}/src/driver`, and one in the double. Watched by the
//! tests in these files over `tests/doubles/stream_model`, and by `backends/rocm/tests/driver.rs`.

mod device;
mod graph;
mod host;
mod memory;
mod module;
mod raw;
mod stream;
// In the folder of tests, and modules of this one: they make what no other crate may make.
#[cfg(test)]
#[path = "../../tests/doubles/host_device.rs"]
pub(crate) mod host_device;
#[cfg(test)]
#[path = "../../tests/doubles/stream_model/mod.rs"]
pub(crate) mod stream_model;
mod times;

pub(crate) use device::local_rank;
pub use device::{Context, Device, Entered, of_thread, take_over};
pub(crate) use graph::Graph;
pub(crate) use host::HostWindow;
pub use host::IoPage;
pub use memory::{Buffer, Pinned, Vmm, copy};
pub(crate) use memory::{Pooled, Reserved, granularity};
pub(crate) use module::{Function, Module};
pub use raw::{
    DeviceFacts, Driver, DriverDevices, DriverMemory, Launch, RawContext, RawDevice, RawEvent,
    RawFunction, RawGraph, RawMemory, RawModule, RawStream, Reach, Uuid,
};
pub use stream::order_streams;
pub(crate) use stream::{Event, RelaxedCapture, Stream};
pub use times::{CallTimes, measure};
