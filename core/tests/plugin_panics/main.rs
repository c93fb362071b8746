//! A component that panics becomes an error with its text; the process lives, and the component is not
//! called again. Built-in tables are judged and called as loaded ones are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test helpers")]

mod kernels;
mod transport;

use kernels::open_kernels;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::export::Exported;
use tokenyard_core::host::Registry;
use tokenyard_core::transport::{NO_WINDOW, Window};
use tokenyard_core::{Error, ErrorKind, abi};
use transport::open_transport;

/// The call in which a component panics.
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

fn config(call: &str) -> ComponentTable {
    ComponentTable::from_text(&format!("panic_in = \"{call}\"\n"), "a.toml")
}

fn window() -> Window {
    #[repr(align(128))]
    struct Aligned([u8; 8]);
    static MEMORY: Exported<Aligned> = Exported(Aligned([0; 8]));
    Window {
        kind: abi::TY_MEMORY_HOST,
        pointer: (&raw const MEMORY.0.0).cast_mut().cast(),
        bytes: 8,
        ..NO_WINDOW
    }
}

/// A panic that was caught: internal, with the component's name, the call and the panic's text.
fn caught(error: &Error, component: &str, call: &str) {
    assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
    for wanted in
        [format!("component: {component}"), "panicked: ".into(), format!("boom in {call}")]
    {
        assert!(error.to_string().contains(&wanted), "expected `{wanted}` in: {error}");
    }
}

/// Every later call fails too, and reports the reason.
fn poisoned(error: &Error, component: &str) {
    assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
    let text = error.to_string();
    assert!(text.contains("panicked before") && text.contains(component), "{text}");
}

#[test]
fn a_panic_while_closing_does_not_end_the_process() {
    drop(open_transport("close").unwrap());
    drop(open_kernels("close").unwrap());
    open_transport("").unwrap().health().unwrap();
}

#[test]
fn an_unknown_key_of_a_component_is_named_with_its_line() {
    let component = Registry::built_in().unwrap().transport("panicky").unwrap();
    let table = ComponentTable::from_text("\n\n\n\n\n\npanik_in = \"probe\"\n", "a.toml");
    for error in [
        component.probe(&table).map(|_| ()).unwrap_err(),
        Registry::built_in().unwrap().kernels("panicky").unwrap().probe(&table).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        let text = error.to_string();
        assert!(text.contains("`panik_in`") && text.contains("panic_in"), "{text}");
        assert!(text.contains(":7") || text.contains("line 7"), "{text}");
    }
}
