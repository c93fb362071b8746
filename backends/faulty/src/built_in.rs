//! Registers this crate's component in the program that links it.

use std::hint::black_box;

use tokenyard_core::abi;
use tokenyard_core::export::{Exported, TRANSPORT_HEADER, TransportComponent};
use tokenyard_core::host::BuiltIn;

use crate::Faulty;

const TABLES: &[*const abi::TyTransportTable] = &[&raw const *TransportComponent::<Faulty>::TABLE];
static TRANSPORTS: Exported<abi::TyTransportExport> = Exported(abi::TyTransportExport {
    header: TRANSPORT_HEADER,
    components: TABLES.as_ptr(),
    count: TABLES.len(),
});

inventory::submit! { BuiltIn::Transport(&TRANSPORTS) }

/// Keeps this crate's component in the calling program, so that
/// [`Registry::built_in`](tokenyard_core::host::Registry::built_in) finds it: the compiler drops a
/// crate that a program depends on and never names.
pub fn link() {
    black_box(&TRANSPORTS);
}
