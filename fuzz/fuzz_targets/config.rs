//! Any bytes as a config file: a one-line error of kind `Config`, or a config whose component tables are
//! TOML and word their errors. The same bytes as a component's table must not panic on the far side of
//! the plugin ABI.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokenyard_core::config::{Config, ComponentTable};
use tokenyard_core::{Error, ErrorKind};
use toml::de::DeTable;

fuzz_target!(|bytes: &[u8]| {
    match Config::parse_bytes(bytes, "fuzz.toml") {
        Err(error) => check_error(&error),
        Ok(config) => {
            let components = [&config.kernels, &config.topology].into_iter();
            for choice in components.chain(&config.scale_up).chain(&config.scale_out) {
                DeTable::parse(choice.table.text()).expect("a component's table is TOML");
                refuse_as_component(&choice.table);
            }
        }
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        refuse_as_component(&ComponentTable::from_text(text, "fuzz.toml"));
    }
});

/// Reads the table as a type that no table fits.
fn refuse_as_component(table: &ComponentTable) {
    check_error(&table.parse::<bool>("component").expect_err("a table is not a bool"));
    check_error(&table.invalid("component", "a.b", "is odd"));
}

fn check_error(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(!error.to_string().contains('\n'), "{error}");
}
