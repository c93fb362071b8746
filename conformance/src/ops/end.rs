//! The end of an operation on a rank, as cases use it.

use std::sync::Arc;

use anyhow::{Context, Result};
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Communicator, CommunicatorOptions};
use tokenyard_core::config::Config;
use tokenyard_core::host::tensors::TensorMemory;
use tokenyard_core::ops::{SessionOptions, SessionUsers};
use tokenyard_core::{Error, ErrorKind};

/// An operation that numbers what it passes, and checks it.
pub(crate) trait OperationEnd: Sized + 'static {
    /// The folder of the operation, which is its word in the names of cases.
    const WORD: &'static str;
    /// The user of a session that it opens.
    type Options: Copy + Send + Sync;
    /// How much goes at a time.
    type Length: Copy + Sync + 'static;

    /// Asks a session for a user.
    fn ask(session: &mut SessionOptions, options: Self::Options);

    /// The end of the user that was asked for.
    fn take(
        users: &mut SessionUsers,
        place: WorldPlace,
        lengths: &'static [Self::Length],
    ) -> Option<Self>;

    /// Where it is.
    fn place(&self) -> &WorldPlace;

    /// How many may be in flight.
    fn in_flight(&self) -> u32;

    /// Sends what is next, to each rank that it goes to.
    fn send_next(&mut self) -> Result<()>;

    /// Receives what is next, of each rank that it comes from, and checks it.
    fn recv_next(&mut self) -> Result<()>;

    /// Whether an error has closed it.
    fn is_closed(&self) -> bool;

    /// Ends all that an error has left open, so that it can be closed.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Closes it on all ranks together.
    fn close(self) -> Result<()>;
}

/// Where an end is.
pub(crate) struct WorldPlace {
    pub(super) world: Arc<World>,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) domains: u32,
    /// Where its tensors lie.
    pub(super) memory: TensorMemory,
}

impl WorldPlace {
    pub(super) fn of(world: &Arc<World>, config: &Config) -> Self {
        let (rank, ranks, world) = (world.rank(), world.ranks(), Arc::clone(world));
        // Without scale-up one transport reaches all ranks, so it is as one domain.
        let domains = config.domains.filter(|_| config.scale_up.is_some()).unwrap_or(1);
        Self { world, rank, ranks, domains, memory: TensorMemory::Host }
    }
}

/// An end, and the communicators beside it; or the reason why the components of the config do not have the operation.
pub(crate) type Opened<E> = std::result::Result<(E, Vec<Communicator>), String>;

/// Opens an operation, and these communicators in the same session. Collective.
///
/// # Errors
/// As [`SessionOptions::open`].
pub(crate) fn open<E: OperationEnd>(
    world: &Arc<World>,
    config: &Config,
    options: E::Options,
    lengths: &'static [E::Length],
    communicators: Vec<CommunicatorOptions>,
) -> Result<Opened<E>> {
    let mut session = SessionOptions { communicators, ..SessionOptions::default() };
    E::ask(&mut session, options);
    let mut users = match session.open(world, config) {
        Ok(users) => users,
        Err(error) if is_lack(&error) => return Ok(Err(error.message().to_owned())),
        Err(error) => return Err(error.into()),
    };
    let memory = TensorMemory::open(config, world, device_of(&users))?;
    let place = WorldPlace { memory, ..WorldPlace::of(world, config) };
    let end = E::take(&mut users, place, lengths);
    Ok(Ok((end.context("find the user in the session")?, users.communicators)))
}

/// The device that an operation works on.
fn device_of(users: &SessionUsers) -> Option<i32> {
    let gathers = users.gathers.iter().map(|gather| gather.device());
    let pipes = users.pipes.iter().map(|pipe| pipe.device());
    let tables = users.tables.iter().map(|table| table.device());
    gathers.chain(pipes).chain(tables).next().flatten()
}

/// Whether an error says that the kernel set lacks the operation, or that it or a transport's device API has no session
/// of several users. So if the transports lack what the operation needs, or it cannot go on without a rank. Each other
/// thing that is not supported, such as too few signals, is a fault.
pub(crate) fn is_lack(error: &Error) -> bool {
    let text = error.message();
    let lacks_operation = text.contains("kernel set `") && text.contains("` has no ");
    let others = [
        "on_failure = \"mask\"",
        "found several users of one session",
        "serves one user of a session",
        "expected one link that reaches every rank",
        "declares neither TY_CAP_LOAD_STORE nor TY_CAP_GET",
    ];
    error.kind() == ErrorKind::Unsupported
        && (lacks_operation || others.iter().any(|other| text.contains(other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lack_of_the_operation_is_not_a_fault() {
        let error = |kind, text: &str| Error::new(kind, "open session", text);
        for text in [
            "kernel set `x` has no gather",
            "kernel set `x` has no pipe over several domains",
            "on_failure = \"mask\": a pipe of kernel set `x` cannot go on without a lost rank",
            "found several users of one session; expected one: kernels of `x` post by themselves",
            "device_api_of: the device API of x serves one user of a session",
            "open table: found 2 domains of 2 ranks; expected one link that reaches every rank",
            "open table: found a transport that declares neither TY_CAP_LOAD_STORE nor TY_CAP_GET",
        ] {
            assert!(is_lack(&error(ErrorKind::Unsupported, text)), "{text}");
            assert!(!is_lack(&error(ErrorKind::InvalidInput, text)), "{text}");
        }
        let text = "2 users of one session need 9 signals; the scale-up transport has 8";
        assert!(!is_lack(&error(ErrorKind::Unsupported, text)));
    }
}
