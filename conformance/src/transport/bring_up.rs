//! Bring-up: the transport checks bytes that come from another process, and waits for no peer without an end.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use tokenyard_core::transport::{Command, NO_COMMAND};
use tokenyard_core::{Error, ErrorKind, abi};

use super::ending::exchange;
use super::errors::{has_status, is_about};
use super::memory::{UNTOUCHED, compare, pattern};
use super::needs::Needs;
use super::patience::{PATIENCE, longest, open_before, timed};
use super::rig::{self, Rig};
use super::teams::Teams;
use super::{Body, TransportCase};
use crate::suite::Rank;

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "bring_up_refuses_damaged_endpoints",
        about: "endpoint bytes that are cut, lengthened or altered give an error within the deadline, TY_PROTOCOL for \
                another length",
        invariants: "INV-6",
        ranks: &[2],
        needs: Needs { teams: Teams::Backwards(1), ..Needs::SMALL },
        body: Body::Alone(bring_up_refuses_damaged_endpoints),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "bring_up_refuses_endpoints_of_others",
        about: "the endpoint of another peer is an error, and nothing reaches an instance through an older one's",
        invariants: "the order of calls: `connect`",
        ranks: &[2, 3],
        needs: Needs::SMALL,
        body: Body::Alone(bring_up_refuses_endpoints_of_others),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_put_before_the_peers_connect_arrives",
        about: "a rank that has connected puts to one that has not, and the put arrives",
        invariants: "the order of calls: `endpoint`; INV-1",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Alone(a_put_before_the_peers_connect_arrives),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "ranks_connect_in_either_order",
        about: "either rank may connect first, and the other one long after it",
        invariants: "the order of calls: `connect`",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Alone(ranks_connect_in_either_order),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "connecting_ends_without_the_peer",
        about: "connect and commit end within the deadline where a peer never connects, or never commits",
        invariants: "INV-6",
        ranks: &[2],
        needs: Needs { teams: Teams::Backwards(1), ..Needs::SMALL },
        body: Body::Alone(connecting_ends_without_the_peer),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_commit_has_one_deadline_for_all_peers",
        about: "commit ends within one deadline where three peers never connect",
        invariants: "INV-6",
        ranks: &[4],
        needs: Needs::SMALL,
        body: Body::Alone(a_commit_has_one_deadline_for_all_peers),
        ..TransportCase::BARE
    },
];

/// Tries of what took too long: a busy machine delays one of them, and a wait that has no end all.
const TRIES: u32 = 3;

fn bring_up_refuses_damaged_endpoints(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut alive = Rig::open(rank, needs, PATIENCE)?;
    let peer = alive.next();
    let good = alive.exchange_endpoints()?.swap_remove(peer as usize);
    for (name, data, may_pass) in damages(&good) {
        let mut tries_left = TRIES;
        let refused = loop {
            let (refused, took, longest) = connect_by(rank, needs, peer, &data)?;
            tries_left -= 1;
            let is_late = took >= longest;
            ensure!(
                !is_late || tries_left > 0,
                "an endpoint that was {name} took {took:?}; expected at most {longest:?} (INV-6)"
            );
            // All ranks open equally often: that may be collective.
            if !rig::of_any(rank.world, is_late)? {
                break refused;
            }
        };
        refused.as_ref().map_or(Ok(()), has_status)?;
        refused.as_ref().map_or(Ok(()), |error| is_about(error, alive.world_rank(peer)))?;
        let kind = refused.as_ref().map(Error::kind);
        ensure!(
            data.len() == good.len() || kind.is_none_or(|kind| kind == ErrorKind::Protocol),
            "connect with an endpoint that was {name}: found {kind:?}; expected TY_PROTOCOL"
        );
        ensure!(
            refused.is_some() || may_pass,
            "connect accepted an endpoint that was {name}, {} bytes for {}; expected an error",
            data.len(),
            good.len()
        );
    }
    rank.world.barrier("all damages were tried")?;
    drop(alive);
    good_endpoints_still_work(rank, needs)
}

