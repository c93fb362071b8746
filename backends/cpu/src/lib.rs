//! The CPU backend: the arithmetic of the `cpu` kernel set and its worker pool.

pub mod convert;
mod element;
pub mod kernels;
mod lanes;
pub mod pool;
pub mod sum;

#[cfg(test)]
mod samples;
