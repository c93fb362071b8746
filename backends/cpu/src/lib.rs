//! The CPU backend: the arithmetic of the `cpu` kernel set and its worker pool.

pub mod convert;
mod multiversion;

pub mod sum;

#[cfg(test)]
mod samples;