/// Connects to `peer` by these bytes. Returns the error, the time that it took, and the longest time that it may take.
fn connect_by(
    rank: &Rank<'_>,
    needs: &Needs,
    peer: u32,
    data: &[u8],
) -> Result<(Option<Error>, Duration, Duration)> {
    // Each connect has an instance of its own: a failed one may end its instance.
    let mut own = open_before(rank, needs, peer)?;
    let (connected, took) = timed(|| own.transport.connect(peer, data));
    Ok((connected.err(), took, longest(rank, 1, own.needs.deadline)))
}

/// Name, bytes, and whether they may pass as an endpoint: a raw address of a fabric has no room for a
/// checksum, so one altered bit may stay unnoticed.
fn damages(good: &[u8]) -> Vec<(&'static str, Vec<u8>, bool)> {
    let half = &good[..good.len() / 2];
    let mut all = vec![
        ("lengthened by a byte", [good, &[0]].concat(), false),
        ("replaced by 4096 bytes of 0xff", vec![0xff; abi::TY_ENDPOINT_BYTES], false),
    ];
    if !good.is_empty() {
        all.extend([
            ("emptied", Vec::new(), false),
            ("cut in half", half.to_vec(), false),
            ("cut by a byte", good[..good.len() - 1].to_vec(), false),
            ("inverted", good.iter().map(|byte| !byte).collect(), false),
        ]);
        for at in [0, good.len() / 3, good.len() / 2, good.len() - 1] {
            let mut data = good.to_vec();
            data[at] ^= 0x10;
            all.push(("altered in one bit", data, true));
        }
    }
    all
}

fn good_endpoints_still_work(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut rig = Rig::bring_up(rank, needs)?;
    let (peer, signal) = (rig.next(), rig.signal(0, 0, rig.me()));
    rig.post(0, &[Command { op: abi::TY_OP_SIGNAL, peer, signal, add: 1, ..NO_COMMAND }])?;
    rig.wait_signal(0, rig.signal(0, 0, rig.previous()), 1)?;
    rig.end(true)
}

fn bring_up_refuses_endpoints_of_others(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut alive = Rig::open(rank, needs, PATIENCE)?;
    let endpoints = alive.exchange_endpoints()?;
    // The other one is rank 2, or on rank 2 it is rank 1; of two ranks it is the peer.
    let (me, peer) = (alive.me(), u32::from(alive.me() == 0));
    let other = (0..alive.ranks()).rfind(|rank| *rank != me && *rank != peer).unwrap_or(peer);
    // An endpoint without content leads nowhere: ranks that meet by it meet as a team.
    if endpoints[peer as usize] != endpoints[other as usize] {
        let mut own = open_before(rank, needs, peer)?;
        ensure!(
            own.transport.connect(peer, &endpoints[other as usize]).is_err(),
            "connect to peer {peer} accepted the endpoint of peer {other}; expected an error"
        );
    }
    rank.world.barrier("endpoints of others were tried")?;
    drop(alive);
    if rank.world.ranks() == 2 { an_older_instance_leads_nowhere(rank, needs) } else { Ok(()) }
}

/// Rank 1 has closed the instance whose endpoint rank 0 still uses. Rank 0 finds that out by an error, at once
/// or later; the next instance of rank 1 gets nothing of it.
fn an_older_instance_leads_nowhere(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut older = Rig::open(rank, needs, PATIENCE)?;
    let endpoints = older.exchange_endpoints()?;
    let mut older = (rank.world.rank() == 0).then_some(older);
    let next = Rig::open(rank, needs, rank.config.world.deadline)?;
    rank.world.barrier("the next instance is open")?;
    let mut failed = Ok(());
    if let Some(older) = &mut older {
        let (connected, took) = timed(|| older.connect_to(&endpoints));
        let longest = longest(rank, 3, PATIENCE);
        failed = if took >= longest {
            Err(anyhow!(
                "connect and commit by the endpoint of a closed instance took {took:?}; expected at most {longest:?} \
                 (INV-6)"
            ))
        } else if connected.is_ok() {
            put_by_an_older_endpoint(older, rank.config.world.deadline / 3)
        } else {
            Ok(())
        };
    }
    let mut rig = next.connected()?;
    rig.barrier("an older endpoint was tried")?;
    let signal = rig.signal(0, 0, 0);
    let found = (rig.transport.read_signal(0, signal), rig.windows[0].read(0, 64));
    ensure!(
        found.0 == 0 && found.1.iter().all(|byte| *byte == UNTOUCHED),
        "a put by the endpoint of a closed instance reached the next one: found total {}; expected 0, and an \
         untouched window",
        found.0
    );
    failed?;
    drop(older);
    rig.end(true)
}

