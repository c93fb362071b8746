use std::ffi::c_void;
use std::marker::PhantomData;

use super::call::{Instance, check_size, close, guarded, guarded_mut, slots, typed};
use super::transport::read_table;
use super::{host, static_str};
use crate::abi;
use crate::call::CForm;
use crate::kernels::{KernelCall, KernelSet, kernel_calls};
use crate::{Error, ErrorKind, Result};

/// Makes a call of an instance that a kernel set of this image has opened.
pub(crate) type TypedCalls = unsafe fn(*mut c_void, KernelCall<'_>) -> Result<()>;

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
        submit: Some(Self::submit),
        finish: Some(Self::finish),
        query: Some(Self::query),
        flush: Some(Self::flush),
        release: Some(Self::release),
        device: match K::DEVICE {
            Some(table) => std::ptr::from_ref(table),
            None => std::ptr::null(),
        },
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
    unsafe fn typed(instance: *mut c_void, call: KernelCall<'_>) -> Result<()> {
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
        flush() |component| component.flush();
    }

    slots! { silent K:
        release(region: u64);
    }
}

/// The body of a slot that takes tagged calls: `$of` reads the structure of the tag.
macro_rules! by_tag {
    (@read $name:literal, $call:ident) => { &read($name, $call)? };
    (@place $name:literal, $call:ident) => { place($name, $call)? };
    ($slot:literal, $of:ident($instance:ident, $tag:ident, $call:ident, $error:ident)
        $($variant:ident = $name:literal, $known:ident;)*) => {
        match $tag {
            // SAFETY: the host passes an open instance of this table, the structure of this tag, and holds all that
            // the ABI requires it to hold.
            $(abi::$known => unsafe {
                guarded_mut($name, $instance, $error, |component: &mut K| {
                    KernelCall::$variant(by_tag!(@$of $name, $call)).make(component)
                })
            },)*
            other => unknown($slot, other, $error),
        }
    };
}

/// The slots that take tagged calls.
macro_rules! tagged_slots {
    ($life:lifetime
        submit { $($submit:ident($argument:ty) = $submit_name:literal, $submit_tag:ident;)* }
        finish { $($finish:ident($end:ty) = $finish_name:literal, $finish_tag:ident;)* }
        query { $($query:ident($answer:ty) = $query_name:literal, $query_tag:ident;)* }
    ) => {
        impl<K: KernelSet> KernelsComponent<K> {
            unsafe extern "C" fn submit(
                instance: *mut c_void,
                tag: u32,
                call: *const c_void,
                error: *mut abi::TyError,
            ) -> i32 {
                by_tag!("submit", read(instance, tag, call, error)
                    $($submit = $submit_name, $submit_tag;)*)
            }

            unsafe extern "C" fn finish(
                instance: *mut c_void,
                tag: u32,
                call: *mut c_void,
                error: *mut abi::TyError,
            ) -> i32 {
                by_tag!("finish", place(instance, tag, call, error)
                    $($finish = $finish_name, $finish_tag;)*)
            }

            unsafe extern "C" fn query(
                instance: *mut c_void,
                tag: u32,
                call: *mut c_void,
                error: *mut abi::TyError,
            ) -> i32 {
                by_tag!("query", place(instance, tag, call, error)
                    $($query = $query_name, $query_tag;)*)
            }
        }
    };
}
kernel_calls!(tagged_slots);

/// The typed arguments of a call.
///
/// # Safety
/// The C form of `T`, valid for the call, with what it names.
unsafe fn read<T: CForm>(name: &'static str, call: *const c_void) -> Result<T> {
    // SAFETY: by this function's contract; each structure starts with its size.
    unsafe {
        check_size(name, *call.cast::<usize>(), size_of::<T::Form>())?;
        T::from_abi(&*call.cast::<T::Form>())
    }
}

/// The place of a call's results.
///
/// # Safety
/// A `T` that starts with its size, valid for the call, which no other code reads meanwhile.
unsafe fn place<'a, T>(name: &'static str, call: *mut c_void) -> Result<&'a mut T> {
    // SAFETY: by this function's contract.
    unsafe {
        check_size(name, *call.cast::<usize>(), size_of::<T>())?;
        Ok(&mut *call.cast::<T>())
    }
}

fn unknown(slot: &'static str, tag: u32, error: *mut abi::TyError) -> i32 {
    guarded(slot, error, || {
        let text = format!("found a call with tag {tag}, which this kernel set does not know");
        Err(Error::new(ErrorKind::Unsupported, slot, text)
            .with_fix("use a host and a plugin of matching versions"))
    })
}
