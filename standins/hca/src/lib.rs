//! A ConnectX in software: a **stand-in for hardware, for tests only**. It reads doorbells and work requests
//! of queue pairs, executes them in the memory of this process, writes completions, and stops at a driver's
//! first mistake. `docs.md` in this folder lists the rules, the source of each, and the limits of such tests.
//!
//! A [`Hca`] is one device. It does nothing by itself. Its owner passes doorbells to it ([`Hca::ring`]) or lets
//! it look for them ([`Hca::poll_registers`]), lets time pass ([`Hca::step`]) and carries its packets
//! ([`Hca::take_packets`], [`Hca::receive`]). [`Switch`] does that for several devices of one process. So a
//! run is the same on the same seed.
//!
//! Threads: a device belongs to one thread at a time.

mod commands;
mod completion;
mod doorbell;
mod fault;
mod hca;
mod lifecycle;
mod memory;
mod object;
mod parse;
mod random;
mod receives;
mod requester;
mod responder;
mod store;
mod switch;
mod violation;
mod wire;

pub use commands::Refused;
pub use fault::{Fault, FaultPlan};
pub use hca::{Config, Event, Hca, Order, Profile};
pub use lifecycle::{CqRequest, QpRequest, ReceiveRequest, Receives};
pub use memory::{Arena, HostMemory, Memory, Unmapped};
pub use object::{Access, Connection, Region, State};
pub use random::Random;
pub use switch::Switch;
pub use violation::{Rule, Violation};
pub use wire::{Body, End, Packet};
