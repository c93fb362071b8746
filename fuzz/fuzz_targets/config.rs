//! Any bytes as a config file: a one-line error of kind `Config`, or a config whose part tables are
//! TOML and word their errors. The same bytes as a part's table must not panic on the far side of
//! the plugin ABI.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokenyard_core::config::{Config, PartTable};
use tokenyard_core::{Error, ErrorKind};
use toml::de::DeTable;

fuzz_target!(|bytes: &[u8]| {
    match Config::parse_bytes(bytes, "fuzz.toml") {
        Err(error) => check_error(&error),
        Ok(config) => {
            let parts = [&config.kernels, &config.topology].into_iter();
            for choice in parts.chain(&config.scale_up).chain(&config.scale_out) {
                DeTable::parse(choice.table.text()).expect("a part's table is TOML");
                refuse_as_part(&choice.table);
            }
        }
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        refuse_as_part(&PartTable::from_text(text, "fuzz.toml"));
    }
});

/// Reads the table as a type that no table fits.
fn refuse_as_part(table: &PartTable) {
    check_error(&table.parse::<bool>("part").expect_err("a table is not a bool"));
    check_error(&table.invalid("part", "a.b", "is odd"));
}

fn check_error(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(!error.to_string().contains('\n'), "{error}");
}
