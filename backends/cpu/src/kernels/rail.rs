//! The rail: messages between ranks with the same index in different domains.
//!
//! A source enters over the rail too, and each *forwarder*, the rank at the other end, hands on to the
//! peers of its own domain what concerns them. It stores what it received until its pending forward is done.

use tokenyard_core::Result;
use tokenyard_core::moe::{Shape, TopkScratch, validate_topk};
use tokenyard_core::signature::Signature;

use super::control::Header;
use super::handle::Leg;
use super::record::{Record, bad_record};
use super::sums::Partial;
use super::world::World;

/// The entry of the source at the other end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heard {
    /// Rows that it sends to this domain; none where it refuses.
    pub(super) rows: u32,
    pub(super) signature: Signature,
    /// Combine: where it wants this domain's rows.
    pub(super) base_x: u64,
    pub(super) base_weights: u64,
    /// It is lost, and sent nothing, or not all that it had announced.
    pub(super) gone: bool,
}

/// A forwarder's state of an operation.
#[derive(Debug)]
pub(super) struct Rail {
    /// One rank per domain.
    pub(super) shape: Shape,
    /// `[D]`.
    pub(super) heard: Vec<Heard>,
    /// `[D, S]` and `[D, S * El]`: rows per rank and per expert of this domain, as announced.
    rows: Vec<u32>,
    experts: Vec<u32>,
    /// The shape of this domain, and working memory for routings within it: `[M, K]`.
    inside: Shape,
    topk: Vec<i64>,
    check: TopkScratch,
    /// `[D]`: where combine finds the rows of each domain.
    pub(super) returned: Vec<Partial>,
    /// `[R]`: whether combine found the rank left out of its domain's rows, which came.
    pub(super) left_out: Vec<u8>,
}

impl Rail {
    /// A forwarder's state, where there are several domains.
    pub(super) fn new(world: &World) -> Option<Self> {
        let World { shape, domains, inside, .. } = *world;
        let count = domains.count as usize;
        (count > 1).then(|| Self {
            shape: domains.rail(&shape),
            heard: vec![Heard::default(); count],
            rows: vec![0; count * inside.ranks as usize],
            experts: vec![0; count * inside.experts as usize],
            inside,
            topk: Vec::with_capacity(shape.max_tokens as usize * shape.topk as usize),
            check: TopkScratch::new(&inside),
            returned: vec![Partial::default(); count],
            left_out: vec![0; shape.ranks as usize],
        })
    }

    /// Rows that a domain's source sends to a peer, and how many each of the peer's experts gets.
    pub(super) fn announced(&self, domain: u32, peer: u32) -> (u32, &[u32]) {
        let place = (domain * self.inside.ranks + peer) as usize;
        let local = self.inside.local_experts() as usize;
        (self.rows[place], &self.experts[place * local..][..local])
    }

    /// Takes what a domain's source sent when it entered: the header of its record, which was checked,
    /// and, where the source goes along, the counts behind it.
    pub(super) fn accept(&mut self, domain: u32, header: &Header, record: Record, goes: bool) {
        let signature = header.signature();
        self.heard[domain as usize] = Heard {
            rows: header.0[3] as u32,
            signature,
            base_x: header.0[4],
            base_weights: header.0[5],
            gone: false,
        };
        if goes && signature.carries_counts() {
            let (ranks, experts) = (self.inside.ranks as usize, self.inside.experts as usize);
            record.copy_counts(0, &mut self.rows[domain as usize * ranks..][..ranks]);
            record.copy_counts(ranks, &mut self.experts[domain as usize * experts..][..experts]);
        }
    }

    /// Takes it that a domain's source sends nothing.
    pub(super) fn forget(&mut self, domain: u32) {
        let (ranks, experts) = (self.inside.ranks as usize, self.inside.experts as usize);
        self.rows[domain as usize * ranks..][..ranks].fill(0);
        self.experts[domain as usize * experts..][..experts].fill(0);
        self.heard[domain as usize] = Heard { gone: true, ..Heard::default() };
    }

    /// Room for a routing within this domain, `[M, K]`.
    pub(super) fn routing(&mut self) -> &mut Vec<i64> {
        &mut self.topk
    }

    /// Takes the routing of the rows that a source sent to this domain: local ids, `[rows, K]`.
    pub(super) fn learn(&mut self, ids: &[i32], source: u32, leg: &mut Leg) -> Result<()> {
        self.topk.clear();
        self.topk.extend(ids.iter().map(|id| i64::from(*id)));
        validate_topk(&self.inside, &self.topk, &mut self.check)
            .map_err(|error| bad_record(source, error.detail()))?;
        leg.route(&self.topk);
        Ok(())
    }

    /// Compares the routing that a domain's source sent with the counts that it announced.
    pub(super) fn compare(&self, domain: u32, source: u32, leg: &Leg) -> Result<()> {
        let (ranks, experts) = (self.inside.ranks as usize, self.inside.experts as usize);
        let domain = domain as usize;
        if leg.send.rank_counts() == &self.rows[domain * ranks..][..ranks]
            && leg.send.expert_counts() == &self.experts[domain * experts..][..experts]
        {
            return Ok(());
        }
        Err(bad_record(source, "other counts than those of its rows".into()))
    }
}
