//! Operations beside MoE. Each is a user of a session of its own: no expert and no row is known here.

pub mod pipe;
