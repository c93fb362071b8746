//! Builds a report from atomics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::report::{
    Collective, Peer, Reason, Report, ReportedComponents, ReportedCounts, ReportedHealth,
    ReportedQueue, SCHEMA_VERSION, Slow, Traffic, Wait, utc,
};

use super::{Draft, FlightRecorder};
use crate::abi;
use crate::bootstrap::PeerState;
use crate::gpu_ring;
use crate::link::Link;
use crate::session::watchdog::Watched;
use crate::wait::phase_name;

/// Most ranks that are named as the slowest.
const SLOWEST: usize = 5;

const LEVELS: [&str; 2] = ["scale-up", "scale-out"];

/// The values that the ranks exchanged at the start.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    /// Names the job and this opening of a user.
    pub(crate) job: String,
    /// Host and process of each rank; nothing for an absent rank.
    pub(crate) ranks: Vec<Option<(String, u32)>>,
}

impl Meeting {
    /// As that of user `at` of its session. Reports are files by job and rank, so each has a name.
    pub(crate) fn of(&self, at: usize) -> Self {
        let mut own = self.clone();
        if at > 0 {
            own.job.push_str(&format!("-{}", at + 1));
        }
        own
    }
}

/// The components that a report reads, while they live.
pub(crate) struct Live {
    pub(crate) watched: Watched,
    /// Scale-up, scale-out.
    pub(crate) links: [Option<Link>; 2],
    pub(crate) counters: Option<Counters>,
    /// As `links`: set where kernels post through the host, which then counts their commands.
    pub(crate) rings: [Option<RingCounts>; 2],
}

/// The counts of a ring into which kernels of a device post.
pub(crate) struct RingCounts {
    pub(crate) counts: Arc<gpu_ring::Counts>,
    /// World rank of each peer.
    pub(crate) ranks: Vec<u32>,
}

impl RingCounts {
    fn peer(&self, rank: u32) -> Option<u32> {
        self.ranks.iter().position(|other| *other == rank).map(|at| at as u32)
    }

    /// Adds the counts of sent commands to those of the kernels, which count the rest.
    fn add_to(&self, rank: u32, counts: &mut ReportedCounts) {
        let Some(carried) = self.peer(rank).and_then(|peer| self.counts.of(peer)) else { return };
        (counts.sent, counts.posted, counts.done) = (carried.raised, carried.posted, carried.done);
        counts.bytes = carried.bytes;
    }

    fn raised(&self, rank: u32) -> Vec<(u32, u64)> {
        self.peer(rank).map_or_else(Vec::new, |peer| self.counts.raised(peer))
    }

    fn queue(&self, level: usize) -> ReportedQueue {
        let all = self.counts.of_all();
        queue(level, all.posted, all.done, self.counts.capacity())
    }
}

fn queue(level: usize, posted: u64, done: u64, depth: u32) -> ReportedQueue {
    let in_flight = posted.saturating_sub(done);
    ReportedQueue { level: LEVELS[level].to_owned(), queue: 0, posted, done, in_flight, depth }
}

/// The counters of a kernel set.
pub(crate) struct Counters(abi::TyCounters);

// SAFETY: both sides access the memory behind its pointers atomically, from any thread.
unsafe impl Send for Counters {}

impl Counters {
    /// # Safety
    /// The kernel set that gave them is not closed while the value lives.
    pub(crate) unsafe fn new(counters: abi::TyCounters) -> Self {
        Self(counters)
    }

    fn index(&self, level: usize, rank: u32) -> usize {
        level * self.0.ranks as usize + rank as usize
    }

    /// Counts of a rank; nothing for a rank beyond the world.
    fn counts(&self, level: usize, rank: u32) -> Option<ReportedCounts> {
        if rank >= self.0.ranks {
            return None;
        }
        let index = self.index(level, rank);
        // SAFETY: 2 * R structures of words that live and are accessed atomically (contract of `new`,
        // and of the ABI).
        let words = unsafe { &*self.0.peers.add(index).cast::<[AtomicU64; 6]>() };
        let [posted, done, sent, expected, received, bytes] =
            words.each_ref().map(|word| word.load(Ordering::Relaxed));
        Some(ReportedCounts { sent, received, expected, posted, done, bytes })
    }

