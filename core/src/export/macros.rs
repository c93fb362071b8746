//! The export of components from a crate: as symbols of a plugin, or built into a program.

/// A static of the ABI with the tables of components.
#[doc(hidden)]
#[macro_export]
macro_rules! exported {
    (transports, $($component:ty),+) => {
        $crate::exported!(TyTransportExport, TyTransportTable, TransportComponent, TRANSPORT_HEADER, $($component),+)
    };
    (kernels, $($component:ty),+) => {
        $crate::exported!(TyKernelsExport, TyKernelsTable, KernelsComponent, KERNELS_HEADER, $($component),+)
    };
    (topologies, $($component:ty),+) => {
        $crate::exported!(TyTopologyExport, TyTopologyTable, TopologyComponent, TOPOLOGY_HEADER, $($component),+)
    };
    ($export:ident, $table:ident, $of:ident, $header:ident, $($component:ty),+) => {{
        const TABLES: &[*const $crate::abi::$table] =
            &[$(&raw const *$crate::export::$of::<$component>::TABLE),+];
        $crate::export::Exported($crate::abi::$export {
            header: $crate::export::$header,
            components: TABLES.as_ptr(),
            count: TABLES.len(),
        })
    }};
}

/// Exports transports from a `cdylib`: `export_transports!(Shm);`
#[macro_export]
macro_rules! export_transports {
    ($($component:ty),+ $(,)?) => {
        /// The transports of this plugin.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static tokenyard_transport_v1: $crate::export::Exported<$crate::abi::TyTransportExport> =
            $crate::exported!(transports, $($component),+);
    };
}

/// Exports kernel sets from a `cdylib`: `export_kernels!(CpuKernels);`
#[macro_export]
macro_rules! export_kernels {
    ($($component:ty),+ $(,)?) => {
        /// The kernel sets of this plugin.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static tokenyard_kernels_v0: $crate::export::Exported<$crate::abi::TyKernelsExport> =
            $crate::exported!(kernels, $($component),+);
    };
}

/// Exports topologies from a `cdylib`: `export_topologies!(HostTopology);`
#[macro_export]
macro_rules! export_topologies {
    ($($component:ty),+ $(,)?) => {
        /// The topologies of this plugin.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static tokenyard_topology_v1: $crate::export::Exported<$crate::abi::TyTopologyExport> =
            $crate::exported!(topologies, $($component),+);
    };
}

/// Registers components in the program that links this crate, and makes the function `link`:
/// `built_in!(transports(Shm), kernels(CpuKernels));`
#[macro_export]
macro_rules! built_in {
    ($($kind:ident($($component:ty),+)),+ $(,)?) => {
        $($crate::built_in_static!($kind, $($component),+);)+

        /// Links this crate's components into the calling program, so that
        /// [`Registry::built_in`]($crate::host::Registry::built_in) finds them.
        ///
        /// They register themselves before `main`; but the linker drops a crate that a program depends on
        /// and never names. A program that wants the components built in calls this once, anywhere.
        pub fn link() {
            $(std::hint::black_box($crate::built_in_static!($kind));)+
        }
    };
}

/// The statics of [`built_in!`](crate::built_in).
#[doc(hidden)]
#[macro_export]
macro_rules! built_in_static {
    (transports) => { &TRANSPORTS };
    (kernels) => { &KERNELS };
    (topologies) => { &TOPOLOGIES };
    (transports, $($component:ty),+) => {
        static TRANSPORTS: $crate::export::Exported<$crate::abi::TyTransportExport> =
            $crate::exported!(transports, $($component),+);
        $crate::export::inventory::submit! { $crate::host::BuiltIn::Transport(&TRANSPORTS) }
    };
    (kernels, $($component:ty),+) => {
        static KERNELS: &[$crate::export::InProcess] =
            &[$($crate::export::InProcess::of::<$component>()),+];
        $crate::export::inventory::submit! { $crate::host::BuiltIn::KernelSets(KERNELS) }
    };
    (topologies, $($component:ty),+) => {
        static TOPOLOGIES: $crate::export::Exported<$crate::abi::TyTopologyExport> =
            $crate::exported!(topologies, $($component),+);
        $crate::export::inventory::submit! { $crate::host::BuiltIn::Topology(&TOPOLOGIES) }
    };
}
