//! Starts ranks as processes on this machine, and ends them all. A job of several machines runs on
//! [`Hosts`], which are network namespaces.
//!
//! A [`Job`] is the program and the number of ranks. [`Job::start`] makes a private folder for the
//! rendezvous, starts one process per rank and returns [`Running`], from which the launcher reads
//! [`Event`]s. Ranks write lines for the launcher to stdout; stderr is for people.
//!
//! Ranks are ended by:
//! - the owner of [`Running`]: [`Running::wait_all`] with its deadline, or dropping it, kills and
//!   reaps the remaining processes (stopped ones too) and removes the folder;
//! - a signal that ends the launcher, where it calls [`interrupt::note`]: every wait for an event then
//!   returns [`Interrupted`](interrupt::Interrupted), and dropping [`Running`] gives the ranks SIGTERM first;
//! - the kernel, if the launcher itself is killed: a rank calls [`adopt`] first and from then on
//!   dies with its launcher. The folder then remains in the temporary directory; it holds no
//!   secret. Ranks share the launcher's process group, so Ctrl-C reaches them as well.
//!
//! The launcher does not follow forks: a rank must itself end the processes that it starts.
//!
//! Watched by the tests in these files, and `tests/{jobs,orphans,hosts}.rs`.

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
