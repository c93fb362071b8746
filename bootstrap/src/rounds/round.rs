//! One round: the contributions to a collective so far, and its result.

use std::sync::Arc;
use std::time::Instant;

use super::super::agreement::Agreement;
use super::super::frame::{FrameKind, MAX_PAYLOAD};
use super::super::message::{
    Ask, CollectiveFailure, Contribution, MAX_VERDICT, Op, decode, decode_items, encode,
    encode_outcome, items_bytes,
};
use super::super::text::clean;
use super::Delivery;
use tokenyard_errors::{Error, ErrorKind, Result};

/// A collective that is under way, or that failed before all ranks arrived.
pub(super) struct Round {
    pub(super) op: Op,
    pub(super) topic: String,
    /// The first rank that arrived: its topic is the round's.
    opened_by: u32,
    pub(super) started: Instant,
    pub(super) arrived: Vec<bool>,
    pub(super) parts: Parts,
    pub(super) verdict: Option<Arc<Vec<u8>>>,
    /// A rank cannot take part: the verdict, once all ranks have arrived.
    pub(super) refusal: Option<CollectiveFailure>,
}

/// The contributions of the ranks so far.
pub(super) enum Parts {
    None,
    Items(Vec<Vec<u8>>),
    /// Lists that were checked to hold one item per rank.
    Columns(Vec<Option<Vec<u8>>>),
    Values(Agreement),
    /// True if the bring-up begins on all ranks.
    Asks {
        first: bool,
    },
}

impl Round {
    pub(super) fn new(rank: u32, part: &Contribution, ranks: usize, now: Instant) -> Self {
        let parts = match part.op {
            Op::Barrier | Op::Refuse => Parts::None,
            Op::Admit => Parts::Asks { first: true },
            Op::AllGather => Parts::Items(vec![Vec::new(); ranks]),
            Op::Exchange => Parts::Columns((0..ranks).map(|_| None).collect()),
            Op::Agree => Parts::Values(Agreement::default()),
        };
        Self {
            op: part.op,
            topic: part.topic.clone(),
            opened_by: rank,
            started: now,
            arrived: vec![false; ranks],
            parts,
            verdict: None,
            refusal: None,
        }
    }

    pub(super) fn add(&mut self, rank: u32, data: Vec<u8>, ranks: usize) -> Result<()> {
        let at = rank as usize;
        match &mut self.parts {
            Parts::None if data.is_empty() => {}
            Parts::None => {
                let (op, bytes) = (self.op.name(), data.len());
                return Err(refuse(format!("found {op} with {bytes} bytes, expected 0")));
            }
            Parts::Items(items) => {
                if let Some(item) = items.get_mut(at) {
                    *item = data;
                }
            }
            Parts::Columns(columns) => {
                decode_items(&data, ranks)?;
                if let Some(column) = columns.get_mut(at) {
                    *column = Some(data);
                }
            }
            Parts::Values(agreement) => agreement.add(rank, data)?,
            Parts::Asks { first } => *first &= decode::<Ask>(&data)? == Ask::First,
        }
        Ok(())
    }

    /// The results, once all have arrived.
    pub(super) fn finish(&mut self, number: u64) -> Vec<Delivery> {
        if let Some(refusal) = self.refusal.take() {
            return self.settle(number, refusal);
        }
        let to_all = |payload: Vec<u8>| {
            let shared = Arc::new(payload);
            vec![shared; self.arrived.len()]
        };
        let payloads = match &self.parts {
            Parts::None | Parts::Asks { .. } => to_all(encode_outcome::<&[u8]>(number, &[])),
            Parts::Items(items) => match joined(number, items) {
                Ok(payload) => to_all(payload),
                Err(bytes) => return self.too_large(number, bytes),
            },
            Parts::Columns(columns) => {
                let none = || vec![&[][..]; columns.len()];
                let lists = columns.iter().map(|list| {
                    let items = list.as_ref().and_then(|l| decode_items(l, columns.len()).ok());
                    items.unwrap_or_else(none)
                });
                let lists: Vec<Vec<&[u8]>> = lists.collect();
                let row = |to| lists.iter().filter_map(|l| l.get(to).copied()).collect::<Vec<_>>();
                let rows = (0..columns.len()).map(|to| joined(number, &row(to)).map(Arc::new));
                match rows.collect() {
                    Ok(payloads) => payloads,
                    Err(bytes) => return self.too_large(number, bytes),
                }
            }
            Parts::Values(agreement) => match agreement.difference() {
                None => to_all(encode_outcome::<&[u8]>(number, &[])),
                Some(difference) => {
                    let text = format!("{:?}: ranks disagree: {difference}", self.topic);
                    return self.fail(number, ErrorKind::Mismatch, text);
                }
            },
        };
        let ranks = 0u32..;
        ranks.zip(&payloads).map(|(rank, p)| self.delivery(rank, FrameKind::Outcome, p)).collect()
    }

