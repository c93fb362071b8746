//! A kernel set that panics, or declares invalid needs.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

use tokenyard_core::call::{CombineCall, DispatchCall};
use tokenyard_core::device::Device;
use tokenyard_core::export::{self, DeviceComponent, Exported, InProcess, KernelsComponent};
use tokenyard_core::host::{BuiltIn, OpenKernels, Registry};
use tokenyard_core::kernels::{KernelNeeds, KernelSet, KernelShape, Limits};
use tokenyard_core::moe::Layout;
use tokenyard_core::transport::{MemoryNeeds, Window};
use tokenyard_core::{Result, abi};

use crate::{Config, caught, config, poisoned, window};

/// Built in: core makes its calls in the C form, or as they are.
struct PanickyKernels<const IS_TYPED: bool>(Config);

thread_local! {
    /// The address of the last dispatch on this thread.
    static DISPATCH: Cell<usize> = const { Cell::new(0) };
}

/// One whose calls go through its table, as those of a plugin.
type InTable = PanickyKernels<false>;

impl<const IS_TYPED: bool> Drop for PanickyKernels<IS_TYPED> {
    fn drop(&mut self) {
        self.0.enter("close");
    }
}

impl<const IS_TYPED: bool> KernelSet for PanickyKernels<IS_TYPED> {
    const NAME: &'static str = if IS_TYPED { "panicky_typed" } else { "panicky" };
    const ABOUT: &'static str = "panics where its config says";
    type Config = Config;
    const DEVICE: Option<&'static abi::TyDeviceTable> = Some(DeviceComponent::<Self>::TABLE);

    fn probe(config: &Config) -> Result<u32> {
        config.enter("probe");
        Ok(abi::TY_MEMORY_HOST)
    }

    fn open(config: Config, _: &KernelShape) -> Result<Self> {
        config.enter("open");
        Ok(Self(config))
    }

    fn needs(&mut self, _: &Limits) -> Result<KernelNeeds> {
        self.0.enter("needs");
        let flags = match self.0.panic_in.as_str() {
            UNKNOWN_NEEDS => abi::TY_KERNELS_CAP_MASKING | 1 << 31,
            WITH_STREAMS | STREAMS_ON_HOST => abi::TY_KERNELS_CAP_STREAMS,
            WITH_GRAPHS => abi::TY_KERNELS_CAP_STREAMS | abi::TY_KERNELS_CAP_NO_SYNC,
            GRAPHS_ALONE => abi::TY_KERNELS_CAP_NO_SYNC,
            _ => 0,
        };
        let on_device = [WITH_STREAMS, WITH_GRAPHS].contains(&self.0.panic_in.as_str());
        Ok(KernelNeeds { capabilities: flags, device: if on_device { 0 } else { -1 }, ..sized() })
    }

    fn allocate(&mut self, _: u32, _: u64, _: &MemoryNeeds) -> Result<Window> {
        self.0.enter("allocate");
        Ok(window())
    }

    unsafe fn plan(&mut self, _: &abi::TyPlan) -> Result<()> {
        self.0.enter("plan");
        Ok(())
    }

    unsafe fn dispatch_send(&mut self, call: &DispatchCall<'_>) -> Result<()> {
        self.0.enter("dispatch_send");
        DISPATCH.set(std::ptr::from_ref(call).addr());
        Ok(())
    }

    fn dispatch_recv(&mut self, _: u64) -> Result<abi::TyReceived> {
        self.0.enter("dispatch_recv");
        Ok(blank())
    }

    fn combine_input(&mut self, _: u32, _: u32) -> Result<(u64, abi::TyTensor)> {
        self.0.enter("combine_input");
        Ok(blank())
    }

    unsafe fn combine_send(&mut self, _: &CombineCall<'_>) -> Result<()> {
        self.0.enter("combine_send");
        Ok(())
    }

