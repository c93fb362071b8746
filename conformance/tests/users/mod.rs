//! Each kind of transport, and tensors of bytes, for the tests of operations beside MoE.
#![allow(
    clippy::unwrap_used,
    dead_code,
    reason = "tests fail by panic, and each takes a part of this"
)]

use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::config::Config;

pub(crate) const STORES: &str = "[transport.scale_up]\nuse = \"shm\"\n";
pub(crate) const PUTS: &str =
    "[transport.scale_up]\nuse = \"shm\"\n[transport.scale_up.shm]\nload_store = false\n";
pub(crate) const REORDERED: &str = "[transport.scale_up]\nuse = \"faulty\"\n\
                                    [transport.scale_up.faulty]\ninner = \"shm\"\nseed = 3\n";
pub(crate) const DRIVEN: &str = "[transport.scale_up]\nuse = \"libfabric\"\n\
                                 [transport.scale_up.libfabric]\nprovider = \"tcp\"\n";
/// A transport that a thread drives, with gets.
pub(crate) const GETS: &str = "[transport.scale_up]\nuse = \"libfabric\"\n\
                               [transport.scale_up.libfabric]\nprovider = \"tcp\"\nget = true\n";
const RAILS: &str =
    "[transport.scale_out]\nuse = \"shm\"\n[transport.scale_out.shm]\nload_store = false\n";

/// A world of tests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    /// The transport inside domains.
    pub(crate) inside: &'static str,
    pub(crate) ranks: u32,
    pub(crate) domains: u32,
}

const fn spread(inside: &'static str, ranks: u32, domains: u32) -> Spread {
    Spread { inside, ranks, domains }
}

/// Two domains of two ranks.
pub(crate) const TWO_LEVELS: Spread = spread(STORES, 4, 2);

pub(crate) const WORLDS: [Spread; 7] = [
    spread(STORES, 3, 1),
    spread(PUTS, 3, 1),
    spread(REORDERED, 2, 1),
    spread(DRIVEN, 2, 1),
    TWO_LEVELS,
    // Links inside a domain put as well.
    spread(PUTS, 4, 2),
    spread(STORES, 6, 3),
];

impl Spread {
    pub(crate) fn config(self) -> Config {
        let between = match self.domains {
            1 => String::new(),
            domains => format!("{RAILS}[topology]\ndomains = {domains}\n"),
        };
        parsed("deadline_ms = 10000", &format!("{}{between}", self.inside))
    }
}

/// A config of one domain.
pub(crate) fn config(transports: &str) -> Config {
    parsed("deadline_ms = 10000", transports)
}

/// A config with these lines about the world.
pub(crate) fn parsed(world: &str, transports: &str) -> Config {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_faulty::link();
    let text = format!("[world]\n{world}\n[kernels]\nuse = \"cpu\"\n{transports}");
    Config::parse(&text, "users").unwrap()
}

/// Losses are masked.
pub(crate) fn masked() -> Config {
    parsed("deadline_ms = 10000\non_failure = \"mask\"", STORES)
}

pub(crate) fn refs(data: &[Vec<u8>]) -> Vec<TensorRef<'_>> {
    data.iter().map(|one| TensorRef::from_slice(one, 1, one.len()).unwrap()).collect()
}

pub(crate) fn muts(data: &mut [Vec<u8>]) -> Vec<TensorMut<'_>> {
    data.iter_mut()
        .map(|one| {
            let length = one.len();
            TensorMut::from_slice(one.as_mut_slice(), 1, length).unwrap()
        })
        .collect()
}