    fn too_large(&mut self, number: u64, bytes: usize) -> Vec<Delivery> {
        let text = format!(
            "{:?}: one rank would receive {bytes} bytes, expected at most {MAX_PAYLOAD}",
            self.topic
        );
        self.fail(number, ErrorKind::InvalidInput, text)
    }

    /// Settles the round: a verdict for all ranks that arrived, stored for those that arrive later.
    pub(super) fn fail(&mut self, number: u64, kind: ErrorKind, text: String) -> Vec<Delivery> {
        self.settle(number, CollectiveFailure { kind, rank: None, text })
    }

    /// Records that `rank` cannot take part: the verdict once all have arrived. A rank that had it before could leave
    /// the world while others, which do not know it yet, find that rank gone. The first refusal counts.
    pub(super) fn refuse(&mut self, rank: u32, refusal: &Contribution) {
        let why = clean(&String::from_utf8_lossy(&refusal.data), MAX_VERDICT);
        let text = format!("rank {rank} cannot {}: {why}", refusal.topic);
        let failure = CollectiveFailure { kind: ErrorKind::Refused, rank: Some(rank), text };
        self.refusal.get_or_insert(failure);
        self.parts = Parts::None;
    }

    fn settle(&mut self, number: u64, failure: CollectiveFailure) -> Vec<Delivery> {
        let payload = Arc::new(encode(&(number, failure)));
        self.parts = Parts::None;
        self.verdict = Some(Arc::clone(&payload));
        let arrived = self.ranks_that(|arrived| arrived);
        arrived.into_iter().map(|rank| self.delivery(rank, FrameKind::Verdict, &payload)).collect()
    }

    pub(super) fn other_topic(&self, rank: u32, op: Op, topic: &str) -> String {
        format!(
            "ranks are in different collectives: rank {} called {}({:?}), rank {rank} called {}({:?}); \
             expected the same order of collectives on all ranks",
            self.opened_by,
            self.op.name(),
            self.topic,
            op.name(),
            topic
        )
    }

    pub(super) fn ranks_that(&self, test: impl Fn(bool) -> bool) -> Vec<u32> {
        (0u32..).zip(&self.arrived).filter(|(_, arrived)| test(**arrived)).map(|(r, _)| r).collect()
    }

    pub(super) fn delivery(&self, rank: u32, kind: FrameKind, payload: &Arc<Vec<u8>>) -> Delivery {
        Delivery { rank, kind, payload: Arc::clone(payload) }
    }
}

/// An outcome of `items`, or its size when that is beyond the limit.
fn joined<I: AsRef<[u8]>>(number: u64, items: &[I]) -> std::result::Result<Vec<u8>, usize> {
    const ROUND: usize = 10;
    let bytes = ROUND + items_bytes(items.iter().map(|item| item.as_ref().len()));
    if bytes > MAX_PAYLOAD {
        return Err(bytes);
    }
    Ok(encode_outcome(number, items))
}

/// A working rank could not have sent this.
pub(super) fn refuse(message: String) -> Error {
    Error::new(ErrorKind::Protocol, "take part in collective", message)
}
