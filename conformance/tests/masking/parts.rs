//! The parts of the libfabric backend, built in, so that no plugin has to be built first.

use tokenyard_core::abi;
use tokenyard_core::export::{Exported, TRANSPORT_HEADER, TransportPart};
use tokenyard_core::host::BuiltIn;
use tokenyard_libfabric::Libfabric;

const TABLES: &[*const abi::TyTransportTable] = &[&raw const *TransportPart::<Libfabric>::TABLE];
static TRANSPORTS: Exported<abi::TyTransportExport> = Exported(abi::TyTransportExport {
    header: TRANSPORT_HEADER,
    parts: TABLES.as_ptr(),
    count: TABLES.len(),
});

inventory::submit! { BuiltIn::Transport(&TRANSPORTS) }
