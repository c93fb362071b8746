//! Reduce-scatter and all-reduce: `rules` states what sums are; `end` is the end of a rank, which checks each of them.
//! `values` (L1) and `order` (L2) have the cases.

mod end;
mod order;
mod rules;
mod values;

pub(crate) use self::end::ReduceEnd;
pub(crate) use self::rules::Form;
use super::OperationCase;

/// The cases of L1.
pub(super) fn values() -> impl Iterator<Item = OperationCase> {
    values::cases().into_iter().map(OperationCase::from)
}

/// The cases of L2.
pub(super) fn order() -> impl Iterator<Item = OperationCase> {
    order::cases().into_iter().map(OperationCase::from)
}
