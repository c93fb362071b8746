//! With `--cfg tokenyard_loom`, the hand-offs are checked under all schedules:
//! `RUSTFLAGS="--cfg tokenyard_loom" cargo test -p tokenyard-core --lib proxy::`.

#[cfg(tokenyard_loom)]
mod model;

#[cfg(not(tokenyard_loom))]
mod behaviour;
#[cfg(not(tokenyard_loom))]
mod engine;
#[cfg(not(tokenyard_loom))]
mod properties;
