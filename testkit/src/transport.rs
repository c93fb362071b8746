//! Macros for a test's transport that wraps another one. A crate that uses them depends on
//! `tokenyard-core`.

/// Writes methods of a `Transport` that pass each call unchanged to the transport in a field of
/// `self`: `pass_on!(inner: register, endpoint, connect, poll, read_signal, health);`
#[macro_export]
macro_rules! pass_on {
    ($inner:ident: $($call:ident),+ $(,)?) => {
        $($crate::pass_on!(@ $call $inner);)+
    };
    (@ register $inner:ident) => {
        unsafe fn register(
            &mut self,
            window: &::tokenyard_core::transport::Window,
        ) -> ::tokenyard_core::Result<()> {
            // SAFETY: by this function's contract; `self` lives as long as the transport that it
            // wraps.
            unsafe { self.$inner.register(window) }
        }
    };
    (@ alloc $inner:ident) => {
        fn alloc(
            &mut self,
            id: u32,
            bytes: u64,
        ) -> ::tokenyard_core::Result<::tokenyard_core::transport::Window> {
            self.$inner.alloc(id, bytes)
        }
    };
    (@ endpoint $inner:ident) => {
        fn endpoint(&mut self, peer: u32) -> ::tokenyard_core::Result<Vec<u8>> {
            self.$inner.endpoint(peer)
        }
    };
    (@ connect $inner:ident) => {
        fn connect(&mut self, peer: u32, data: &[u8]) -> ::tokenyard_core::Result<()> {
            self.$inner.connect(peer, data)
        }
    };
    (@ peer_address $inner:ident) => {
        fn peer_address(&self, window: u32, peer: u32) -> ::tokenyard_core::Result<*mut u8> {
            self.$inner.peer_address(window, peer)
        }
    };
    (@ post $inner:ident) => {
        unsafe fn post(
            &self,
            queue: u32,
            commands: &[::tokenyard_core::transport::Command],
        ) -> ::std::result::Result<usize, i32> {
            // SAFETY: by this function's contract.
            unsafe { self.$inner.post(queue, commands) }
        }
    };
    (@ poll $inner:ident) => {
        fn poll(
            &self,
            queue: u32,
            events: &mut [::tokenyard_core::transport::Event],
        ) -> ::std::result::Result<usize, i32> {
            self.$inner.poll(queue, events)
        }
    };
    (@ read_signal $inner:ident) => {
        fn read_signal(&self, queue: u32, id: u32) -> u64 {
            self.$inner.read_signal(queue, id)
        }
    };
    (@ health $inner:ident) => {
        fn health(&self) -> ::tokenyard_core::Result<()> {
            self.$inner.health()
        }
    };
    (@ progress $inner:ident) => {
        fn progress(&self) -> ::std::result::Result<bool, i32> {
            self.$inner.progress()
        }
    };
}

/// Registers a transport of the test, so that a config may name it.
#[macro_export]
macro_rules! built_in_transport {
    ($component:ty) => {
        static TRANSPORTS: ::tokenyard_core::export::Exported<
            ::tokenyard_core::abi::TyTransportExport,
        > = ::tokenyard_core::exported!(transports, $component);
        ::tokenyard_core::export::inventory::submit! { ::tokenyard_core::host::BuiltIn::Transport(&TRANSPORTS) }
    };
}
