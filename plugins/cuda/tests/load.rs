//! The built plugin passes the host's judgement, and loads on a machine without CUDA.

use std::process::Command;

use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::Registry;
use tokenyard_testkit::built_plugin;

#[test]
fn the_plugin_provides_both_components_and_links_no_cuda() {
    let file = built_plugin(env!("CARGO_PKG_NAME"));
    let registry = Registry::load(std::slice::from_ref(&file)).unwrap();
    let components: Vec<_> =
        registry.components().into_iter().map(|p| (p.kind, p.name, p.file)).collect();
    for (kind, name) in [("kernel set", "cuda"), ("transport", "nvlink")] {
        assert!(components.contains(&(kind, name, Some(file.clone()))), "{components:?}");
    }

    let linked = Command::new("ldd").arg(&file).output().unwrap();
    let linked = String::from_utf8(linked.stdout).unwrap();
    assert!(linked.contains("libc.so"), "{linked}");
    assert!(!["cuda", "nvrtc", "nvidia"].iter().any(|name| linked.contains(name)), "{linked}");
}

#[test]
fn a_component_says_what_is_wrong_with_its_table_before_it_looks_for_a_device() {
    let file = built_plugin(env!("CARGO_PKG_NAME"));
    let registry = Registry::load(std::slice::from_ref(&file)).unwrap();
    let table = ComponentTable::from_text("no_such_key = 1", "test.toml");
    let error = registry.kernels("cuda").unwrap().probe(&table).unwrap_err().to_string();
    assert!(error.contains("no_such_key"), "{error}");
}
