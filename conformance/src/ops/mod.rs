//! Operations beside MoE. Each has a folder of the name that it has in `core` and in the kernel sets, with its rules
//! and its cases of L1 to L3. Watched by `tests/mutants`: each mutant breaks a rule that a case must find.

pub mod pipe;

use std::sync::Arc;

use anyhow::Result;
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
