//! Rendezvous, collectives, agreement and liveness of the ranks.
//!
//! A rank finds out who it is ([`Identity`]), joins ([`World::join`]), and from then on has a few
//! small collectives and a view of who is alive ([`Liveness`]). This is for set-up, checks and
//! diagnosis: no token ever passes here.
//!
//! # Shape
//! A star: every rank has one TCP connection to rank 0. All that happens on it happens on one
//! control thread per world, on a current-thread runtime; nothing outside of this module is
//! asynchronous. There is no process-wide state: several ranks of one world, and several worlds,
//! may live in one process.
//!
//! # Who is trusted
//! A peer is believed once it has proven that it holds the job secret, and then every frame is
//! still checked for origin, direction, order and form (`noise`, `frame`, `message`). Before that it
//! may send one small message within five seconds, while no more come than the door has room for.
//! Without a secret the ranks may meet on the loopback interface only. What crosses a connection is
//! encrypted.
//!
//! # Every wait ends (INV-6)
//! - A rank whose connection closes without a goodbye is lost at once.
//! - A rank that sends no heartbeat for `deadline` is lost. Rank 0 decides, and tells the others;
//!   each decides about rank 0.
//! - A rank that lives but does not arrive is waited for up to `late`, and then named.
//!
//! Where losses are masked (`on_failure`), collectives go on without ranks that ended. A process may
//! then come back as such a rank: rank 0 keeps its door open, and a bring-up lets in who waits.
//!
//! # Where to find what
//! `identity`, `launcher`, `hostlist`: who am I · `interface`: at which address · `secret`, `noise`: keys · `frame`, `message`,
//! `text`: bytes · `rendezvous`, `exchange`, `door`, `handshake`: getting in · `link`: one connection ·
//! `hub`, `rounds`, `agreement`: rank 0 · `spoke`: the others · `liveness` · `members`: who is there · `waiting`: who waits for whom · `control`, `world`: the
//! thread and its interface.

mod agreement;
mod control;
mod door;
mod exchange;
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
mod members;
pub mod message;
pub mod noise;
mod rendezvous;
mod rounds;
mod secret;
mod spoke;
mod text;
mod waiting;
mod world;

#[cfg(test)]
mod tests;

pub(crate) use headway::Headway;
pub use hostlist::{MAX_HOSTS, expand as expand_host_list};
pub use identity::{BOOTSTRAP_VARIABLE, ExchangeFn, Identity, MAX_RANKS, RankId, Rendezvous};
pub use launcher::is_rank_of_mpirun;
pub(crate) use liveness::Ended;
pub use liveness::{Liveness, Loss, PeerState};
pub(crate) use members::{Members, Membership, Next};
pub(crate) use message::Ask;
pub use message::{MAX_REASON, MAX_TOPIC};
pub use secret::{
    MIN_SECRET_BYTES, SECRET_FILE_VARIABLE, SECRET_VARIABLE, Secret, environment,
    take_secret_from_environment,
};
pub use waiting::joins_under_way;
pub(crate) use world::{CallUnderWay, Witness};
pub use world::{MAX_WAIT, MIN_DEADLINE, World, WorldOptions};
