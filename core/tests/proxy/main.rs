//! A proxy with a share of a fabric that follows a script.
#![cfg(not(feature = "loom"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test helpers")]

mod behaviour;
mod properties;
mod scripted;
