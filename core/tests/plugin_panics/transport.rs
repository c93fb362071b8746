//! A transport that panics.

use std::time::Duration;

use tokenyard_core::export::{self, Exported, TransportComponent};
use tokenyard_core::host::{BuiltIn, OpenTransport, Registry, services};
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, NO_CAPABILITIES, NO_COMMAND, Team, Transport,
    TransportNeeds, TransportOpen, Window,
};
use tokenyard_core::{Result, abi};

use crate::{Config, caught, config, poisoned, window};

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

    fn open(config: Config, _: &TransportOpen<'_>) -> Result<Self> {
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

    fn commit(&mut self) -> Result<()> {
        self.0.enter("commit");
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
    const TABLES: &[*const abi::TyTransportTable] =
        &[&raw const *TransportComponent::<Panicky>::TABLE];
    Exported(abi::TyTransportExport {
        header: export::TRANSPORT_HEADER,
        components: TABLES.as_ptr(),
        count: TABLES.len(),
    })
};
inventory::submit! { BuiltIn::Transport(&TRANSPORTS) }

pub(crate) fn open_transport(panic_in: &str) -> Result<OpenTransport> {
    let needs = TransportNeeds {
        windows: 1,
        queues: 1,
        signals: 1,
        queue_depth: 1,
        largest_put: 8,
        deadline: Duration::from_secs(1),
    };
    let component = Registry::built_in()?.transport("panicky")?;
    component.open(&config(panic_in), &TransportOpen::new(&Team::world(0, 1), &needs))
}

fn command() -> Command {
    Command { op: abi::TY_OP_SIGNAL, add: 1, ..NO_COMMAND }
}

#[test]
fn a_panic_in_probe_or_open_is_an_error_and_the_next_call_works() {
    let component = Registry::built_in().unwrap().transport("panicky").unwrap();
    caught(&component.probe(&config("probe")).unwrap_err(), "panicky", "probe");
    caught(&open_transport("open").map(|_| ()).unwrap_err(), "panicky", "open");
    component.probe(&config("")).unwrap();
    open_transport("").unwrap().health().unwrap();
}

#[test]
fn a_panic_crosses_the_table_as_its_own_status() {
    let table = TransportComponent::<Panicky>::TABLE;
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
    let calls: [(&str, Call); 8] = [
        ("memory_needs", |t| t.memory_needs().map(|_| ())),
        ("alloc", |t| t.alloc(0, 8).map(|_| ())),
        // SAFETY: the component does not use the window.
        ("register", |t| unsafe { t.register(&window()) }),
        ("endpoint", |t| t.endpoint(0).map(|_| ())),
        ("connect", |t| t.connect(0, &[])),
        ("commit", |t| t.commit()),
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