/// Puts to rank 1 until that fails. Only where commands to a lost peer end in time (`TY_CAP_BOUNDED_PUT`) is it a
/// fault that they do not fail.
fn put_by_an_older_endpoint(rig: &mut Rig<'_>, time: Duration) -> Result<()> {
    rig.expect_errors();
    let (op, signal) = (abi::TY_OP_PUT_SIGNAL, rig.signal(0, 0, 0));
    let put = Command { op, peer: 1, signal, add: 1, bytes: 64, ..NO_COMMAND };
    let time = if rig.is_bounded() { time } else { PATIENCE / 2 };
    let until = Instant::now() + time;
    while Instant::now() < until {
        rig.queues[0].try_post(&rig.transport, &[put])?;
        rig.drive()?;
        if rig.transport.health().is_err() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    ensure!(
        !rig.is_bounded(),
        "puts by the endpoint of a closed instance do not fail within {time:?}; expected an error"
    );
    Ok(())
}

/// Connects rank `late` only when the other one has connected and done `then`, or has had the time for it: its
/// connect, or its commit, may wait for this rank's. Collective.
fn connect_late(
    rig: &mut Rig<'_>,
    late: u32,
    then: impl FnOnce(&mut Rig<'_>) -> Result<()>,
) -> Result<()> {
    let endpoints = rig.exchange_endpoints()?;
    if rig.me() == late {
        connect_behind_the_other(rig, &endpoints)?;
    } else {
        rig.connect_to(&endpoints)?;
        then(rig)?;
        rig.barrier(FIRST)?;
    }
    rig.barrier("both ranks have connected")
}

const FIRST: &str = "one rank has connected";

fn connect_behind_the_other(rig: &mut Rig<'_>, endpoints: &[Vec<u8>]) -> Result<()> {
    let world = rig.world;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| world.barrier(FIRST));
        let until = Instant::now() + PATIENCE;
        while !other.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let connected = rig.connect_to(endpoints);
        if let Err(error) = &connected {
            world.report_failure(&format!("{error:#}"));
        }
        let other = other.join().map_err(|_| anyhow!("a barrier panicked"))?;
        connected.and(Ok(other?))
    })
}

/// Bytes of a put: less than a fabric holds for a rank that does not drive yet.
const EARLY: usize = 1 << 14;

fn a_put_before_the_peers_connect_arrives(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut rig = Rig::open(rank, needs, rank.config.world.deadline)?;
    rig.windows.iter().for_each(|window| window.fill(UNTOUCHED));
    let (bytes, signal) = (rig.put_bytes(EARLY), rig.signal(0, 0, 0));
    connect_late(&mut rig, 1, |rig| {
        rig.windows[0].write(0, &pattern(1, bytes));
        let (op, dst_offset) = (abi::TY_OP_PUT_SIGNAL, EARLY as u64);
        let put =
            Command { op, peer: 1, signal, add: 1, dst_offset, bytes: bytes as u64, ..NO_COMMAND };
        rig.post(0, &[put])
    })?;
    if rig.me() == 1 {
        let what = "a put of rank 0 from before this rank's connect";
        rig.wait_signal(0, signal, 1).context(what)?;
        compare(what, &rig.windows[0].read(EARLY, bytes), &pattern(1, bytes))?;
    }
    rig.end(true)
}

fn ranks_connect_in_either_order(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    for late in [1, 0] {
        let mut rig = Rig::open(rank, needs, rank.config.world.deadline)?;
        connect_late(&mut rig, late, |_| Ok(()))
            .with_context(|| format!("rank {late} connects late"))?;
        exchange(&mut rig)?;
        rig.end(true)?;
    }
    Ok(())
}

