//! The rules of this repository that no compiler knows, as tests: its words, its names, the widths of its lines, its
//! folders. `cargo test -p tokenyard-lints` checks all.
#![cfg(test)]

mod arrows;
mod below_operations;
mod environment;
mod faces;
mod methods;
mod module_circles;
mod named;
mod names;
mod paragraphs;
mod product;
mod prose;
mod scaled_groups;
mod signatures;
mod sources;
mod texts;
mod widths;
