//! Starts ranks as processes on this machine and leaves none behind; on [`Hosts`], which are network
//! namespaces, where a job of several machines is wanted.
//!
//! A [`Job`] says what to start. [`Job::start`] makes a private folder for the rendezvous, starts
//! one process per rank and returns [`Running`], from which the launcher reads [`Event`]s. Ranks
//! speak lines on stdout; stderr is for people.
//!
//! Who ends the ranks:
//! - the owner of [`Running`]: [`Running::wait_all`] with its deadline, or dropping it, kills and
//!   reaps what is left (stopped processes too) and removes the folder;
//! - a signal that ends the launcher, where it calls [`interrupt::note`]: every wait for an event then
//!   returns [`Interrupted`](interrupt::Interrupted), and dropping [`Running`] gives the ranks SIGTERM first;
//! - the kernel, if the launcher itself is killed: a rank calls [`adopt`] first thing and from then
//!   on dies with its launcher. The folder then stays behind, empty of secrets, in the temporary
//!   directory. Ranks share the launcher's process group, so Ctrl-C reaches them as well.
//!
//! Ranks that fork are not followed: a process that a rank starts is that rank's to end.

mod adopt;
mod event;
mod hosts;
pub mod interrupt;
mod job;
mod keeper;
mod lines;
mod running;

pub use adopt::adopt;
pub use event::{Event, Exit, Outcome};
pub use hosts::{Hosts, Launcher, Net};
pub use job::{Job, Stderr};
pub use running::Running;
