//! With the feature `loom`, the hand-offs are checked under all schedules:
//! `cargo test -p tokenyard-core --features loom --lib proxy::`.

#[cfg(feature = "loom")]
mod model;

#[cfg(not(feature = "loom"))]
mod behaviour;
#[cfg(not(feature = "loom"))]
mod properties;
#[cfg(not(feature = "loom"))]
mod scripted;
