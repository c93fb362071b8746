//! Rendezvous, collectives, agreement and liveness of the ranks.
//!
//! A rank resolves its identity ([`Identity`]), joins ([`World::join`]), and from then on has a few
//! small collectives and a view of the state of all ranks ([`Liveness`]). This serves set-up, checks
//! and diagnosis: no token ever passes here.
//!
//! # Shape
//! A star: every rank has one TCP connection to rank 0. One control thread per world serves it, on a
//! current-thread runtime; nothing outside of this crate is asynchronous. There is no process-wide
//! state: several ranks of one world, and several worlds, may live in one process.
//!
//! # Trust
//! A peer is trusted once it has proven that it holds the job secret, and even then every frame is
//! checked for origin, direction, order and form (`noise`, `frame`, `message`). Before that it may send
//! one small message within five seconds, as long as the door has room for it. Without a secret the
//! ranks may meet on the loopback interface only. All traffic of a connection is encrypted.
//!
//! # Every wait ends (INV-6)
//! - A rank whose connection closes without a goodbye is lost at once.
//! - A rank that sends no heartbeat for `deadline` is lost. Rank 0 decides, and reports it to the
//!   others; each rank decides about rank 0.
//! - The others wait for a live rank that does not arrive for up to `late`, and then name it in an
//!   error.
//!
//! Where losses are masked (`on_failure`), collectives continue without ranks that ended. A process may
//! then come back as such a rank: the door of rank 0 stays open, and a bring-up lets in waiting
//! processes.
//!
//! # Where to find what
//! `identity`, `launcher`, `hostlist`: the rank's identity · `interface`: its address · `secret`, `noise`:
//! keys · `frame`, `message`, `text`: bytes · `rendezvous`, `loopback`, `other_hosts`, `exchange`, `roster`,
//! `files`, `door`, `handshake`: joining ·
//! `link`: one connection · `hub`, `rounds`, `agreement`: rank 0 · `spoke`: the others · `liveness` ·
//! `members`: the present ranks · `waiting`: reports of waits · `warnings` · `announcer` · `control`, `world`:
//! the thread and its interface.
//!
//! # Tests
//! A change of a message is a new version of the protocol (`noise`). Watched by the tests in these files, `tests`
//! (whole worlds with threads as ranks), and `fuzz/fuzz_targets/frame.rs`.

mod agreement;
mod announcer;
mod config;
mod control;
mod door;
mod exchange;
mod files;
pub mod frame;
mod handshake;
mod headway;
mod hostlist;
mod hub;
mod identity;
mod interface;
mod launcher;
mod link;
mod liveness;
mod loopback;
pub mod machine;
mod members;
pub mod message;
pub mod noise;
mod other_hosts;
mod rendezvous;
mod roster;
mod rounds;
mod secret;
mod sparse_log;
mod spoke;
mod text;
mod waiting;
mod warnings;
mod world;

#[cfg(test)]
mod tests;

pub use announcer::{Announcer, OnCall, with_call};
pub use config::{OnFailure, WorldConfig};
pub use control::beat;
pub use headway::Headway;
pub use hostlist::{MAX_HOSTS, expand as expand_host_list};
pub use identity::{
    BOOTSTRAP_VARIABLE, ExchangeFn, Identity, Launched, MAX_RANKS, RankId, Rendezvous,
};
pub use launcher::{is_rank_of_mpirun, launched_world, local_rank_of_environment, unbracketed};
pub use liveness::{Ended, Liveness, Loss, PeerState};
pub use members::{Members, Membership, Next};
pub use message::{Ask, MAX_REASON, MAX_TOPIC};
pub use other_hosts::OtherHosts;
pub use secret::{
    MIN_SECRET_BYTES, SECRET_FILE_VARIABLE, SECRET_VARIABLE, Secret, environment,
    take_secret_from_environment,
};
pub use sparse_log::SparseLog;
pub use waiting::joins_under_way;
pub use warnings::{EventText, ToRankZero};
pub use world::{CallUnderWay, Collective, MAX_WAIT, MIN_DEADLINE, Witness, World, WorldOptions};
