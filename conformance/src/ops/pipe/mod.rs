//! The pipe: `rules` states what messages hold and between which ranks they go; `end` is the end of a rank, which
//! checks each message. `values` (L1), `order` (L2) and `faults` (L3) have the cases.

mod case;
mod end;
pub(crate) mod faults;
mod order;
mod rules;
mod values;

pub(crate) use self::end::PipeEnd;
use super::OperationCase;

/// The cases of L1.
pub fn values() -> impl Iterator<Item = OperationCase> {
    values::cases().into_iter().map(OperationCase::from)
}

/// The cases of L2.
pub fn order() -> impl Iterator<Item = OperationCase> {
    order::cases().into_iter().map(OperationCase::from)
}
