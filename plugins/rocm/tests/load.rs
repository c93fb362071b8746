//! The built plugin passes the host's judgement, and loads on a machine without ROCm.

use std::process::Command;

use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::Registry;
use tokenyard_testkit::built_plugin;

#[test]
fn the_plugin_provides_both_components_and_links_nothing_of_rocm() {
    let file = built_plugin(env!("CARGO_PKG_NAME"));
    let registry = Registry::load(std::slice::from_ref(&file)).unwrap();
    let components: Vec<_> =
        registry.components().into_iter().map(|p| (p.kind, p.name, p.file)).collect();
    for (kind, name) in [("kernel set", "rocm"), ("transport", "xgmi")] {
        assert!(components.contains(&(kind, name, Some(file.clone()))), "{components:?}");
    }

    let linked = Command::new("ldd").arg(&file).output().unwrap();
    let linked = String::from_utf8(linked.stdout).unwrap();
    assert!(linked.contains("libc.so"), "{linked}");
    assert!(!["libamd", "libhip", "libhsa"].iter().any(|name| linked.contains(name)), "{linked}");
}

#[test]
fn without_rocm_both_components_name_the_libraries_of_the_folder_in_their_tables() {
    let file = built_plugin(env!("CARGO_PKG_NAME"));
    let registry = Registry::load(std::slice::from_ref(&file)).unwrap();
    let table = ComponentTable::from_text("libraries = \"/nowhere/lib\"", "test.toml");
    let kernels = registry.kernels("rocm").unwrap().probe(&table).unwrap_err();
    let link = registry.transport("xgmi").unwrap().probe(&table).unwrap_err();
    for error in [kernels, link] {
        let text = error.to_string();
        assert!(text.contains("/nowhere/lib/libamdhip64.so.7"), "{text}");
        assert!(
            error.fix().is_some_and(|fix| fix.contains("`libraries` in [kernels.rocm]")),
            "{error:?}"
        );
    }
}