    fn combine_recv(&mut self, _: u64) -> Result<()> {
        self.0.enter("combine_recv");
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.0.enter("flush");
        Ok(())
    }

    fn release(&mut self, _: u64) {
        self.0.enter("release");
    }
}

impl<const IS_TYPED: bool> Device for PanickyKernels<IS_TYPED> {
    fn tensor_alloc(&mut self, _: u64) -> Result<*mut u8> {
        self.0.enter("tensor_alloc");
        Ok(null_mut())
    }

    fn tensor_free(&mut self, _: *mut u8) {
        self.0.enter("tensor_free");
    }

    unsafe fn copy(&mut self, _: *mut u8, _: *const u8, _: u64) -> Result<()> {
        self.0.enter("copy");
        Ok(())
    }

    fn stream_create(&mut self) -> Result<*mut c_void> {
        self.0.enter("stream_create");
        Ok(null_mut())
    }

    fn stream_destroy(&mut self, _: *mut c_void) {
        self.0.enter("stream_destroy");
    }

    unsafe fn copy_on(&mut self, _: *mut c_void, _: *mut u8, _: *const u8, _: u64) -> Result<()> {
        self.0.enter("copy_on");
        Ok(())
    }

    fn graph_begin(&mut self, _: *mut c_void) -> Result<()> {
        self.0.enter("graph_begin");
        Ok(())
    }

    fn graph_end(&mut self, _: *mut c_void) -> Result<*mut c_void> {
        self.0.enter("graph_end");
        Ok(null_mut())
    }

    unsafe fn graph_launch(&mut self, _: *mut c_void, _: *mut c_void) -> Result<()> {
        self.0.enter("graph_launch");
        Ok(())
    }

    fn graph_destroy(&mut self, _: *mut c_void) {
        self.0.enter("graph_destroy");
    }
}

/// The same kernel set without its device table, and with a slot of the table left out.
const NO_DEVICE: &abi::TyKernelsTable = &abi::TyKernelsTable {
    name: abi::TyStr { data: "no_device".as_ptr(), bytes: 9 },
    device: null(),
    ..*KernelsComponent::<InTable>::TABLE
};
const WITHOUT_COPY_ON: &abi::TyDeviceTable =
    &abi::TyDeviceTable { copy_on: None, ..*DeviceComponent::<InTable>::TABLE };
const NO_COPY_ON: &abi::TyKernelsTable = &abi::TyKernelsTable {
    name: abi::TyStr { data: "no_copy_on".as_ptr(), bytes: 10 },
    device: &raw const *WITHOUT_COPY_ON,
    ..*KernelsComponent::<InTable>::TABLE
};

static KERNELS: Exported<abi::TyKernelsExport> = {
    const TABLES: &[*const abi::TyKernelsTable] = &[
        &raw const *KernelsComponent::<InTable>::TABLE,
        &raw const *NO_COPY_ON,
        &raw const *NO_DEVICE,
    ];
    Exported(abi::TyKernelsExport {
        header: export::KERNELS_HEADER,
        components: TABLES.as_ptr(),
        count: TABLES.len(),
    })
};
inventory::submit! { BuiltIn::Kernels(&KERNELS) }
inventory::submit! { BuiltIn::KernelSets(&[InProcess::of::<PanickyKernels<true>>()]) }

/// A structure of the ABI with nothing in it.
fn blank<T>() -> T {
    // SAFETY: the ABI's structures are integers and pointers; zero is a value of all of them.
    unsafe { std::mem::zeroed() }
}

/// A structure of the ABI with nothing in it but its first field, the size.
fn sized<T>() -> T {
    let mut value = blank::<T>();
    // SAFETY: every structure that this is used for starts with its size.
    unsafe { *(&raw mut value).cast::<usize>() = size_of::<T>() };
    value
}

/// In place of the name of a call: the kernel set declares needs that no core knows.
const UNKNOWN_NEEDS: &str = "unknown_needs";