    fn raised(&self, level: usize, rank: u32) -> Vec<(u32, u64)> {
        let signals = self.0.signals as usize;
        if rank >= self.0.ranks {
            return Vec::new();
        }
        let first = self.index(level, rank) * signals;
        let entry = |at: usize| {
            // SAFETY: as in `counts`: 2 * R * signals entries.
            let words = unsafe { &*self.0.raised.add(first + at).cast::<[AtomicU64; 2]>() };
            let [signal, total] = words.each_ref().map(|word| word.load(Ordering::Relaxed));
            Some((u32::try_from(signal.checked_sub(1)?).ok()?, total))
        };
        (0..signals).filter_map(entry).collect()
    }

    /// The only queue of each level, with the commands under way to all ranks together.
    fn queue(&self, level: usize) -> ReportedQueue {
        let counts = (0..self.0.ranks).filter_map(|rank| self.counts(level, rank));
        // A plugin may write any values there.
        let add = |(posted, done): (u64, u64), c: ReportedCounts| {
            (posted.wrapping_add(c.posted), done.wrapping_add(c.done))
        };
        let (posted, done) = counts.fold((0, 0), add);
        queue(level, posted, done, self.0.queue_depth[level])
    }
}

fn ms(time: Duration) -> u64 {
    time.as_millis().min(u128::from(u64::MAX)) as u64
}

impl FlightRecorder {
    /// The present state of the user. Returns at once: transports are queried, and answer
    /// later.
    pub(super) fn capture(&self, reason: Reason) -> Draft {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let meeting = self.meeting.get();
        let mut report = Report {
            tokenyard_report: SCHEMA_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            job: meeting.map_or_else(String::new, |meeting| meeting.job.clone()),
            rank: self.rank,
            ranks: self.ranks,
            host: crate::machine::host_name(),
            pid: std::process::id(),
            unix_ms: ms(clock),
            time: utc(ms(clock)),
            reason,
            config: self.config.clone(),
            components: ReportedComponents {
                kernels: self.kernels.clone(),
                topology: self.topology.clone(),
                ..ReportedComponents::default()
            },
            activity: self.track.read(),
            peers: self.peers(),
            ..Report::default()
        };
        report.activity.collective = self.collective.read().map(|collective| Collective {
            name: collective.name.to_owned(),
            topic: collective.topic,
            since_ms: collective.since.as_millis() as u64,
        });
        report.activity.collectives = self.collective.ended();
        // Under the lock, so that no query starts after the lock is released.
        if let Some(live) = &*self.live() {
            live.add_to(&mut report);
            for (checkup, link) in self.checkups.iter().zip(&live.links) {
                let Some(link) = *link else { continue };
                checkup.ask(move || link.health());
            }
        }
        Draft(report)
    }

    /// The report with the answers of the transports. Waits for them, for a second at most.
    pub(super) fn finish(&self, Draft(mut report): Draft) -> Report {
        for health in &mut report.transports {
            let level = LEVELS.iter().position(|level| *level == health.level);
            if let Some(checkup) = level.and_then(|level| self.checkups.get(level)) {
                checkup.answer(health);
            }
        }
        report
    }

    /// The world's knowledge of the other ranks.
    fn peers(&self) -> Vec<Peer> {
        let others = (0..self.ranks).filter(|rank| *rank != self.rank);
        let peer = |rank: u32| {
            let (state, why) = match self.liveness.state(rank) {
                PeerState::Alive => ("alive", ""),
                PeerState::Left => ("left", ""),
                PeerState::Lost { why } => ("lost", why.as_str()),
            };
            let known = self.meeting.get().and_then(|m| m.ranks.get(rank as usize)?.clone());
            let (host, pid) = known.unwrap_or_default();
            Peer {
                rank,
                host,
                pid,
                state: state.to_owned(),
                why: why.to_owned(),
                ended_ms: self.liveness.since_end(rank).map(ms),
                heard_ms: ms(self.liveness.silence(rank)),
                ..Peer::default()
            }
        };
        others.map(peer).collect()
    }
}

