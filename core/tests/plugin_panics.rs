//! A part that panics becomes an error with its text; the process lives, and the part is not asked
//! again. Built-in tables are judged and called as loaded ones are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test helpers")]

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::time::Duration;

use tokenyard_core::config::PartTable;
use tokenyard_core::export::{self, Exported, KernelsPart, TransportPart};
use tokenyard_core::host::{BuiltIn, OpenKernels, OpenTransport, Registry, services};
use tokenyard_core::kernels::{KernelNeeds, KernelSet, KernelShape, Limits};
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, NO_CAPABILITIES, NO_COMMAND, Team, Transport,
    TransportNeeds, Window,
};
use tokenyard_core::{Error, ErrorKind, Result, abi};

/// Says in which call a part panics.
#[derive(Default, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Config {
    panic_in: String,
}

impl Config {
    fn enter(&self, call: &str) {
        assert_ne!(self.panic_in, call, "boom in {call}");
    }
}

fn config(call: &str) -> PartTable {
    PartTable::from_text(&format!("panic_in = \"{call}\"\n"), "a.toml")
}

struct Panicky(Config);

impl Drop for Panicky {
    fn drop(&mut self) {
        self.0.enter("close");
    }
}

impl Transport for Panicky {
    const NAME: &'static str = "panicky";
    const ABOUT: &'static str = "panics where its config says";
    type Config = Config;

    fn probe(config: &Config) -> Result<Capabilities> {
        config.enter("probe");
        Ok(NO_CAPABILITIES)
    }

    fn open(config: Config, _: &Team, _: &TransportNeeds) -> Result<Self> {
        config.enter("open");
        Ok(Self(config))
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.0.enter("memory_needs");
        MemoryNeeds { size: size_of::<MemoryNeeds>(), kinds: 1, handles: 0, alignment: 1 }
    }

    fn alloc(&mut self, _: u32, _: u64) -> Result<Window> {
        self.0.enter("alloc");
        Ok(window())
    }

    unsafe fn register(&mut self, _: &Window) -> Result<()> {
        self.0.enter("register");
        Ok(())
    }

    fn endpoint(&mut self, _: u32) -> Result<Vec<u8>> {
        self.0.enter("endpoint");
        Ok(vec![1, 2, 3])
    }

    fn connect(&mut self, _: u32, _: &[u8]) -> Result<()> {
        self.0.enter("connect");
        Ok(())
    }

    fn peer_address(&self, _: u32, _: u32) -> Result<*mut u8> {
        self.0.enter("peer_address");
        Ok(std::ptr::dangling_mut())
    }

    unsafe fn post(&self, _: u32, commands: &[Command]) -> Result<usize, i32> {
        self.0.enter("post");
        Ok(commands.len())
    }

    fn poll(&self, _: u32, _: &mut [Event]) -> Result<usize, i32> {
        self.0.enter("poll");
        Ok(0)
    }

    fn read_signal(&self, _: u32, id: u32) -> u64 {
        self.0.enter("read_signal");
        u64::from(id)
    }

    fn health(&self) -> Result<()> {
        self.0.enter("health");
        Ok(())
    }
}

static TRANSPORTS: Exported<abi::TyTransportExport> = {
    const TABLES: &[*const abi::TyTransportTable] = &[&raw const *TransportPart::<Panicky>::TABLE];
    Exported(abi::TyTransportExport {
        header: export::TRANSPORT_HEADER,
        parts: TABLES.as_ptr(),
        count: TABLES.len(),
    })
};
inventory::submit! { BuiltIn::Transport(&TRANSPORTS) }

fn window() -> Window {
    #[repr(align(128))]
    struct Aligned([u8; 8]);
    static MEMORY: Exported<Aligned> = Exported(Aligned([0; 8]));
    Window {
        size: size_of::<Window>(),
        id: 0,
        kind: abi::TY_MEMORY_HOST,
        pointer: (&raw const MEMORY.0.0).cast_mut().cast(),
        bytes: 8,
        fd: -1,
        device: -1,
        fd_offset: 0,
    }
}

