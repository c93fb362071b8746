use std::ffi::c_void;
use std::marker::PhantomData;

use super::call::{Instance, check_size, close, guarded, slots, typed};
use super::transport::read_table;
use super::{host, static_str};
use crate::Result;
use crate::abi;
use crate::call::{AgreeCall, CombineCall, DispatchCall};
use crate::kernels::{Call, Copies, KernelSet};

/// Makes a call of an instance that a kernel set of this image has opened.
pub(crate) type TypedCalls = unsafe fn(*mut c_void, Call<'_>) -> Result<()>;

/// A [`KernelSet`] of this image, which gets the typed calls.
#[derive(Debug)]
pub struct InProcess {
    /// It opens and closes instances.
    pub(crate) table: &'static abi::TyKernelsTable,
    pub(crate) calls: TypedCalls,
}

// SAFETY: the table is constant data of the image.
unsafe impl Sync for InProcess {}

impl InProcess {
    /// A kernel set.
    pub const fn of<K: KernelSet>() -> Self {
        Self { table: KernelsComponent::<K>::TABLE, calls: KernelsComponent::<K>::typed }
    }
}

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
        agree: Some(Self::agree),
        flush: Some(Self::flush),
        release: Some(Self::release),
        device: match K::DEVICE {
            Some(table) => std::ptr::from_ref(table),
            None => std::ptr::null(),
        },
        gpu_ring: Some(Self::gpu_ring),
        counters: Some(Self::counters),
        trace: Some(Self::trace),
        dispatch_output: Some(Self::dispatch_output),
        release_after: Some(Self::release_after),
        masks: Some(Self::masks),
        expert_counts: Some(Self::expert_counts),
        copy_out: Some(Self::copy_out),
        count_routing: Some(Self::count_routing),
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

    /// # Safety
    /// An open instance of [`TABLE`](Self::TABLE), one thread at a time; the rest as the method of the call.
    unsafe fn typed(instance: *mut c_void, call: Call<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { typed(call.name(), instance, |component: &mut K| call.make(component)) }
    }

    unsafe extern "C" fn close(instance: *mut c_void) {
        // SAFETY: the host closes an instance of this table once.
        unsafe { close::<K>(instance) }
    }

    slots! { guarded_mut, &mut K:
        needs(limits: *const abi::TyLimits, needs: *mut abi::TyKernelNeeds) [limits, needs] |component| {
            *needs = component.needs(&*limits)?;
            Ok(())
        };
        allocate(needs: *const abi::TyMemoryNeeds, window: *mut abi::TyWindow) [needs, window] |component| {
            *window = component.allocate((*window).id, (*window).bytes, &*needs)?;
            Ok(())
        };
        plan(plan: *const abi::TyPlan) [plan] |component| component.plan(&*plan);
        dispatch_send(dispatch: *const abi::TyDispatch) [dispatch] |component| {
            component.dispatch_send(&DispatchCall::from_abi(&*dispatch)?)
        };
        dispatch_recv(operation: u64, received: *mut abi::TyReceived) [received] |component| {
            *received = component.dispatch_recv(operation)?;
            Ok(())
        };
        combine_input(
            handle: u32, dtype: u32, region: *mut u64, tensor: *mut abi::TyTensor
        ) |component| {
            (*region, *tensor) = component.combine_input(handle, dtype)?;
            Ok(())
        };
        combine_send(combine: *const abi::TyCombine) [combine] |component| {
            component.combine_send(&CombineCall::from_abi(&*combine)?)
        };
        combine_recv(operation: u64) |component| component.combine_recv(operation);
        agree(call: *const abi::TyAgree) [call] |component| {
            component.agree(&AgreeCall::from_abi(&*call)?)
        };
        flush() |component| component.flush();
        gpu_ring(ring: *mut abi::TyGpuRing) [ring] |component| {
            component.gpu_ring((*ring).level)?.into_iter().for_each(|given| *ring = given);
            Ok(())
        };
        counters(counters: *mut abi::TyCounters) [counters] |component| {
            component.counters().into_iter().for_each(|given| *counters = given);
            Ok(())
        };
        trace(operation: u64, trace: *mut abi::TyTrace) [trace] |component| {
            *trace = component.trace(operation)?;
            Ok(())
        };
        dispatch_output(operation: u64, received: *mut abi::TyReceived) [received] |component| {
            component.dispatch_output(operation)?.into_iter().for_each(|given| *received = given);
            Ok(())
        };
        release_after(stream: *mut c_void) |component| component.release_after(stream);
        expert_counts(operation: u64, counts: *mut u32, count: u32) |component| {
            component.expert_counts(operation, std::slice::from_raw_parts_mut(counts, count as usize))
        };
        copy_out(copies: *const abi::TyCopies) [copies] |component| {
            let abi::TyCopies { copies, count, flags, totals, stream, .. } = *copies;
            let stream = (flags & abi::TY_COPIES_ON_STREAM != 0).then_some(stream);
            let copies = std::slice::from_raw_parts(copies, count as usize);
            component.copy_out(&Copies { copies, totals, stream })
        };
        count_routing(counts: *const abi::TyRoutingCounts) [counts] |component| {
            component.count_routing(&*counts)
        };
        masks(masks: *const abi::TyMasks) [masks] |component| {
            let abi::TyMasks { action, rank, masks, .. } = *masks;
            match action {
                abi::TY_MASKS_SET => component.set_mask(rank, true),
                abi::TY_MASKS_CLEAR => component.set_mask(rank, false),
                _ => {
                    for (at, mask) in component.masks()?.into_iter().enumerate() {
                        *masks.add(at) = mask.into();
                    }
                    Ok(())
                }
            }
        };
    }

    slots! { silent K:
        release(region: u64);
    }
}
