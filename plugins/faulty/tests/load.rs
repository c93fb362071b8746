//! The built plugin passes the host's judgement, and wraps a transport that is built into the host.

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::Registry;
use tokenyard_testkit::built_plugin;

#[test]
fn the_loaded_plugin_wraps_a_transport_of_the_host() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let file = built_plugin(env!("CARGO_PKG_NAME"));
    let registry = Registry::load(std::slice::from_ref(&file)).unwrap();
    let faulty =
        registry.components().into_iter().find(|component| component.name == "faulty").unwrap();
    assert_eq!(faulty.file, Some(file));
    let probe = |text: &str| {
        registry.transport("faulty").unwrap().probe(&ComponentTable::from_text(text, "test.toml"))
    };
    let found = probe("inner = \"shm\"\nload_store = true").unwrap();
    assert_ne!(found.flags & abi::TY_CAP_LOAD_STORE, 0);
    assert_eq!(found.flags & abi::TY_CAP_ORDERED, 0);
    let error = probe("inner = \"absent\"").unwrap_err().to_string();
    assert!(error.contains("no transport is called `absent`"), "{error}");
}
