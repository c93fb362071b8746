//! The built plugin passes the host's judgement and works through its tables.

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::{Registry, discover};
use tokenyard_core::topology::Discover;
use tokenyard_testkit::built_plugin;

#[test]
fn the_plugin_provides_its_components_once_each_and_they_run() {
    let file = built_plugin(env!("CARGO_PKG_NAME"));
    let registry = Registry::load(std::slice::from_ref(&file)).unwrap();
    let components: Vec<_> =
        registry.components().into_iter().map(|p| (p.kind, p.name, p.file)).collect();
    assert!(components.contains(&("transport", "shm", Some(file.clone()))), "{components:?}");
    assert!(components.contains(&("topology", "auto", Some(file.clone()))), "{components:?}");
    assert!(components.iter().all(|(_, _, from)| from.as_ref() == Some(&file)), "{components:?}");

    let none = ComponentTable::from_text("", "test.toml");
    let found = registry.transport("shm").unwrap().probe(&none).unwrap();
    assert_ne!(found.flags & abi::TY_CAP_LOAD_STORE, 0);
    let ask = Discover { rank: 0, ranks: 1, local_rank: 0 };
    let place = discover(&registry.topology("auto").unwrap(), &none, &ask).unwrap();
    assert!(!place.host.is_empty() && place.processors > 0, "{place:?}");
}
