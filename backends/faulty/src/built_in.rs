//! Registers this crate's components in the program that links it.

use crate::Faulty;

tokenyard_core::built_in!(transports(Faulty));
