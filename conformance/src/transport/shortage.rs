//! A process that has nothing left: the system refuses its calls, and no peer is to blame.

use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokenyard_core::{Error, ErrorKind};

use super::errors::has_status;
use super::needs::Needs;
use super::patience::PATIENCE;
use super::rig::{self, Rig};
use super::{Body, TransportCase};
use crate::suite::{Outcome, Rank};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "a_rank_without_descriptors_blames_no_peer",
        about: "open and connect without a free descriptor work, or fail with a status about this process, such as \
                TY_SYSTEM with the errno",
        invariants: "errors",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::OwnProcess(a_rank_without_descriptors_blames_no_peer),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_commit_without_descriptors_blames_no_peer",
        about: "commit without a free descriptor, while the peer connects, works, or fails with a status about this \
                process",
        invariants: "errors",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::OwnProcess(a_commit_without_descriptors_blames_no_peer),
        ..TransportCase::BARE
    },
];

/// Both ranks open without descriptors, because that may be collective. Then rank 0 connects without them; rank 1 is
/// open, and could be reached.
fn a_rank_without_descriptors_blames_no_peer(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let mut rig = Rig::open(rank, needs, PATIENCE)?;
    let (component, choice) = rig::choose(rank.config)?;
    let none_left = NoDescriptors::take_all()?;
    let opened = rig::open_chosen(component, choice, rank, needs, PATIENCE).map(drop);
    drop(none_left);
    is_about_this_process("open", opened)?;
    let endpoints = rig.exchange_endpoints()?;
    let mut connected: Result<()> = Ok(());
    if rig.me() == 0 {
        let _none_left = NoDescriptors::take_all()?;
        let mut connects = (0..).zip(&endpoints);
        connected = connects.try_for_each(|(peer, end)| Ok(rig.transport.connect(peer, end)?));
    }
    rank.world.barrier("a rank was without descriptors")?;
    rig.close_behind_others()?;
    let found: Option<&Error> = connected.as_ref().err().and_then(|error| error.downcast_ref());
    let is_late =
        found.is_some_and(|error| error.kind() == ErrorKind::Deadline && error.rank() == Some(1));
    // Where a connect waits for an answer, the peer that gives none is late indeed.
    if rig::of_any(rank.world, is_late)? && waits_for_an_answer(rank, needs)? {
        return Ok(Outcome::Pass);
    }
    is_about_this_process("connect", connected)?;
    Ok(Outcome::Pass)
}

/// Rank 0 has connected before. It has no descriptor for the connection that comes from rank 1.
fn a_commit_without_descriptors_blames_no_peer(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    // A connect that waits for an answer leaves nothing for a commit to do.
    if waits_for_an_answer(rank, needs)? {
        return Ok(Outcome::Pass);
    }
    for times in [1, 4] {
        let committed = commit_without_descriptors(rank, needs, times * rig::short(rank))?;
        // On a busy machine rank 1 may not run in time, which it is then blamed for.
        let is_late = committed.as_ref().is_err_and(|error| {
            error.kind() == ErrorKind::Deadline && error.rank().is_some() && times == 1
        });
        if !rig::of_any(rank.world, is_late)? {
            is_about_this_process("commit", committed.map_err(Into::into))?;
            break;
        }
    }
    Ok(Outcome::Pass)
}

/// The end of a `commit` during which rank 0 has no descriptor left. Collective.
fn commit_without_descriptors(
    rank: &Rank<'_>,
    needs: &Needs,
    deadline: Duration,
) -> Result<tokenyard_core::Result<()>> {
    let mut rig = Rig::open(rank, needs, deadline)?;
    let endpoints = rig.exchange_endpoints()?;
    let mut committed = Ok(());
    if rig.me() == 0 {
        let connected = connects(&mut rig, &endpoints);
        let none_left = NoDescriptors::take_all()?;
        rank.world.barrier("rank 0 has no descriptor left")?;
        if connected.is_ok() {
            committed = rig.transport.commit();
        }
        drop(none_left);
    } else {
        rank.world.barrier("rank 0 has no descriptor left")?;
        // Either may fail: rank 0 does not answer.
        let _ = connects(&mut rig, &endpoints).and_then(|()| rig.transport.commit());
    }
    rank.world.barrier("a rank was without descriptors")?;
    rig.close_behind_others()?;
    Ok(committed)
}

/// Whether a connect fails while the peer, which is open, does not answer. Collective.
fn waits_for_an_answer(rank: &Rank<'_>, needs: &Needs) -> Result<bool> {
    let mut rig = Rig::open(rank, needs, PATIENCE)?;
    let endpoints = rig.exchange_endpoints()?;
    let failed = rig.me() == 0 && connects(&mut rig, &endpoints).is_err();
    let waits = rig::of_any(rank.world, failed)?;
    rig.close_behind_others()?;
    Ok(waits)
}

fn connects(rig: &mut Rig<'_>, endpoints: &[Vec<u8>]) -> tokenyard_core::Result<()> {
    (0..).zip(endpoints).try_for_each(|(peer, end)| rig.transport.connect(peer, end))
}

fn is_about_this_process(call: &str, ended: Result<()>) -> Result<()> {
    let Err(failed) = ended else { return Ok(()) };
    let Some(error) = failed.downcast_ref::<Error>() else { return Err(failed) };
    blames_no_peer(error).with_context(|| format!("{call} without a free descriptor"))
}

fn blames_no_peer(error: &Error) -> Result<()> {
    has_status(error)?;
    let blames = matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Protocol);
    ensure!(!blames, "found {:?}, `{error}`; expected a status about this process", error.kind());
    ensure!(
        error.rank().is_none(),
        "found `{error}`, about rank {:?}, which has done nothing wrong; expected an error about no peer",
        error.rank()
    );
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    let errno = source.and_then(std::io::Error::raw_os_error);
    ensure!(
        error.kind() != ErrorKind::System || errno.is_some(),
        "found `{error}`; expected the errno of the call that the system refused"
    );
    Ok(())
}

/// A limit on the number of this process's descriptors, until it is dropped.
pub(super) struct DescriptorLimit(Rlimit);

impl DescriptorLimit {
    /// Opens no more descriptor with this number or a greater one. Open ones stay open.
    pub(super) fn below(number: u64) -> Result<Self> {
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(number), ..before })
            .context("lower the limit on open files")?;
        Ok(Self(before))
    }
}

impl Drop for DescriptorLimit {
    fn drop(&mut self) {
        // A limit may always be raised to the one before.
        let _ = setrlimit(Resource::Nofile, self.0);
    }
}

/// All descriptors that this process may still have, until it is dropped.
struct NoDescriptors {
    _limit: DescriptorLimit,
    _all: Vec<OwnedFd>,
}

impl NoDescriptors {
    fn take_all() -> Result<Self> {
        let open = std::fs::read_dir("/proc/self/fd").context("this process's descriptors")?;
        let numbers = open.flatten().filter_map(|fd| fd.file_name().to_str()?.parse::<u64>().ok());
        // No more than those that are open, so that few are free.
        let most = numbers.max().unwrap_or(0) + 1;
        let mut taken = Self { _limit: DescriptorLimit::below(most)?, _all: Vec::new() };
        let stdin = std::io::stdin();
        while let Ok(one) = rustix::io::dup(&stdin) {
            taken._all.push(one);
        }
        Ok(taken)
    }
}
