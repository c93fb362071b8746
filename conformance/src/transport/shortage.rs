//! A process that has nothing left: the system refuses its calls, and no peer is to blame.

use std::os::fd::OwnedFd;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokenyard_core::{Error, ErrorKind};

use super::errors::has_status;
use super::rig::{self, Needs, Rig};
use super::{Body, TransportCase};
use crate::suite::{Outcome, Rank};

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "a_rank_without_descriptors_blames_no_peer",
    about: "connect without a free descriptor works, or fails with a status about this process, such as TY_SYSTEM with \
            the errno",
    invariants: "errors",
    ranks: &[2],
    needs: Needs::SMALL,
    body: Body::OwnProcess(a_rank_without_descriptors_blames_no_peer),
    ..TransportCase::BARE
}];

/// Rank 0 connects without descriptors; rank 1 is open, and could be reached.
fn a_rank_without_descriptors_blames_no_peer(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let mut rig = Rig::open(rank, needs, rig::short(rank))?;
    let endpoints = rig.exchange_endpoints()?;
    let mut error = None;
    if rig.me() == 0 {
        let _none_left = NoDescriptors::take_all()?;
        let mut connects = (0..).zip(&endpoints);
        error = connects.find_map(|(peer, end)| rig.transport.connect(peer, end).err());
    }
    rank.world.barrier("a rank was without descriptors")?;
    drop(rig);
    rank.world.barrier("all have closed")?;
    error.as_ref().map_or(Ok(()), blames_no_peer)?;
    Ok(Outcome::Pass)
}

fn blames_no_peer(error: &Error) -> Result<()> {
    has_status(error)?;
    let blames = matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Protocol);
    ensure!(
        !blames,
        "connect without a free descriptor: found {:?}, `{error}`; expected a status about this process",
        error.kind()
    );
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    let errno = source.and_then(std::io::Error::raw_os_error);
    ensure!(
        error.kind() != ErrorKind::System || errno.is_some(),
        "connect without a free descriptor: `{error}`; expected the errno of the call that the system refused"
    );
    Ok(())
}

/// All descriptors that this process may still have, until it is dropped.
struct NoDescriptors {
    before: Rlimit,
    _all: Vec<OwnedFd>,
}

impl NoDescriptors {
    fn take_all() -> Result<Self> {
        let before = getrlimit(Resource::Nofile);
        let open = std::fs::read_dir("/proc/self/fd").context("this process's descriptors")?;
        let numbers = open.flatten().filter_map(|fd| fd.file_name().to_str()?.parse::<u64>().ok());
        // No more than those that are open, so that few are free.
        let most = numbers.max().unwrap_or(0) + 1;
        setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..before })
            .context("lower the limit on open files")?;
        let mut taken = Self { before, _all: Vec::new() };
        let stdin = std::io::stdin();
        while let Ok(one) = rustix::io::dup(&stdin) {
            taken._all.push(one);
        }
        Ok(taken)
    }
}

impl Drop for NoDescriptors {
    fn drop(&mut self) {
        // A limit may always be raised to the one before.
        let _ = setrlimit(Resource::Nofile, self.before);
    }
}