fn connecting_ends_without_the_peer(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    for connects in [false, true] {
        for tries_left in (0..TRIES).rev() {
            let took = connect_without_the_peer(rank, needs, connects)?;
            // Both connects, and the commit.
            let longest = longest(rank, 3, PATIENCE);
            ensure!(
                took < longest || tries_left > 0,
                "connect and commit took {took:?} {}; expected at most {longest:?} (INV-6)",
                match (rank.world.rank(), connects) {
                    (1, false) => "while peer 1 never connects",
                    (1, true) => "while peer 1 never commits",
                    _ => "of a rank that does not commit",
                }
            );
            if !rig::of_any(rank.world, took >= longest)? {
                break;
            }
        }
    }
    Ok(())
}

/// The last deadline of a commit that took too long before.
const LONGEST: u32 = 12;

/// Rank 0 connects to all, and no other rank does. A commit that gives each of them a deadline takes three.
fn a_commit_has_one_deadline_for_all_peers(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    // A busy machine may hold up a commit for a deadline, but not for the longer ones as well.
    for deadline in [1, 4, LONGEST].map(|times| times * PATIENCE) {
        let mut rig = Rig::open(rank, needs, deadline)?;
        let endpoints = rig.exchange_endpoints()?;
        let mut took = Duration::ZERO;
        if rig.me() == 0 {
            let mut connects = (0..).zip(&endpoints);
            // A connect that waits for its peer fails, which is right.
            if connects.all(|(peer, end)| rig.transport.connect(peer, end).is_ok()) {
                let start = Instant::now();
                let committed = rig.transport.commit();
                took = start.elapsed();
                committed.as_ref().err().map_or(Ok(()), has_status)?;
            }
        }
        let is_late = rig::of_any(rank.world, took > 2 * deadline)?;
        rig.close_behind_others()?;
        if !is_late {
            return Ok(());
        }
        ensure!(
            took <= 2 * deadline || deadline < LONGEST * PATIENCE,
            "commit took {took:?} while three peers never connect; expected at most the deadline, {deadline:?}, for \
             all of them (INV-6)"
        );
    }
    Ok(())
}

/// Checks that an error has the status of a peer that is gone or late, and names it, and no other one. A slow machine
/// may take longer than the deadline to connect to itself: then the error is about this rank, and says nothing of the
/// peer.
pub(super) fn is_a_loss(error: &Error, rank: u32, me: u32) -> Result<()> {
    has_status(error)?;
    if error.kind() == ErrorKind::Deadline && error.rank() == Some(me) {
        return Ok(());
    }
    ensure!(
        error.rank() == Some(rank),
        "connecting without world rank {rank}: the error is about {:?}, `{error}`; expected it to name the rank",
        error.rank()
    );
    ensure!(
        matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Deadline),
        "connecting without world rank {rank}: found {:?}, `{error}`; expected TY_PEER_LOST or TY_DEADLINE",
        error.kind()
    );
    Ok(())
}

/// Peer 0 connects and commits; peer 1 connects, or not even that. Returns the time that it took.
fn connect_without_the_peer(rank: &Rank<'_>, needs: &Needs, connects: bool) -> Result<Duration> {
    let mut rig = Rig::open(rank, needs, PATIENCE)?;
    let endpoints = rig.exchange_endpoints()?;
    let is_first = rig.me() == 0;
    let (connected, took) = timed(|| match (is_first, connects) {
        (true, _) => rig.connect_to(&endpoints),
        (false, true) => (0..)
            .zip(&endpoints)
            .try_for_each(|(peer, end)| Ok(rig.transport.connect(peer, end)?)),
        (false, false) => Ok(()),
    });
    // Success is right as well: a transport need not wait for its peers.
    let failed = connected.as_ref().err().filter(|_| is_first);
    if let Some(error) = failed.and_then(|error| error.downcast_ref()) {
        is_a_loss(error, rig.world_rank(1), rank.world.rank())?;
    }
    rank.world.barrier("a peer was missing")?;
    rig.close_behind_others()?;
    Ok(took)
}
