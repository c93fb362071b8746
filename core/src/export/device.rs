use std::ffi::c_void;
use std::marker::PhantomData;

use super::call::slots;
use crate::abi;
use crate::device::Device;
use crate::kernels::KernelSet;

/// The C table of the [`Device`] of a kernel set.
#[derive(Debug)]
pub struct DeviceComponent<K>(PhantomData<K>);

impl<K: KernelSet + Device> DeviceComponent<K> {
    /// The table; every slot is filled.
    pub const TABLE: &'static abi::TyDeviceTable = &abi::TyDeviceTable {
        size: size_of::<abi::TyDeviceTable>(),
        tensor_alloc: Some(Self::tensor_alloc),
        tensor_free: Some(Self::tensor_free),
        copy: Some(Self::copy),
        stream_create: Some(Self::stream_create),
        stream_destroy: Some(Self::stream_destroy),
        copy_on: Some(Self::copy_on),
        graph_begin: Some(Self::graph_begin),
        graph_end: Some(Self::graph_end),
        graph_launch: Some(Self::graph_launch),
        graph_destroy: Some(Self::graph_destroy),
    };

    slots! { guarded_mut, &mut K:
        tensor_alloc(bytes: u64, pointer: *mut *mut u8) |component| {
            *pointer = component.tensor_alloc(bytes)?;
            Ok(())
        };
        copy(to: *mut u8, from: *const u8, bytes: u64) |component| component.copy(to, from, bytes);
        stream_create(stream: *mut *mut c_void) |component| {
            *stream = component.stream_create()?;
            Ok(())
        };
        copy_on(stream: *mut c_void, to: *mut u8, from: *const u8, bytes: u64) |component| {
            component.copy_on(stream, to, from, bytes)
        };
        graph_begin(stream: *mut c_void) |component| component.graph_begin(stream);
        graph_end(stream: *mut c_void, graph: *mut *mut c_void) |component| {
            *graph = component.graph_end(stream)?;
            Ok(())
        };
        graph_launch(stream: *mut c_void, graph: *mut c_void) |component| {
            component.graph_launch(stream, graph)
        };
    }

    slots! { silent K:
        tensor_free(pointer: *mut u8);
        stream_destroy(stream: *mut c_void);
        graph_destroy(graph: *mut c_void);
    }
}
