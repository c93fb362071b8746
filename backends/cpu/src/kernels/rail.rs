//! The rail: what ranks with the same index in different domains tell each other.
//!
//! A source enters over the rail too, and each *forwarder*, the rank at the other end, hands on to the
//! peers of its own domain what concerns them. It keeps what it heard until its pending forward is done.

use tokenyard_core::abi;
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::{Shape, TopkScratch, validate_topk};
use tokenyard_core::signature::Signature;
use tokenyard_core::{Error, ErrorKind, Result};

use super::agree::{bad_record, checked, verdict_of};
use super::channel::{Channel, Team};
use super::control::{Ids, Signal, Verdict};
use super::domains::Domains;
use super::engine::{Engine, Wait};
use super::handle::Leg;
use super::losses::Losses;
use super::moe_shape;
use super::sums::Partial;

/// What the source at the other end said when it entered.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heard {
    /// Rows that it sends to this domain; none where it refuses.
    pub(super) rows: u32,
    pub(super) signature: Signature,
    /// Combine: where it wants this domain's rows.
    pub(super) base_x: u64,
    pub(super) base_weights: u64,
    /// It is lost, and said nothing, or not all that it had said it would.
    pub(super) gone: bool,
}

/// The link to the other domains, and what a forwarder keeps of an operation.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) channel: Channel,
    /// One rank per domain.
    pub(super) shape: Shape,
    /// `[D]`.
    heard: Vec<Heard>,
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

#[cold]
pub(super) fn no_rail() -> Error {
    Error::new(ErrorKind::Internal, "use rail", "there is one domain")
}

impl Rail {
    /// The rail, where there are several domains.
    ///
    /// # Safety
    /// As [`Engine::new`].
    pub(super) unsafe fn new(
        shape: &KernelShape,
        domains: &Domains,
        (plan, losses): (&abi::TyPlan, &Losses),
    ) -> Result<Option<Self>> {
        if domains.count == 1 {
            return Ok(None);
        }
        let moe = moe_shape(shape);
        let inside = domains.inside(&moe);
        let count = domains.count as usize;
        let ids = Ids { places: domains.count, in_flight: shape.in_flight };
        let level = abi::TY_LEVEL_SCALE_OUT;
        let team = Team { first: domains.index, step: domains.size, peers: domains.count, losses };
        // SAFETY: by this function's contract.
        let channel = unsafe { Channel::new(&plan.scale_out, level, &team, ids)? };
        let most = shape.max_tokens as usize * shape.topk as usize;
        Ok(Some(Self {
            channel,
            shape: domains.rail(&moe),
            heard: vec![Heard::default(); count],
            rows: vec![0; count * inside.ranks as usize],
            experts: vec![0; count * inside.experts as usize],
            inside,
            topk: Vec::with_capacity(most),
            check: TopkScratch::new(&inside),
            returned: vec![Partial::default(); count],
            left_out: vec![0; shape.ranks as usize],
        }))
    }

    /// Rows that a domain's source sends to a peer, and how many each of the peer's experts gets.
    pub(super) fn announced(&self, domain: u32, peer: u32) -> (u32, &[u32]) {
        let place = (domain * self.inside.ranks + peer) as usize;
        let local = self.inside.local_experts() as usize;
        (self.rows[place], &self.experts[place * local..][..local])
    }

    /// Takes it that a domain's source sends nothing.
    fn forget(&mut self, domain: u32) {
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

impl Engine {
    /// What the source of a domain said when it entered.
    pub(super) fn heard(&self, domain: u32) -> Result<Heard> {
        self.rail.as_ref().map(|rail| rail.heard[domain as usize]).ok_or_else(no_rail)
    }

    /// Whether the source of another domain is lost that this rank is the forwarder of.
    pub(super) fn is_unheard(&self, domain: u32) -> bool {
        let rail = self.rail.as_ref().filter(|_| domain != self.domains.mine);
        rail.is_some_and(|rail| rail.heard[domain as usize].gone)
    }

    /// Notes that the source of a domain was lost before all its rows had come.
    #[cold]
    pub(super) fn lose_source(&mut self, domain: u32) {
        if let Some(rail) = &mut self.rail {
            rail.heard[domain as usize].gone = true;
        }
    }

    /// Whether there are several domains, and losses are masked: then not everybody hears everybody.
    pub(super) fn masks_domains(&self) -> bool {
        self.rail.is_some() && self.losses.are_masked()
    }

    /// Hears how the source of a domain enters, or that it is lost.
    pub(super) fn hear(&mut self, slot: usize, domain: u32, operation: u64) -> Result<()> {
        let source = self.domains.place(domain, self.domains.index);
        let wait = Wait { operation, add: 1, phase: abi::TY_PHASE_ENTRY, rank: source };
        if !self.wait_rail(Signal::Entry, slot, domain, wait)? {
            if let Some(rail) = &mut self.rail {
                rail.forget(domain);
            }
            return Ok(());
        }
        let record = self.rail_record_from(Signal::Entry, slot, domain);
        let header = checked(record, source, operation)?;
        let goes = verdict_of(&header, source)? == Verdict::Go;
        let rows = header.0[3];
        if rows > u64::from(self.shape.max_tokens) {
            return Err(bad_record(source, format!("{rows} rows of {}", self.shape.max_tokens)));
        }
        let Some(rail) = &mut self.rail else { return Err(no_rail()) };
        let signature = Signature(header.0[2]);
        rail.heard[domain as usize] = Heard {
            rows: rows as u32,
            signature,
            base_x: header.0[4],
            base_weights: header.0[5],
            gone: false,
        };
        if goes && signature.carries_counts() {
            let (ranks, experts) = (rail.inside.ranks as usize, rail.inside.experts as usize);
            record.copy_counts(0, &mut rail.rows[domain as usize * ranks..][..ranks]);
            record.copy_counts(ranks, &mut rail.experts[domain as usize * experts..][..experts]);
        }
        Ok(())
    }
}