fn open_transport(panic_in: &str) -> Result<OpenTransport> {
    let needs = TransportNeeds {
        windows: 1,
        lanes: 1,
        signals: 1,
        queue_depth: 1,
        largest_put: 8,
        deadline: Duration::from_secs(1),
    };
    let part = Registry::built_in()?.transport("panicky")?;
    part.open(&config(panic_in), &Team::world(0, 1), &needs)
}

/// A panic that was caught: internal, with the part's name, the call and the panic's text.
fn caught(error: &Error, part: &str, call: &str) {
    assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
    for wanted in [format!("part: {part}"), "panicked: ".into(), format!("boom in {call}")] {
        assert!(error.to_string().contains(&wanted), "expected `{wanted}` in: {error}");
    }
}

/// Every later call fails too, and says why.
fn poisoned(error: &Error, part: &str) {
    assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
    let text = error.to_string();
    assert!(text.contains("panicked before") && text.contains(part), "{text}");
}

// === transport ===

#[test]
fn a_panic_in_probe_or_open_is_an_error_and_the_next_call_works() {
    let part = Registry::built_in().unwrap().transport("panicky").unwrap();
    caught(&part.probe(&config("probe")).unwrap_err(), "panicky", "probe");
    caught(&open_transport("open").map(|_| ()).unwrap_err(), "panicky", "open");
    part.probe(&config("")).unwrap();
    open_transport("").unwrap().health().unwrap();
}

#[test]
fn a_panic_crosses_the_table_as_its_own_status() {
    let table = TransportPart::<Panicky>::TABLE;
    let text = "panic_in = \"probe\"\n";
    let config = abi::TyConfig {
        size: size_of::<abi::TyConfig>(),
        text: abi::TyStr { data: text.as_ptr(), bytes: text.len() },
        file: abi::TyStr { data: std::ptr::null(), bytes: 0 },
    };
    let mut capabilities = NO_CAPABILITIES;
    // SAFETY: every structure lives for the call, and no error structure is allowed.
    let status = unsafe {
        table.probe.unwrap()(services(), &config, &mut capabilities, std::ptr::null_mut())
    };
    assert_eq!(status, abi::TY_PANIC);
}

#[test]
fn a_panic_in_a_cold_call_of_a_transport_poisons_the_instance() {
    type Call = fn(&mut OpenTransport) -> Result<()>;
    let calls: [(&str, Call); 7] = [
        ("memory_needs", |t| t.memory_needs().map(|_| ())),
        ("alloc", |t| t.alloc(0, 8).map(|_| ())),
        // SAFETY: the part does not use the window.
        ("register", |t| unsafe { t.register(&window()) }),
        ("endpoint", |t| t.endpoint(0).map(|_| ())),
        ("connect", |t| t.connect(0, &[])),
        ("peer_address", |t| t.peer_address(0, 0).map(|_| ())),
        ("health", |t| t.health()),
    ];
    for (name, call) in calls {
        let mut good = open_transport("").unwrap();
        call(&mut good).unwrap();
        let mut bad = open_transport(name).unwrap();
        caught(&call(&mut bad).unwrap_err(), "panicky", name);
        for (_, later) in calls {
            poisoned(&later(&mut bad).unwrap_err(), "panicky");
        }
        assert_eq!(bad.poll(0, &mut []), Err(abi::TY_PANIC));
    }
}

#[test]
fn a_panic_in_a_hot_call_is_a_status_and_breaks_the_health() {
    // SAFETY: no source memory is named.
    let post = |t: &OpenTransport| unsafe { t.post(0, &[command()]) };
    let transport = open_transport("post").unwrap();
    assert_eq!(transport.poll(0, &mut []), Ok(0));
    assert_eq!(post(&transport), Err(abi::TY_PANIC));
    assert_eq!(transport.poll(0, &mut []), Err(abi::TY_PANIC));
    poisoned(&transport.health().unwrap_err(), "panicky");

    let transport = open_transport("poll").unwrap();
    assert_eq!(post(&transport), Ok(1));
    assert_eq!(transport.poll(0, &mut []), Err(abi::TY_PANIC));
    assert_eq!(post(&transport), Err(abi::TY_PANIC));
    poisoned(&transport.health().unwrap_err(), "panicky");

    let transport = open_transport("read_signal").unwrap();
    assert_eq!(transport.read_signal(0, 7), 0, "a panic reads as no progress");
    assert_eq!(transport.poll(0, &mut []), Err(abi::TY_PANIC));
    poisoned(&transport.health().unwrap_err(), "panicky");
}

