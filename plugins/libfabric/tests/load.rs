//! The built plugin passes the host's judgement, and loads on a machine without libfabric.

use std::process::Command;

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::Registry;
use tokenyard_testkit::built_plugin;

#[test]
fn the_plugin_provides_both_components_and_links_no_fabric() {
    let file = built_plugin(env!("CARGO_PKG_NAME"));
    let registry = Registry::load(std::slice::from_ref(&file)).unwrap();
    let components: Vec<_> =
        registry.components().into_iter().map(|p| (p.kind, p.name, p.file)).collect();
    for name in ["libfabric", "efa"] {
        assert!(components.contains(&("transport", name, Some(file.clone()))), "{components:?}");
    }
    let table = ComponentTable::from_text("provider = \"shm\"", "test.toml");
    let found = registry.transport("libfabric").unwrap().probe(&table).unwrap();
    assert_ne!(found.flags & abi::TY_CAP_MANUAL_PROGRESS, 0);

    let linked = Command::new("ldd").arg(&file).output().unwrap();
    let linked = String::from_utf8(linked.stdout).unwrap();
    assert!(linked.contains("libc.so") && !linked.contains("fabric.so.1"), "{linked}");
}
