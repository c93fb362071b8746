//! A call of a component that does not return has a name, whichever slot it is.

use std::ffi::c_void;
use std::process::Command;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use super::*;
use crate::abi::{self, TyConfig, TyError, TyHost};
use crate::config::ComponentTable;
use crate::host::{KernelsRef, TopologyRef, TransportRef, discover, load_file};
use crate::topology::Discover;
use crate::transport::{MemoryNeeds, NO_WINDOW, Team, TransportNeeds, TransportOpen};

/// The calls of the threads under test, and what a thread was inside of in each slot.
static CALLS: LazyLock<Arc<Attended>> = LazyLock::new(Arc::default);
static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());
static ONE_TEST_AT_A_TIME: Mutex<()> = Mutex::new(());

fn look() {
    let call = CALLS.now().map_or("not watched".to_owned(), |call| call.to_string());
    SEEN.lock().unwrap().push(call);
}

/// Slots that look, and answer with a status.
macro_rules! slots {
    ($status:expr; $($name:ident($($argument:ty),*);)*) => {$(
        unsafe extern "C" fn $name($(_: $argument),*) -> i32 {
            look();
            $status
        }
    )*};
}

slots! { abi::TY_OK;
    probe_transport(*const TyHost, *const TyConfig, *mut abi::TyCapabilities, *mut TyError);
    open_transport(*const TyHost, *const abi::TyTransportOpen, *mut *mut c_void, *mut TyError);
    open_kernels(
        *const TyHost, *const TyConfig, *const abi::TyShape, *mut *mut c_void, *mut TyError
    );
}

slots! { abi::TY_UNSUPPORTED;
    memory_needs(*mut c_void, *mut MemoryNeeds, *mut TyError);
    alloc(*mut c_void, *mut abi::TyWindow, *mut TyError);
    register(*mut c_void, *const abi::TyWindow, *mut TyError);
    endpoint(*mut c_void, u32, *mut u8, usize, *mut usize, *mut TyError);
    connect(*mut c_void, u32, *const u8, usize, *mut TyError);
    commit(*mut c_void, *mut TyError);
    serve_ring(*mut c_void, *const abi::TyServeRing, *mut TyError);
    peer_address(*mut c_void, u32, u32, *mut *mut u8, *mut TyError);
    device_api(*mut c_void, *mut abi::TyDeviceApi, *mut TyError);
    link_name(*mut c_void, u32, *mut u8, usize, *mut usize);
    probe_kernels(*const TyHost, *const TyConfig, *mut u32, *mut TyError);
    needs(*mut c_void, *const abi::TyLimits, *mut abi::TyKernelNeeds, *mut TyError);
    allocate(*mut c_void, *const MemoryNeeds, *mut abi::TyWindow, *mut TyError);
    plan(*mut c_void, *const abi::TyPlan, *mut TyError);
    query(*mut c_void, u32, *mut c_void, *mut TyError);
    find_place(*const TyHost, *const abi::TyDiscover, *mut abi::TyPlace, *mut TyError);
}

unsafe extern "C" fn close(_: *mut c_void) {
    look();
}

// The hot slots of a transport: no bring-up calls them.
unsafe extern "C" fn post(
    _: *mut c_void,
    _: u32,
    _: *const abi::TyCommand,
    _: usize,
    _: *mut usize,
) -> i32 {
    abi::TY_OK
}
unsafe extern "C" fn poll(
    _: *mut c_void,
    _: u32,
    _: *mut abi::TyEvent,
    _: usize,
    _: *mut usize,
) -> i32 {
    abi::TY_OK
}
unsafe extern "C" fn read_signal(_: *mut c_void, _: u32, _: u32) -> u64 {
    0
}

const NO_TRANSPORT_NEEDS: TransportNeeds = TransportNeeds {
    windows: 0,
    queues: 0,
    signals: 0,
    queue_depth: 0,
    largest_put: 0,
    deadline: Duration::ZERO,
};

