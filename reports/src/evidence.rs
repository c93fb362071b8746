//! The knowledge of ranks about each other, and how far it is reliable.

use std::collections::BTreeMap;

use super::set::Set;
use tokenyard_core::report::{Report, Wait};

/// A shorter wait, or a shorter stay in a collective, means nothing: a healthy job has many of
/// them.
pub(super) const LONG_MS: u64 = 1000;
/// A rank without a heartbeat for longer counts as silent. Heartbeats come ten times a second, or
/// more often.
pub(super) const SILENT_MS: u64 = 2000;
/// An action of a rank must be older than this to have reached another rank. The clocks of the two
/// may differ a little.
const SETTLED_MS: u64 = 500;

/// The end of a rank, as others noticed it.
#[derive(Clone, Debug)]
pub(super) struct Loss {
    pub(super) rank: u32,
    pub(super) why: String,
    /// The time at which the first rank noticed it, by that rank's wall clock.
    pub(super) when_ms: u64,
    /// The ranks that report it.
    pub(super) witnesses: Vec<u32>,
}

/// A rank that sends no heartbeats, and that is not declared lost.
#[derive(Clone, Debug)]
pub(super) struct Silence {
    pub(super) rank: u32,
    /// The longest time for which a rank has received no heartbeat of it.
    pub(super) ms: u64,
    pub(super) witnesses: Vec<u32>,
}

impl Loss {
    /// The error that a rank sent before it ended; `None` where it ended without a message.
    pub(super) fn last_words(&self) -> Option<&str> {
        self.why.strip_prefix("failed: ")
    }
}

impl Set {
    /// Ranks that others have lost, in the order in which the losses were noticed.
    pub(super) fn losses(&self) -> Vec<Loss> {
        let mut losses: Vec<Loss> = Vec::new();
        for report in self.all() {
            for peer in report.peers.iter().filter(|peer| peer.state == "lost") {
                let when_ms = report.unix_ms.saturating_sub(peer.ended_ms.unwrap_or(0));
                match losses.iter_mut().find(|loss| loss.rank == peer.rank) {
                    Some(loss) => {
                        loss.witnesses.push(report.rank);
                        if when_ms < loss.when_ms {
                            (loss.when_ms, loss.why) = (when_ms, peer.why.clone());
                        }
                    }
                    None => losses.push(Loss {
                        rank: peer.rank,
                        why: peer.why.clone(),
                        when_ms,
                        witnesses: vec![report.rank],
                    }),
                }
            }
        }
        losses.sort_by_key(|loss| loss.when_ms);
        losses
    }

    /// The rank that was silent for longest while others reported and that has not reported since,
    /// if there is one. Ranks receive heartbeats of each other through rank 0, so rank 0 is chosen
    /// wherever it is silent.
    pub(super) fn silent(&self) -> Option<Silence> {
        let mut silences: BTreeMap<u32, Silence> = BTreeMap::new();
        for report in self.all() {
            for peer in report.peers.iter().filter(|p| p.state == "alive") {
                let last_sign = report.unix_ms.saturating_sub(peer.heard_ms);
                let own = self.get(peer.rank).map_or(0, |own| own.unix_ms);
                if peer.heard_ms < SILENT_MS || own > last_sign.saturating_add(SILENT_MS / 2) {
                    continue;
                }
                let none = Silence { rank: peer.rank, ms: 0, witnesses: Vec::new() };
                let silence = silences.entry(peer.rank).or_insert(none);
                silence.ms = silence.ms.max(peer.heard_ms);
                silence.witnesses.push(report.rank);
            }
        }
        silences.remove(&0).or_else(|| silences.into_values().max_by_key(|silence| silence.ms))
    }

    /// The longest time for which a rank that has reported since had sent no heartbeat.
    pub(super) fn heard_again(&self, rank: u32) -> Option<u64> {
        let own = self.get(rank)?.unix_ms;
        let heard = self.all().filter(|report| report.unix_ms <= own.saturating_add(SETTLED_MS));
        let silences = heard.filter_map(|report| Some(report.peer(rank)?.heard_ms));
        silences.max().filter(|ms| *ms >= SILENT_MS)
    }

    /// The rank that raises the signal for which `waiter` waits, and the total it raised it to;
    /// `None` where no report shows it.
    pub(super) fn writer(&self, waiter: &Report, wait: &Wait) -> Option<(u32, u64)> {
        self.all().filter(|report| report.rank != waiter.rank).find_map(|report| {
            let links = report.peer(waiter.rank)?.links.iter().filter(|l| l.level == wait.level);
            let mut raised = links.flat_map(|link| &link.raised);
            let (_, total) = raised.find(|(signal, _)| *signal == wait.signal)?;
            Some((report.rank, *total))
        })
    }

    /// The rank that raised the signal for which `waiter` waits, and how far, if it did so long
    /// before `waiter` reported that the signal had not come.
    pub(super) fn sent_in_vain(&self, waiter: &Report, wait: &Wait) -> Option<(u32, u64)> {
        if wait.phase == "queue room" || !is_long(waiter, wait.age_ms) {
            return None;
        }
        let (writer, total) = self.writer(waiter, wait)?;
        let reached = total.wrapping_sub(wait.expected) as i64 >= 0;
        let sent_by = self.get(writer).map(settled_since)?;
        (reached && sent_by.saturating_add(SETTLED_MS) <= waiter.unix_ms).then_some((writer, total))
    }
}

/// The time since which a rank is in the state of its report: it sends nothing while it waits.
fn settled_since(report: &Report) -> u64 {
    let stay = report.wait.as_ref().map_or(report.activity.since_ms, |wait| wait.age_ms);
    report.unix_ms.saturating_sub(stay)
}

/// Whether a wait of this length means something: it ended in an error, or it is long. A wait in a
/// report of a masked loss was caused by that loss, and is over.
pub(super) fn is_long(report: &Report, age_ms: u64) -> bool {
    report.is_error() || (age_ms >= LONG_MS && !report.is_masked())
}

/// Where a rank waits for room in its own queue: the peer whose commands do not end, and their
/// number.
pub(super) fn stuck_commands(report: &Report) -> Option<(u32, u64)> {
    let under_way = |peer: &tokenyard_core::report::Peer| {
        let counts = peer.links.iter().filter_map(|link| link.counts.as_ref());
        counts.map(|c| c.posted.saturating_sub(c.done)).fold(0_u64, u64::saturating_add)
    };
    let peers = report.peers.iter().map(|peer| (peer.rank, under_way(peer)));
    peers.max_by_key(|(_, count)| *count).filter(|(_, count)| *count > 0)
}