#[test]
fn needs_that_this_core_does_not_know_are_refused() {
    let error = open_kernels(UNKNOWN_NEEDS).unwrap().needs(&sized()).unwrap_err();
    assert_eq!(error.kind(), tokenyard_core::ErrorKind::Plugin);
    assert!(error.to_string().contains("the capabilities 0x8"), "{error}");
}

const WITH_STREAMS: &str = "with_streams";
const WITH_GRAPHS: &str = "with_graphs";
const GRAPHS_ALONE: &str = "graphs_alone";

const STREAMS_ON_HOST: &str = "streams_on_host";

#[test]
fn a_kernel_set_on_a_device_has_the_whole_table_of_it() {
    let needs = |name: &str, what: &str| {
        let component = Registry::built_in()?.kernels(name)?;
        component.open(&config(what), &sized::<KernelShape>())?.needs(&sized())
    };
    assert_eq!(needs("panicky", WITH_STREAMS).unwrap().capabilities, abi::TY_KERNELS_CAP_STREAMS);
    assert!(needs("panicky", WITH_GRAPHS).is_ok());
    for (name, what, expected) in [
        ("no_copy_on", WITH_STREAMS, "`copy_on`"),
        ("no_device", WITH_STREAMS, "`device`"),
        ("panicky", STREAMS_ON_HOST, "expected a device"),
        ("panicky", GRAPHS_ALONE, "TY_KERNELS_CAP_STREAMS with it"),
    ] {
        let error = needs(name, what).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}, {what}: {error}");
    }
    // On the host no device slot is required.
    assert!(needs("no_copy_on", "").is_ok() && needs("no_device", "").is_ok());
}

pub(crate) fn open_kernels(panic_in: &str) -> Result<OpenKernels> {
    open_named("panicky", panic_in)
}

fn open_named(name: &str, panic_in: &str) -> Result<OpenKernels> {
    let component = Registry::built_in()?.kernels(name)?;
    component.open(&config(panic_in), &sized::<KernelShape>())
}

#[test]
fn a_panic_in_probe_or_open_of_a_kernel_set_is_an_error() {
    let component = Registry::built_in().unwrap().kernels("panicky").unwrap();
    caught(&component.probe(&config("probe")).unwrap_err(), "panicky", "probe");
    caught(&open_kernels("open").map(|_| ()).unwrap_err(), "panicky", "open");
    assert_eq!(component.probe(&config("")).unwrap(), abi::TY_MEMORY_HOST);
}

#[test]
fn a_panic_in_a_call_of_a_kernel_set_poisons_the_instance() {
    type Call = fn(&mut OpenKernels) -> Result<()>;
    let calls: [(&str, Call); 14] = [
        ("needs", |k| k.needs(&sized()).map(|_| ())),
        ("allocate", |k| k.allocate(0, 8, &sized()).map(|_| ())),
        // SAFETY: the component reads no pointer of these structures.
        ("plan", |k| unsafe { k.plan(&sized()) }),
        ("dispatch_send", |k| {
            // SAFETY: as above.
            unsafe { k.dispatch_send(&DispatchCall::blank(0, 0, Layout::Flat)) }
        }),
        ("dispatch_recv", |k| k.dispatch_recv(0).map(|_| ())),
        ("combine_input", |k| k.combine_input(0, 1).map(|_| ())),
        // SAFETY: as above.
        ("combine_send", |k| unsafe { k.combine_send(&CombineCall::blank(0, 0)) }),
        ("combine_recv", |k| k.combine_recv(0)),
        ("flush", OpenKernels::flush),
        ("stream_create", |k| k.stream_create().map(|_| ())),
        // SAFETY: the component reads no pointer.
        ("copy_on", |k| unsafe { k.copy_on(null_mut(), null_mut(), null(), 0) }),
        // SAFETY: as above.
        ("graph_begin", |k| unsafe { k.graph_begin(null_mut()) }),
        // SAFETY: as above.
        ("graph_end", |k| unsafe { k.graph_end(null_mut()) }.map(|_| ())),
        // SAFETY: as above.
        ("graph_launch", |k| unsafe { k.graph_launch(null_mut(), null_mut()) }),
    ];
    for set in ["panicky", "panicky_typed"] {
        for (name, call) in calls {
            let mut good = open_named(set, "").unwrap();
            call(&mut good).unwrap();
            let mut bad = open_named(set, name).unwrap();
            caught(&call(&mut bad).unwrap_err(), set, name);
            for (_, later) in calls {
                poisoned(&later(&mut bad).unwrap_err(), set);
            }
        }
    }
    let mut bad = open_kernels("release").unwrap();
    bad.release(1);
    poisoned(&bad.combine_recv(0).unwrap_err(), "panicky");
    let mut bad = open_kernels("stream_destroy").unwrap();
    // SAFETY: as above.
    unsafe { bad.stream_destroy(null_mut()) };
    poisoned(&bad.flush().unwrap_err(), "panicky");
    let mut bad = open_kernels("graph_destroy").unwrap();
    // SAFETY: as above.
    unsafe { bad.graph_destroy(null_mut()) };
    poisoned(&bad.flush().unwrap_err(), "panicky");
}

