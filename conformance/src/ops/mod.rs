//! Operations beside MoE. Each has a folder of the name that it has in `core` and in the kernel sets, with its rules
//! and its cases of L1 to L3. The cases of all operations share the files beside these folders. Watched by
//! `tests/mutants`: each mutant breaks a rule that a case must find.

mod bodies;
mod case;
mod drawn;
pub(crate) mod end;
pub(crate) mod faults;
pub mod gather;
pub mod pipe;
pub(crate) mod reduce;
pub(crate) mod table;

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;

/// A case of L1 or L2.
pub struct OperationCase {
    /// The name, behind that of its level.
    pub name: String,
    /// One line for reports: the rule that must hold.
    pub about: &'static str,
    /// Ranks of a domain.
    pub ranks: u32,
    /// The body that every rank runs.
    pub body: OperationBody,
}

/// Returns the reason in place of a result where the components of the config do not have the operation.
pub type OperationBody = Box<dyn Fn(&Arc<World>, &Config) -> Result<Option<String>> + Send + Sync>;

/// The cases of L1.
pub fn values() -> impl Iterator<Item = OperationCase> {
    let sums = gather::values().chain(reduce::values());
    pipe::values().chain(sums).chain(table::values())
}

/// The cases of L2.
pub fn order() -> impl Iterator<Item = OperationCase> {
    let sums = gather::order().chain(reduce::order());
    pipe::order().chain(sums).chain(table::order())
}

/// Checks that a call failed in this way, about this rank.
fn expect<T>(kind: ErrorKind, rank: Option<u32>, result: tokenyard_core::Result<T>) -> Result<()> {
    let Err(error) = result else { bail!("found success; expected an error of kind {kind:?}") };
    ensure!(
        error.kind() == kind && error.rank() == rank,
        "found `{error}` of kind {:?}, about rank {:?}; expected kind {kind:?}, about rank {rank:?}",
        error.kind(),
        error.rank(),
    );
    Ok(())
}