impl Live {
    /// Adds the values that only the components have.
    fn add_to(&self, report: &mut Report) {
        report.activity.begun_by_all = self.watched.begun_by_all();
        report.wait = self.watched.wait().map(|(wait, given_up)| Wait {
            phase: phase_name(wait.what.phase).to_owned(),
            level: LEVELS[usize::from(wait.what.level != abi::TY_LEVEL_SCALE_UP)].to_owned(),
            peer: wait.what.peer,
            signal: wait.what.signal,
            expected: wait.what.expected,
            found: wait.found,
            operation: (wait.what.operation != abi::TY_OPERATION_OF_GRAPH)
                .then_some(wait.what.operation),
            age_ms: ms(wait.lasted),
            given_up,
        });
        for (level, link) in self.links.iter().enumerate() {
            let Some(link) = link else { continue };
            let name = Some(link.name().to_owned());
            let component = if level == 0 {
                &mut report.components.scale_up
            } else {
                &mut report.components.scale_out
            };
            *component = name;
            report.transports.push(ReportedHealth {
                level: LEVELS[level].to_owned(),
                transport: link.name().to_owned(),
                ..ReportedHealth::default()
            });
            report.queues.extend(self.queue(level));
        }
        for peer in &mut report.peers {
            peer.masked = self.watched.is_masked(peer.rank);
            peer.waited_ms = ms(self.watched.waited(peer.rank));
            peer.links = self.links_to(peer.rank);
        }
        report.slowest = slowest(&report.peers);
    }

    /// Nothing where no commands are posted, or none are counted.
    fn queue(&self, level: usize) -> Option<ReportedQueue> {
        if let Some(ring) = &self.rings[level] {
            return Some(ring.queue(level));
        }
        self.counters.as_ref().map(|c| c.queue(level)).filter(|queue| queue.depth > 0)
    }

    fn links_to(&self, rank: u32) -> Vec<Traffic> {
        let link = |(level, name): (usize, String)| {
            let counters = self.counters.as_ref();
            let mut counts = counters.and_then(|counters| counters.counts(level, rank));
            let raised = match (&self.rings[level], counters) {
                (Some(ring), _) => {
                    counts.iter_mut().for_each(|counts| ring.add_to(rank, counts));
                    ring.raised(rank)
                }
                (None, Some(counters)) => counters.raised(level, rank),
                (None, None) => Vec::new(),
            };
            Traffic { level: LEVELS[level].to_owned(), name, counts, raised }
        };
        self.watched.link_names(rank).into_iter().map(link).collect()
    }
}

fn slowest(peers: &[Peer]) -> Vec<Slow> {
    let mut slow: Vec<Slow> = peers
        .iter()
        .filter(|peer| peer.waited_ms > 0)
        .map(|peer| Slow { rank: peer.rank, waited_ms: peer.waited_ms })
        .collect();
    slow.sort_by_key(|slow| std::cmp::Reverse(slow.waited_ms));
    slow.truncate(SLOWEST);
    slow
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_plugin_that_make_no_sense_are_shown_and_end_nothing() {
        let peer = |posted, done| abi::TyPeerCounters { posted, done, ..Default::default() };
        let peers = [peer(u64::MAX, 3), peer(7, u64::MAX), peer(0, 0), peer(5, 9)];
        let raised =
            [abi::TyRaised { signal: u64::MAX, total: 1 }, abi::TyRaised::default()].repeat(4);
        let counters = abi::TyCounters {
            size: size_of::<abi::TyCounters>(),
            ranks: 2,
            signals: 2,
            queue_depth: [4; 2],
            peers: peers.as_ptr(),
            raised: raised.as_ptr(),
        };
        // SAFETY: both live longer, and no thread writes them.
        let counters = unsafe { Counters::new(counters) };
        let queue = counters.queue(0);
        assert_eq!((queue.posted, queue.done, queue.in_flight), (6, 2, 4));
        assert_eq!(counters.queue(1).in_flight, 0, "more is done than was posted");
        assert!(counters.raised(0, 1).is_empty(), "a signal beyond all signals");
        assert!(counters.counts(1, 2).is_none() && counters.raised(1, 2).is_empty());
    }
}