#[test]
fn a_kernel_set_of_this_image_gets_the_dispatch_itself_and_one_behind_a_table_a_copy() {
    let call = DispatchCall::blank(0, 0, Layout::Flat);
    for (set, is_itself) in [("panicky_typed", true), ("panicky", false)] {
        DISPATCH.set(0);
        // SAFETY: the component reads no pointer.
        unsafe { open_named(set, "").unwrap().dispatch_send(&call).unwrap() };
        assert_ne!(DISPATCH.get(), 0, "{set}");
        assert_eq!(DISPATCH.get() == std::ptr::from_ref(&call).addr(), is_itself, "{set}");
    }
}

#[test]
fn a_tag_that_a_kernel_set_does_not_know_is_unsupported_and_a_short_structure_is_refused() {
    let table = KernelsComponent::<InTable>::TABLE;
    let text = String::new();
    let as_ty = |text: &str| abi::TyStr { data: text.as_ptr(), bytes: text.len() };
    let config = abi::TyConfig { text: as_ty(&text), file: as_ty(&text), ..sized() };
    let shape: KernelShape = sized();
    let mut instance = null_mut();
    let mut error = tokenyard_core::host::blank_error();
    let services = tokenyard_core::host::services();
    let end = abi::TyCombineEnd { size: size_of::<usize>(), ..blank() };
    let mut whole: abi::TyCombineEnd = sized();
    // SAFETY: structures of this function; the component reads no pointer of them.
    unsafe {
        let opened = table.open.unwrap()(services, &config, &shape, &mut instance, &mut error);
        assert_eq!(opened, abi::TY_OK);
        let call = (&raw mut whole).cast::<c_void>();
        for slot in [table.finish, table.query] {
            let found = slot.unwrap()(instance, 99, call, &mut error);
            assert_eq!(found, abi::TY_UNSUPPORTED);
            let text = String::from_utf8_lossy(&error.message);
            assert!(text.contains("found a call with tag 99"), "{text}");
        }
        assert_eq!(table.submit.unwrap()(instance, 99, call, &mut error), abi::TY_UNSUPPORTED);
        let short = (&raw const end).cast_mut().cast();
        let finish = table.finish.unwrap();
        let status = finish(instance, abi::TY_FINISH_COMBINE, short, &mut error);
        assert_eq!(status, abi::TY_INTERNAL);
        let text = String::from_utf8_lossy(&error.message);
        assert!(text.contains("has 8 bytes; expected at least 16"), "{text}");
        assert_eq!(finish(instance, abi::TY_FINISH_COMBINE, call, &mut error), abi::TY_OK);
        table.close.unwrap()(instance);
    }
}