/// A structure of the ABI that is all zero.
fn zeroed<T>() -> T {
    // SAFETY: structures of the ABI are made of integers, pointers and optional functions, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// Runs `calls` on a thread under watch, and returns what it was inside of in each slot.
fn seen_during(calls: impl FnOnce()) -> Vec<String> {
    let _alone = ONE_TEST_AT_A_TIME.lock().unwrap();
    SEEN.lock().unwrap().clear();
    Arc::clone(&CALLS).attend(calls);
    assert!(CALLS.now().is_none(), "all calls have returned");
    std::mem::take(&mut SEEN.lock().unwrap())
}

fn inside_of(kind: &str, slots: &[&str]) -> Vec<String> {
    slots.iter().map(|slot| format!("{kind} `acme` is inside of `{slot}`")).collect()
}

#[test]
fn each_slot_of_a_transport_that_a_bring_up_calls_can_be_named() {
    let component = TransportRef::judged(Box::leak(Box::new(abi::TyTransportTable {
        name: crate::export::static_str("acme"),
        probe: Some(probe_transport),
        open: Some(open_transport),
        close: Some(close),
        memory_needs: Some(memory_needs),
        alloc: Some(alloc),
        register: Some(register),
        endpoint: Some(endpoint),
        connect: Some(connect),
        commit: Some(commit),
        serve_ring: Some(serve_ring),
        peer_address: Some(peer_address),
        device_api: Some(device_api),
        link_name: Some(link_name),
        post: Some(post),
        poll: Some(poll),
        read_signal: Some(read_signal),
        ..zeroed()
    })));
    let (team, needs) = (Team::new(0, vec![0]), NO_TRANSPORT_NEEDS);
    let seen = seen_during(|| {
        let open = TransportOpen::new(&team, &needs);
        let mut opened = component.open(&ComponentTable::empty(), &open).unwrap();
        opened.memory_needs().unwrap_err();
        opened.alloc(0, 64).unwrap_err();
        // SAFETY: the slot reads nothing of the window.
        unsafe { opened.register(&NO_WINDOW) }.unwrap_err();
        opened.endpoint(0).unwrap_err();
        opened.connect(0, &[]).unwrap_err();
        opened.commit().unwrap_err();
        opened.peer_address(0, 0).unwrap_err();
        // SAFETY: the link is used before `opened` is dropped.
        unsafe { opened.link() }.device_api().unwrap_err();
        // SAFETY: the slot serves no ring.
        assert!(!unsafe { opened.serve_ring(&zeroed()) }.unwrap());
        assert_eq!(opened.link_name(0), "acme");
    });
    let slots = [
        "probe",
        "open",
        "memory_needs",
        "alloc",
        "register",
        "endpoint",
        "connect",
        "commit",
        "peer_address",
        "device_api",
        "serve_ring",
        "link_name",
        "close",
    ];
    assert_eq!(seen, inside_of("transport", &slots));
}

#[test]
fn each_slot_of_a_kernel_set_that_a_bring_up_calls_can_be_named() {
    let component = KernelsRef::judged(Box::leak(Box::new(abi::TyKernelsTable {
        name: crate::export::static_str("acme"),
        probe: Some(probe_kernels),
        open: Some(open_kernels),
        close: Some(close),
        needs: Some(needs),
        allocate: Some(allocate),
        plan: Some(plan),
        query: Some(query),
        ..zeroed()
    })));
    let config = ComponentTable::empty();
    let seen = seen_during(|| {
        component.probe(&config).unwrap_err();
        let mut kernels = component.open(&config, &zeroed()).unwrap();
        kernels.needs(&zeroed()).unwrap_err();
        kernels.allocate(0, 64, &zeroed()).unwrap_err();
        // SAFETY: the slot reads nothing of the plan.
        unsafe { kernels.plan(&zeroed()) }.unwrap_err();
        assert!(kernels.gpu_ring(0).unwrap().is_none());
        assert!(kernels.counters(2).unwrap().is_none());
    });
    let slots = ["probe", "open", "needs", "allocate", "plan", "gpu_ring", "counters", "close"];
    assert_eq!(seen, inside_of("kernel set", &slots));
}

#[test]
fn a_topology_that_does_not_find_a_place_can_be_named() {
    let component = TopologyRef::judged(Box::leak(Box::new(abi::TyTopologyTable {
        name: crate::export::static_str("acme"),
        discover: Some(find_place),
        ..zeroed()
    })));
    let ask = Discover { rank: 0, ranks: 1, local_rank: 0 };
    let seen =
        seen_during(|| drop(discover(&component, &ComponentTable::empty(), &ask).unwrap_err()));
    assert_eq!(seen, inside_of("topology", &["discover"]));
}

#[test]
fn a_plugin_whose_initialiser_does_not_end_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let [source, library, go] = ["a.c", "liba.so", "go"].map(|name| folder.path().join(name));
    let text = format!(
        "#include <unistd.h>\n__attribute__((constructor)) static void early(void) {{\n\
         while (access({go:?}, F_OK) != 0) usleep(1000);\n}}\n"
    );
    std::fs::write(&source, text).unwrap();
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(built.unwrap().success());
    let calls = Arc::<Attended>::default();
    let thread = std::thread::spawn({
        let (calls, library) = (Arc::clone(&calls), library.clone());
        move || calls.attend(|| drop(load_file(&library)))
    });
    let says = format!("plugin `{}` is inside of `dlopen`", library.display());
    while calls.now().is_none_or(|call| call.to_string() != says) {
        assert!(!thread.is_finished());
        std::thread::sleep(Duration::from_millis(1));
    }
    std::fs::write(go, "").unwrap();
    thread.join().unwrap();
    assert!(calls.now().is_none());
}