#[test]
fn a_panic_while_closing_does_not_end_the_process() {
    drop(open_transport("close").unwrap());
    drop(open_kernels("close").unwrap());
    open_transport("").unwrap().health().unwrap();
}

#[test]
fn an_unknown_key_of_a_part_is_named_with_its_line() {
    let part = Registry::built_in().unwrap().transport("panicky").unwrap();
    let table = PartTable::from_text("\n\n\n\n\n\npanik_in = \"probe\"\n", "a.toml");
    for error in [
        part.probe(&table).map(|_| ()).unwrap_err(),
        Registry::built_in().unwrap().kernels("panicky").unwrap().probe(&table).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        let text = error.to_string();
        assert!(text.contains("`panik_in`") && text.contains("panic_in"), "{text}");
        assert!(text.contains(":7") || text.contains("line 7"), "{text}");
    }
}

fn command() -> Command {
    Command { op: abi::TY_OP_SIGNAL, add: 1, ..NO_COMMAND }
}

// === kernel set ===

struct PanickyKernels(Config);

impl Drop for PanickyKernels {
    fn drop(&mut self) {
        self.0.enter("close");
    }
}

impl KernelSet for PanickyKernels {
    const NAME: &'static str = "panicky";
    const ABOUT: &'static str = "panics where its config says";
    type Config = Config;

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
            UNKNOWN_NEEDS => abi::TY_NEEDS_MASKING | 8,
            WITH_STREAMS => abi::TY_NEEDS_STREAMS,
            WITH_GRAPHS => abi::TY_NEEDS_STREAMS | abi::TY_NEEDS_NO_SYNC,
            GRAPHS_ALONE => abi::TY_NEEDS_NO_SYNC,
            _ => 0,
        };
        Ok(KernelNeeds { flags, ..sized() })
    }

    fn allocate(&mut self, _: u32, _: u64, _: &MemoryNeeds) -> Result<Window> {
        self.0.enter("allocate");
        Ok(window())
    }

    unsafe fn plan(&mut self, _: &abi::TyPlan) -> Result<()> {
        self.0.enter("plan");
        Ok(())
    }

    unsafe fn dispatch_send(&mut self, _: &abi::TyDispatch) -> Result<()> {
        self.0.enter("dispatch_send");
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

    unsafe fn combine_send(&mut self, _: &abi::TyCombine) -> Result<()> {
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

/// The same with optional slots left out.
const NO_GRAPHS: &abi::TyKernelsTable = &abi::TyKernelsTable {
    name: abi::TyStr { data: "no_graphs".as_ptr(), bytes: 9 },
    graph_launch: None,
    ..*KernelsPart::<PanickyKernels>::TABLE
};
const NO_COPY_ON: &abi::TyKernelsTable = &abi::TyKernelsTable {
    name: abi::TyStr { data: "no_copy_on".as_ptr(), bytes: 10 },
    copy_on: None,
    ..*KernelsPart::<PanickyKernels>::TABLE
};

static KERNELS: Exported<abi::TyKernelsExport> = {
    const TABLES: &[*const abi::TyKernelsTable] = &[
        &raw const *KernelsPart::<PanickyKernels>::TABLE,
        &raw const *NO_COPY_ON,
        &raw const *NO_GRAPHS,
    ];
    Exported(abi::TyKernelsExport {
        header: export::KERNELS_HEADER,
        parts: TABLES.as_ptr(),
        count: TABLES.len(),
    })
};
inventory::submit! { BuiltIn::Kernels(&KERNELS) }

/// A structure of the ABI with nothing in it.
fn blank<T>() -> T {
    // SAFETY: the ABI's structures are integers and pointers; zero is a value of all of them.
    unsafe { std::mem::zeroed() }
}

/// The same with its first field, the size, filled.
fn sized<T>() -> T {
    let mut value = blank::<T>();
    // SAFETY: every structure that this is used for starts with its size.
    unsafe { *(&raw mut value).cast::<usize>() = size_of::<T>() };
    value
}

/// Instead of a call to panic in: the kernel set needs what no core knows.
const UNKNOWN_NEEDS: &str = "unknown_needs";

#[test]
fn needs_that_this_core_does_not_know_are_refused() {
    let error = open_kernels(UNKNOWN_NEEDS).unwrap().needs(&sized()).unwrap_err();
    assert_eq!(error.kind(), tokenyard_core::ErrorKind::Plugin);
    assert!(error.to_string().contains("the flags 0x8"), "{error}");
}

const WITH_STREAMS: &str = "with_streams";
const WITH_GRAPHS: &str = "with_graphs";
const GRAPHS_ALONE: &str = "graphs_alone";

#[test]
fn a_kernel_set_with_streams_has_the_slots_for_them() {
    let needs = |name: &str, what: &str| {
        let part = Registry::built_in()?.kernels(name)?;
        part.open(&config(what), &sized::<KernelShape>())?.needs(&sized())
    };
    assert_eq!(needs("panicky", WITH_STREAMS).unwrap().flags, abi::TY_NEEDS_STREAMS);
    assert!(needs("no_copy_on", "").is_ok());
    let error = needs("no_copy_on", WITH_STREAMS).unwrap_err();
    assert!(error.to_string().contains("copy_on"), "{error}");
    assert!(needs("panicky", WITH_GRAPHS).is_ok());
    assert!(needs("no_graphs", WITH_STREAMS).is_ok());
    let error = needs("no_graphs", WITH_GRAPHS).unwrap_err();
    assert!(error.to_string().contains("graph_launch"), "{error}");
    let error = needs("panicky", GRAPHS_ALONE).unwrap_err();
    assert!(error.to_string().contains("TY_NEEDS_STREAMS with it"), "{error}");
}

fn open_kernels(panic_in: &str) -> Result<OpenKernels> {
    let part = Registry::built_in()?.kernels("panicky")?;
    part.open(&config(panic_in), &sized::<KernelShape>())
}

#[test]
fn a_panic_in_probe_or_open_of_a_kernel_set_is_an_error() {
    let part = Registry::built_in().unwrap().kernels("panicky").unwrap();
    caught(&part.probe(&config("probe")).unwrap_err(), "panicky", "probe");
    caught(&open_kernels("open").map(|_| ()).unwrap_err(), "panicky", "open");
    assert_eq!(part.probe(&config("")).unwrap(), abi::TY_MEMORY_HOST);
}

#[test]
fn a_panic_in_a_call_of_a_kernel_set_poisons_the_instance() {
    type Call = fn(&mut OpenKernels) -> Result<()>;
    let calls: [(&str, Call); 14] = [
        ("needs", |k| k.needs(&sized()).map(|_| ())),
        ("allocate", |k| k.allocate(0, 8, &sized()).map(|_| ())),
        // SAFETY: the part looks at no pointer of these structures.
        ("plan", |k| unsafe { k.plan(&sized()) }),
        // SAFETY: as above.
        ("dispatch_send", |k| unsafe { k.dispatch_send(&sized()) }),
        ("dispatch_recv", |k| k.dispatch_recv(0).map(|_| ())),
        ("combine_input", |k| k.combine_input(0, 1).map(|_| ())),
        // SAFETY: as above.
        ("combine_send", |k| unsafe { k.combine_send(&sized()) }),
        ("combine_recv", |k| k.combine_recv(0)),
        ("flush", OpenKernels::flush),
        ("stream_create", |k| k.stream_create().map(|_| ())),
        // SAFETY: the part looks at no pointer.
        ("copy_on", |k| unsafe { k.copy_on(null_mut(), null_mut(), null(), 0) }),
        // SAFETY: as above.
        ("graph_begin", |k| unsafe { k.graph_begin(null_mut()) }),
        // SAFETY: as above.
        ("graph_end", |k| unsafe { k.graph_end(null_mut()) }.map(|_| ())),
        // SAFETY: as above.
        ("graph_launch", |k| unsafe { k.graph_launch(null_mut(), null_mut()) }),
    ];
    for (name, call) in calls {
        let mut good = open_kernels("").unwrap();
        call(&mut good).unwrap();
        let mut bad = open_kernels(name).unwrap();
        caught(&call(&mut bad).unwrap_err(), "panicky", name);
        for (_, later) in calls {
            poisoned(&later(&mut bad).unwrap_err(), "panicky");
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
