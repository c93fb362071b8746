//! The transports of the backends libfabric and verbs, built in, so that no plugin must be built first.

use tokenyard_core::abi;
use tokenyard_core::export::{Exported, TRANSPORT_HEADER, TransportComponent};
use tokenyard_core::host::BuiltIn;
use tokenyard_libfabric::Libfabric;
use tokenyard_verbs::Verbs;

const TABLES: &[*const abi::TyTransportTable] = &[
    &raw const *TransportComponent::<Libfabric>::TABLE,
    &raw const *TransportComponent::<Verbs>::TABLE,
];
static TRANSPORTS: Exported<abi::TyTransportExport> = Exported(abi::TyTransportExport {
    header: TRANSPORT_HEADER,
    components: TABLES.as_ptr(),
    count: TABLES.len(),
});

inventory::submit! { BuiltIn::Transport(&TRANSPORTS) }
