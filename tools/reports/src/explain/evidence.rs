//! What ranks know of each other, and how far it can be believed.

use std::collections::BTreeMap;

use super::set::Set;
use crate::format::{Report, Wait};

/// A wait, or a stay in a collective, that is shorter says nothing: a healthy job has many of them.
pub(super) const LONG_MS: u64 = 1000;
/// A rank whose heartbeats stay away for longer is taken to be silent. They come ten times a second, or
/// more often.
pub(super) const SILENT_MS: u64 = 2000;
/// What a rank did must be older than this to have reached another one, whose clock may differ a little.
const SETTLED_MS: u64 = 500;

/// The end of a rank, as others heard of it.
#[derive(Clone, Debug)]
pub(super) struct Loss {
    pub(super) rank: u32,
    pub(super) why: String,
    /// Wall clock of the first that heard of it.
    pub(super) when_ms: u64,
    /// Who says so.
    pub(super) witnesses: Vec<u32>,
}

/// A rank that is not heard, and has not been given up.
#[derive(Clone, Debug)]
pub(super) struct Silence {
    pub(super) rank: u32,
    /// The longest that somebody has not heard it.
    pub(super) ms: u64,
    pub(super) witnesses: Vec<u32>,
}

impl Loss {
    /// What a rank said of itself before it ended; nothing where it ended without a word.
    pub(super) fn last_words(&self) -> Option<&str> {
        self.why.strip_prefix("failed: ")
    }
}

impl Set {
    /// Ranks that others have lost, in the order in which that was heard.
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

    /// The rank that was silent for longest while others reported, if one was, and has not reported since.
    /// What ranks hear of each other they hear through rank 0; so where rank 0 is silent, it is that one.
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

    /// For how long a rank was not heard that has reported since: the longest.
    pub(super) fn heard_again(&self, rank: u32) -> Option<u64> {
        let own = self.get(rank)?.unix_ms;
        let heard = self.all().filter(|report| report.unix_ms <= own.saturating_add(SETTLED_MS));
        let silences = heard.filter_map(|report| Some(report.peer(rank)?.heard_ms));
        silences.max().filter(|ms| *ms >= SILENT_MS)
    }

    /// The rank that raises a signal of `waiter`, if one says that it has.
    pub(super) fn writer(&self, waiter: &Report, wait: &Wait) -> Option<(u32, u64)> {
        self.all().filter(|report| report.rank != waiter.rank).find_map(|report| {
            let links = report.peer(waiter.rank)?.links.iter().filter(|l| l.level == wait.level);
            let mut raised = links.flat_map(|link| &link.raised);
            let (_, total) = raised.find(|(signal, _)| *signal == wait.signal)?;
            Some((report.rank, *total))
        })
    }

    /// Whether a rank has sent what another waits for, long before that one reported that it has not come:
    /// how far it raised the signal.
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

/// Since when a rank has done nothing but what its report says: it sends nothing while it waits.
fn settled_since(report: &Report) -> u64 {
    let stay = report.wait.as_ref().map_or(report.activity.since_ms, |wait| wait.age_ms);
    report.unix_ms.saturating_sub(stay)
}

/// Whether a stay of this length means something: an error has made much of it, or it is long. What was
/// waited for when a loss was masked had that loss for its cause, which is no more.
pub(super) fn is_long(report: &Report, age_ms: u64) -> bool {
    report.is_error() || (age_ms >= LONG_MS && !report.is_masked())
}

/// The rank whose commands do not end, where one waits for its own queue, and how many.
pub(super) fn stuck_commands(report: &Report) -> Option<(u32, u64)> {
    let under_way = |peer: &crate::format::Peer| {
        let counts = peer.links.iter().filter_map(|link| link.counts.as_ref());
        counts.map(|c| c.posted.saturating_sub(c.done)).fold(0_u64, u64::saturating_add)
    };
    let peers = report.peers.iter().map(|peer| (peer.rank, under_way(peer)));
    peers.max_by_key(|(_, count)| *count).filter(|(_, count)| *count > 0)
}
