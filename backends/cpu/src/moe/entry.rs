//! The entries of ranks into an operation.

use tokenyard_core::moe::Shape;
use tokenyard_core::refusal::CallRefusal;
use tokenyard_core::signature::Signature;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::engine::control::{Header, Verdict};
use crate::engine::record::{Body, NewRecord, Record, bad_record};

/// The contents of the entry in one place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) rows: u64,
    /// Packed: how often the row signal rises for each row.
    pub(crate) arrays: u64,
    /// Replay: offset of the peer's region. Combine: where rows are read or written.
    pub(crate) base_x: u64,
    pub(crate) base_weights: u64,
    /// The source is lost, as its forwarder reports.
    pub(crate) gone: bool,
}

/// The entry of a source that takes no part.
pub(crate) const NO_ENTRY: Entry =
    Entry { rows: 0, arrays: 0, base_x: 0, base_weights: 0, gone: false };

/// The entries of all ranks, by place. Room for R entries and E counts, from the start.
#[derive(Debug)]
pub(crate) struct Gathered {
    pub(crate) entries: Vec<Entry>,
    /// Rows from each source, for the receive plan.
    pub(crate) rows: Vec<u32>,
    /// `[R, El]`: rows from each source for each local expert.
    pub(crate) counts: Vec<u32>,
    /// Arena offset of each peer's region, for the rows of each domain.
    pub(crate) regions: Vec<u64>,
}

impl Gathered {
    pub(crate) fn new(shape: &Shape) -> Self {
        let ranks = shape.ranks as usize;
        Self {
            entries: vec![NO_ENTRY; ranks],
            rows: vec![0; ranks],
            counts: vec![0; shape.experts as usize],
            regions: vec![0; ranks],
        }
    }
}

/// How this rank enters.
#[derive(Clone, Copy)]
pub(crate) struct Enter<'a> {
    pub(crate) operation: u64,
    pub(crate) signature: Signature,
    /// The dispatch that made the handle; 0 where the rank refuses.
    pub(crate) origin: u64,
    /// Why it does not take part.
    pub(crate) refusal: Option<CallRefusal<'a>>,
}

/// The part of an entry about rows.
pub(crate) struct Terms<'a> {
    pub(crate) rows: u64,
    pub(crate) base_x: u64,
    pub(crate) base_weights: u64,
    pub(crate) body: Body<'a>,
}

impl<'a> Terms<'a> {
    /// Terms with a number of rows and no further content.
    pub(crate) fn rows(rows: u32) -> Self {
        Self { rows: rows.into(), base_x: 0, base_weights: 0, body: Body::Nothing }
    }

    /// The record of an entry with these terms.
    pub(crate) fn record(
        self,
        operation: u64,
        verdict: Verdict,
        signature: Signature,
        origin: u64,
    ) -> NewRecord<'a> {
        let Self { rows, base_x, base_weights, body } = self;
        let Signature { word, extent } = signature;
        let extent = u64::from(extent) << 32;
        let header = [operation, verdict as u64, word, rows, base_x, base_weights, extent, origin];
        NewRecord { header: Header(header), body }
    }
}

impl Enter<'_> {
    /// The record; a rank that refuses has no terms.
    pub(crate) fn record<'a>(&'a self, terms: impl FnOnce() -> Terms<'a>) -> NewRecord<'a> {
        let Self { operation, signature, origin, refusal } = *self;
        match refusal {
            Some(refusal) => {
                let Signature { word, extent } = signature;
                let (extent, verdict) = (u64::from(extent) << 32, Verdict::of(&refusal) as u64);
                let rank = refusal.rank.into();
                let header = [operation, verdict, word, 0, 0, rank, extent, origin];
                NewRecord { header: Header(header), body: Body::Text(refusal.why.as_bytes()) }
            }
            None => terms().record(operation, Verdict::Go, signature, origin),
        }
    }
}

/// Whether a rank refuses. All ranks know this.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreed(pub(crate) Option<PeerRefusal>);

/// A refusal that this rank has received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerRefusal {
    pub(crate) rank: u32,
    pub(crate) is_full: bool,
    /// The reason; none if this rank only knows that there is a refusal.
    pub(crate) record: Option<Record>,
}

impl PeerRefusal {
    /// The refusal that a record is.
    pub(crate) fn of(record: Record, writer: u32, ranks: u32) -> Result<Self> {
        let header = record.header();
        let is_full = header.verdict() == Some(Verdict::Full);
        match u32::try_from(header.0[5]).ok().filter(|rank| *rank < ranks) {
            Some(rank) => Ok(Self { rank, is_full, record: Some(record) }),
            None => Err(bad_record(writer, format!("a refusal of rank {}", header.0[5]))),
        }
    }

    /// The first refusal, in order of ranks, is the answer of all ranks.
    pub(crate) fn first(known: Option<Self>, other: Self) -> Option<Self> {
        known.filter(|known| known.rank <= other.rank).or(Some(other))
    }

    /// The reason, as the refusing rank gave it.
    pub(crate) fn refusal(&self) -> CallRefusal<'_> {
        let text = self.record.as_ref().map(Record::text);
        let why = text
            .map_or("the ranks that know why are cut off from this one by a loss", |text| {
                text.utf8_chunks().next().map_or("", |chunk| chunk.valid())
            });
        CallRefusal { rank: self.rank, is_full: self.is_full, why }
    }

    #[cold]
    pub(crate) fn error(self) -> Error {
        self.refusal().error()
    }
}

#[cold]
pub(crate) fn missing_refusal() -> Error {
    Error::new(ErrorKind::Internal, "enter operation", "this rank's own refusal was not received")
}
