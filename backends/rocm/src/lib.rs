//! The AMD half of `tokenyard-gpu`: clang, which compiles the kernels for gfx942 and gfx950.
//!
//! **Nothing here has run on an AMD GPU.** Kernels are compiled for them, and run on a model of a GPU with
//! waves of 64. There are no components yet: see `docs.md` in this folder.

mod clang;

pub use clang::Clang;
