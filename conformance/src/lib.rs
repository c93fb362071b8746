//! The conformance suite: the rules that every communicator must obey, whatever its components.
//!
//! [`moe`] has the cases of dispatch and combine, and the oracle that judges them; [`ops`] has those of each other
//! operation; [`transport`] has the cases for a transport alone; [`faults`] loses ranks and links under all of them;
//! [`ranks`] makes a world of threads.
//!
//! A case is added, or made sharper; it is not weakened for one component. Watched by `conformance/tests`: sound
//! components pass, and each case catches its mutants.

pub mod claims;
pub mod device;
pub mod expected;
pub mod faults;
pub mod moe;
mod names;
pub mod ops;
pub mod pace;
pub mod ranks;
pub mod report;
pub mod runner;
pub mod suite;
pub mod transport;
