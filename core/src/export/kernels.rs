use std::ffi::c_void;
use std::marker::PhantomData;

use super::call::{Instance, check_size, close, guarded, guarded_mut};
use super::transport::read_table;
use super::{host, static_str};
use crate::abi;
use crate::kernels::KernelSet;

/// The C table of a [`KernelSet`].
#[derive(Debug)]
pub struct KernelsComponent<K>(PhantomData<K>);

impl<K: KernelSet> KernelsComponent<K> {
    /// The table; every slot is filled.
    pub const TABLE: &'static abi::TyKernelsTable = &abi::TyKernelsTable {
        size: size_of::<abi::TyKernelsTable>(),
        name: static_str(K::NAME),
        version: static_str(env!("CARGO_PKG_VERSION")),
        about: static_str(K::ABOUT),
        probe: Some(Self::probe),
        open: Some(Self::open),
        close: Some(Self::close),
        needs: Some(Self::needs),
        allocate: Some(Self::allocate),
        plan: Some(Self::plan),
        dispatch_send: Some(Self::dispatch_send),
        dispatch_recv: Some(Self::dispatch_recv),
        combine_input: Some(Self::combine_input),
        combine_send: Some(Self::combine_send),
        combine_recv: Some(Self::combine_recv),
        flush: Some(Self::flush),
        release: Some(Self::release),
        tensor_alloc: Some(Self::tensor_alloc),
        tensor_free: Some(Self::tensor_free),
        copy: Some(Self::copy),
        stream_create: Some(Self::stream_create),
        stream_destroy: Some(Self::stream_destroy),
        copy_on: Some(Self::copy_on),
        gpu_ring: Some(Self::gpu_ring),
        graph_begin: Some(Self::graph_begin),
        graph_end: Some(Self::graph_end),
        graph_launch: Some(Self::graph_launch),
        graph_destroy: Some(Self::graph_destroy),
        counters: Some(Self::counters),
        trace: Some(Self::trace),
    };

    unsafe extern "C" fn probe(
        host: *const abi::TyHost,
        config: *const abi::TyConfig,
        memory_kinds: *mut u32,
        error: *mut abi::TyError,
    ) -> i32 {
        guarded("probe", error, || {
            // SAFETY: the host's structures are valid for the call.
            let config = unsafe {
                host::meet(host);
                read_table(&*config)?.parse::<K::Config>(K::NAME)?
            };
            let kinds = K::probe(&config)?;
            // SAFETY: as above.
            unsafe { *memory_kinds = kinds };
            Ok(())
        })
    }

    unsafe extern "C" fn open(
        host: *const abi::TyHost,
        config: *const abi::TyConfig,
        shape: *const abi::TyShape,
        instance: *mut *mut c_void,
        error: *mut abi::TyError,
    ) -> i32 {
        guarded("open", error, || {
            // SAFETY: the host's structures are valid for the call.
            let (config, shape) = unsafe {
                host::meet(host);
                (read_table(&*config)?.parse::<K::Config>(K::NAME)?, &*shape)
            };
            check_size("open", shape.size, size_of::<abi::TyShape>())?;
            let component = K::open(config, shape)?;
            // SAFETY: as above.
            unsafe { *instance = Instance::into_raw(component) };
            Ok(())
        })
    }

    unsafe extern "C" fn close(instance: *mut c_void) {
        // SAFETY: the host closes an instance of this table once.
        unsafe { close::<K>(instance) }
    }

    unsafe extern "C" fn needs(
        instance: *mut c_void,
        limits: *const abi::TyLimits,
        needs: *mut abi::TyKernelNeeds,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: the host passes an open instance of this table and valid structures.
        unsafe {
            guarded_mut("needs", instance, error, |component: &mut K| {
                check_size("needs", (*limits).size, size_of::<abi::TyLimits>())?;
                check_size("needs", (*needs).size, size_of::<abi::TyKernelNeeds>())?;
                *needs = component.needs(&*limits)?;
                Ok(())
            })
        }
    }

    unsafe extern "C" fn allocate(
        instance: *mut c_void,
        needs: *const abi::TyMemoryNeeds,
        window: *mut abi::TyWindow,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("allocate", instance, error, |component: &mut K| {
                check_size("allocate", (*needs).size, size_of::<abi::TyMemoryNeeds>())?;
                check_size("allocate", (*window).size, size_of::<abi::TyWindow>())?;
                *window = component.allocate((*window).id, (*window).bytes, &*needs)?;
                Ok(())
            })
        }
    }

    unsafe extern "C" fn plan(
        instance: *mut c_void,
        plan: *const abi::TyPlan,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`; the host keeps what the plan points to until `close`.
        unsafe {
            guarded_mut("plan", instance, error, |component: &mut K| {
                check_size("plan", (*plan).size, size_of::<abi::TyPlan>())?;
                component.plan(&*plan)
            })
        }
    }

    unsafe extern "C" fn dispatch_send(
        instance: *mut c_void,
        dispatch: *const abi::TyDispatch,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`; the host keeps the tensors until the operation is received.
        unsafe {
            guarded_mut("dispatch_send", instance, error, |component: &mut K| {
                check_size("dispatch_send", (*dispatch).size, size_of::<abi::TyDispatch>())?;
                component.dispatch_send(&*dispatch)
            })
        }
    }

    unsafe extern "C" fn dispatch_recv(
        instance: *mut c_void,
        operation: u64,
        received: *mut abi::TyReceived,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("dispatch_recv", instance, error, |component: &mut K| {
                check_size("dispatch_recv", (*received).size, size_of::<abi::TyReceived>())?;
                *received = component.dispatch_recv(operation)?;
                Ok(())
            })
        }
    }

    unsafe extern "C" fn combine_input(
        instance: *mut c_void,
        handle: u32,
        dtype: u32,
        region: *mut u64,
        tensor: *mut abi::TyTensor,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("combine_input", instance, error, |component: &mut K| {
                (*region, *tensor) = component.combine_input(handle, dtype)?;
                Ok(())
            })
        }
    }

    unsafe extern "C" fn combine_send(
        instance: *mut c_void,
        combine: *const abi::TyCombine,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `dispatch_send`.
        unsafe {
            guarded_mut("combine_send", instance, error, |component: &mut K| {
                check_size("combine_send", (*combine).size, size_of::<abi::TyCombine>())?;
                component.combine_send(&*combine)
            })
        }
    }

    unsafe extern "C" fn combine_recv(
        instance: *mut c_void,
        operation: u64,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("combine_recv", instance, error, |component: &mut K| {
                component.combine_recv(operation)
            })
        }
    }

    unsafe extern "C" fn flush(instance: *mut c_void, error: *mut abi::TyError) -> i32 {
        // SAFETY: as in `needs`.
        unsafe { guarded_mut("flush", instance, error, |component: &mut K| component.flush()) }
    }

    unsafe extern "C" fn release(instance: *mut c_void, region: u64) {
        // SAFETY: as in `needs`. There is nobody to tell about a panic but the next call, which
        // finds the instance poisoned.
        unsafe {
            guarded_mut("release", instance, std::ptr::null_mut(), |component: &mut K| {
                component.release(region);
                Ok(())
            })
        };
    }

    unsafe extern "C" fn tensor_alloc(
        instance: *mut c_void,
        bytes: u64,
        pointer: *mut *mut u8,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("tensor_alloc", instance, error, |component: &mut K| {
                *pointer = component.tensor_alloc(bytes)?;
                Ok(())
            })
        }
    }

    unsafe extern "C" fn tensor_free(instance: *mut c_void, pointer: *mut u8) {
        // SAFETY: as in `release`.
        unsafe {
            guarded_mut("tensor_free", instance, std::ptr::null_mut(), |component: &mut K| {
                component.tensor_free(pointer);
                Ok(())
            })
        };
    }

    unsafe extern "C" fn copy(
        instance: *mut c_void,
        to: *mut u8,
        from: *const u8,
        bytes: u64,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`; the host names valid memory.
        unsafe {
            guarded_mut("copy", instance, error, |component: &mut K| {
                component.copy(to, from, bytes)
            })
        }
    }

    unsafe extern "C" fn stream_create(
        instance: *mut c_void,
        stream: *mut *mut c_void,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("stream_create", instance, error, |component: &mut K| {
                *stream = component.stream_create()?;
                Ok(())
            })
        }
    }

    unsafe extern "C" fn stream_destroy(instance: *mut c_void, stream: *mut c_void) {
        // SAFETY: as in `release`.
        unsafe {
            guarded_mut("stream_destroy", instance, std::ptr::null_mut(), |component: &mut K| {
                component.stream_destroy(stream);
                Ok(())
            })
        };
    }

    unsafe extern "C" fn copy_on(
        instance: *mut c_void,
        stream: *mut c_void,
        to: *mut u8,
        from: *const u8,
        bytes: u64,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`; the host names memory that stays valid until the stream has passed.
        unsafe {
            guarded_mut("copy_on", instance, error, |component: &mut K| {
                component.copy_on(stream, to, from, bytes)
            })
        }
    }

    unsafe extern "C" fn graph_begin(
        instance: *mut c_void,
        stream: *mut c_void,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("graph_begin", instance, error, |component: &mut K| {
                component.graph_begin(stream)
            })
        }
    }

    unsafe extern "C" fn graph_end(
        instance: *mut c_void,
        stream: *mut c_void,
        graph: *mut *mut c_void,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("graph_end", instance, error, |component: &mut K| {
                *graph = component.graph_end(stream)?;
                Ok(())
            })
        }
    }

    unsafe extern "C" fn graph_launch(
        instance: *mut c_void,
        stream: *mut c_void,
        graph: *mut c_void,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`; the host says that what was recorded may run again.
        unsafe {
            guarded_mut("graph_launch", instance, error, |component: &mut K| {
                component.graph_launch(stream, graph)
            })
        }
    }

    unsafe extern "C" fn graph_destroy(instance: *mut c_void, graph: *mut c_void) {
        // SAFETY: as in `release`.
        unsafe {
            guarded_mut("graph_destroy", instance, std::ptr::null_mut(), |component: &mut K| {
                component.graph_destroy(graph);
                Ok(())
            })
        };
    }

    unsafe extern "C" fn gpu_ring(
        instance: *mut c_void,
        ring: *mut abi::TyGpuRing,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("gpu_ring", instance, error, |component: &mut K| {
                check_size("gpu_ring", (*ring).size, size_of::<abi::TyGpuRing>())?;
                component.gpu_ring((*ring).level)?.into_iter().for_each(|given| *ring = given);
                Ok(())
            })
        }
    }

    unsafe extern "C" fn counters(
        instance: *mut c_void,
        counters: *mut abi::TyCounters,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("counters", instance, error, |component: &mut K| {
                check_size("counters", (*counters).size, size_of::<abi::TyCounters>())?;
                component.counters().into_iter().for_each(|given| *counters = given);
                Ok(())
            })
        }
    }

    unsafe extern "C" fn trace(
        instance: *mut c_void,
        operation: u64,
        trace: *mut abi::TyTrace,
        error: *mut abi::TyError,
    ) -> i32 {
        // SAFETY: as in `needs`.
        unsafe {
            guarded_mut("trace", instance, error, |component: &mut K| {
                check_size("trace", (*trace).size, size_of::<abi::TyTrace>())?;
                *trace = component.trace(operation)?;
                Ok(())
            })
        }
    }
}
