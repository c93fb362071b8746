//! Registers this crate's components in the program that links it.

use crate::HostTopology;

tokenyard_core::built_in!(topologies(HostTopology));
