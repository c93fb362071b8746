//! Operations beside MoE, and sessions that they share with communicators.

pub mod pipe;

use std::sync::Arc;

use crate::Result;
use crate::bootstrap::World;
use crate::communicator::{Communicator, CommunicatorOptions};
use crate::config::Config;
use crate::session::opening::open;
use pipe::{Pipe, PipeOptions};

/// The users of one session: they share one set of transports and connections. Each has its own kernel set, windows,
/// queues and signals, so communicators may have another M, hidden size, top-k or number of experts each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionOptions {
    /// Communicators for MoE.
    pub communicators: Vec<CommunicatorOptions>,
    /// Pipes.
    pub pipes: Vec<PipeOptions>,
}

/// What [`SessionOptions::open`] has opened, in the order of the options.
#[derive(Debug)]
pub struct SessionUsers {
    /// Communicators for MoE.
    pub communicators: Vec<Communicator>,
    /// Pipes.
    pub pipes: Vec<Pipe>,
}

impl SessionOptions {
    /// Opens a session for these users on all ranks of `world`. Collective, as [`Communicator::open`], which opens a
    /// session of one user.
    ///
    /// Afterwards each is a user of its own: another thread may use it, ranks may use them in any order, and a refused
    /// call of one does not concern the others. Close or drop them in any order. The last one closes the transports.
    /// [`Communicator::renew`] opens a session for that communicator alone.
    ///
    /// Fabrics fix windows, queues and signals before ranks connect, so no user joins an open session.
    ///
    /// # Errors
    /// As [`Communicator::open`]. [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) without a user.
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where all together need more windows, queues or
    /// signals than a transport has, and for several users with kernels of a device, which number them from 0.
    pub fn open(&self, world: &Arc<World>, config: &Config) -> Result<SessionUsers> {
        let (ranks, options) = (world.ranks(), self.clone());
        let read = move || {
            let communicators = options.communicators.iter().map(|options| options.spec(ranks));
            communicators.chain(options.pipes.iter().map(|options| options.spec(ranks))).collect()
        };
        let mut opened = open(world, config, read)?.into_iter();
        // The iterators end with the shorter one, so the options come first: no user of the next kind is taken.
        let communicators = self.communicators.iter().zip(opened.by_ref());
        let communicators = communicators
            .map(|(options, user)| Communicator::made(user, config, options))
            .collect::<Result<_>>()?;
        let pipes = self.pipes.iter().zip(opened);
        let pipes = pipes.map(|(options, user)| Pipe::made(user, *options)).collect();
        Ok(SessionUsers { communicators, pipes })
    }
}
