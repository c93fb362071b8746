//! Rendezvous, exchange and heartbeats of the ranks.
