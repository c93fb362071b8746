//! How ranks enter an operation together, and leave it together when one of them refuses.
//!
//! A source enters with a record to each peer of its domain and one over the rail to each other
//! domain; the forwarder there hands it on. So every rank hears all R entries, and all draw the same
//! conclusion from them. Where losses are masked they do not all hear the same: see `verdicts`.

use tokenyard_core::abi;
use tokenyard_core::moe::Shape;
use tokenyard_core::signature::Signature;
use tokenyard_core::{Error, ErrorKind, Result};

use super::commands::{Body, Record};
use super::control::{Header, Signal, Verdict};
use super::engine::{Engine, Wait};
use super::handle::Place;

/// What the entry in one place said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) rows: u64,
    /// Packed: how often the row signal rises for each row.
    pub(super) arrays: u64,
    /// Replay: offset of the peer's region. Combine: where rows are read or written.
    pub(super) base_x: u64,
    pub(super) base_weights: u64,
    /// The source is lost, as its forwarder says.
    pub(super) gone: bool,
}

/// That of a source that does not take part.
const NO_ENTRY: Entry = Entry { rows: 0, arrays: 0, base_x: 0, base_weights: 0, gone: false };

/// What all ranks said, by place. Room for R entries and E counts, from the start.
#[derive(Debug)]
pub(super) struct Gathered {
    pub(super) entries: Vec<Entry>,
    /// Rows from each source, for the receive plan.
    pub(super) rows: Vec<u32>,
    /// `[R, El]`: rows from each source for each local expert.
    pub(super) counts: Vec<u32>,
    /// Arena offset of each peer's region, for the rows of each domain.
    pub(super) regions: Vec<u64>,
}

impl Gathered {
    pub(super) fn new(shape: &Shape) -> Self {
        let ranks = shape.ranks as usize;
        Self {
            entries: vec![NO_ENTRY; ranks],
            rows: vec![0; ranks],
            counts: vec![0; shape.experts as usize],
            regions: vec![0; ranks],
        }
    }
}

/// How a source enters.
#[derive(Clone, Copy)]
pub(super) struct Enter<'a> {
    pub(super) operation: u64,
    pub(super) signature: Signature,
    /// Which dispatch made the handle that is used; nothing where the source refuses.
    pub(super) origin: u64,
    /// Why it does not take part.
    pub(super) refusal: Option<(Verdict, &'a [u8])>,
}

/// What an entry says about rows.
pub(super) struct Terms<'a> {
    pub(super) rows: u64,
    pub(super) base_x: u64,
    pub(super) base_weights: u64,
    pub(super) body: Body<'a>,
}

impl<'a> Terms<'a> {
    /// So many rows, and nothing else to say.
    pub(super) fn rows(rows: u32) -> Self {
        Self { rows: rows.into(), base_x: 0, base_weights: 0, body: Body::Nothing }
    }

    /// The record that says so.
    fn record(
        self,
        (operation, verdict): (u64, Verdict),
        signature: Signature,
        origin: u64,
    ) -> (Header, Body<'a>) {
        let Self { rows, base_x, base_weights, body } = self;
        let Signature(signature) = signature;
        let header = [operation, verdict as u64, signature, rows, base_x, base_weights, 0, origin];
        (Header(header), body)
    }
}

/// What a peer of this domain is told about the rows of the source in a domain: `(domain, peer)`.
pub(super) type ToPeer<'f> = dyn for<'a> Fn(&'a Engine, u32, u32) -> Terms<'a> + 'f;

/// What the forwarder in a domain is told about this rank's rows.
pub(super) type ToDomain<'f> = dyn for<'a> Fn(&'a Engine, u32) -> Terms<'a> + 'f;

impl Enter<'_> {
    /// The record; a source that refuses has no terms.
    fn record<'a>(&'a self, terms: impl FnOnce() -> Terms<'a>) -> (Header, Body<'a>) {
        let Self { operation, signature, origin, refusal } = *self;
        match refusal {
            Some((verdict, text)) => {
                let Signature(signature) = signature;
                let header = [operation, verdict as u64, signature, 0, 0, 0, 0, origin];
                (Header(header), Body::Text(text))
            }
            None => terms().record((operation, Verdict::Go), signature, origin),
        }
    }
}

/// Whether somebody refuses, as all know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agreed(pub(super) Option<Refusal>);

/// That a rank refuses, or has no room, as it said so.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    pub(super) rank: u32,
    pub(super) verdict: Verdict,
    /// It says why; none where this rank only hears that there is one.
    pub(super) record: Option<Record>,
}

impl Refusal {
    /// The first refusal, in order of ranks, is everybody's answer.
    pub(super) fn first(known: Option<Self>, other: Self) -> Option<Self> {
        known.filter(|known| known.rank <= other.rank).or(Some(other))
    }

    /// Why, as it said it.
    pub(super) fn text(&self) -> &[u8] {
        self.record.as_ref().map_or(&[], Record::text)
    }

    #[cold]
    pub(super) fn error(self) -> Error {
        let (kind, word) = match self.verdict {
            Verdict::Full => (ErrorKind::Full, "has no room"),
            Verdict::Refused | Verdict::Go | Verdict::Gone => {
                (ErrorKind::Refused, "refused its input")
            }
        };
        let text = match self.record {
            Some(_) => String::from_utf8_lossy(self.text()),
            None => "the ranks that know why are cut off from this one by a loss".into(),
        };
        let message = format!("rank {} {word}: {text}", self.rank);
        Error::new(kind, "enter operation", message).with_rank(self.rank)
    }
}

impl Engine {
    /// Tells every rank how this one enters: the forwarders of the other domains, and the peers.
    pub(super) fn enter(
        &self,
        slot: usize,
        enter: &Enter<'_>,
        to_domain: &ToDomain<'_>,
        to_peer: &ToPeer<'_>,
    ) -> Result<()> {
        for domain in self.domains.others() {
            let record = enter.record(|| to_domain(self, domain));
            self.send_rail_record(Signal::Entry, slot, domain, record)?;
        }
        self.announce(slot, self.domains.mine, enter, to_peer)
    }

    /// Tells the peers how the source of a domain enters.
    fn announce(
        &self,
        slot: usize,
        domain: u32,
        enter: &Enter<'_>,
        to_peer: &ToPeer<'_>,
    ) -> Result<()> {
        for peer in self.domains.peers() {
            let record = enter.record(|| to_peer(self, domain, peer));
            self.send_record(Signal::Entry, slot, (domain, peer), record)?;
        }
        Ok(())
    }

    /// Hears the sources at the other ends of the rail, and hands on to the peers how they enter.
    pub(super) fn relay(
        &mut self,
        slot: usize,
        operation: u64,
        to_peer: &ToPeer<'_>,
    ) -> Result<()> {
        for domain in self.domains.others() {
            self.hear(slot, domain, operation)?;
            self.hand_on(slot, domain, operation, to_peer)?;
        }
        Ok(())
    }

    /// Hands on how the source of a domain enters, which was heard; or that it is lost.
    pub(super) fn hand_on(
        &self,
        slot: usize,
        domain: u32,
        operation: u64,
        to_peer: &ToPeer<'_>,
    ) -> Result<()> {
        if self.heard(domain)?.gone {
            for peer in self.domains.peers() {
                let terms = to_peer(self, domain, peer);
                let record = terms.record((operation, Verdict::Gone), Signature::default(), 0);
                self.send_record(Signal::Entry, slot, (domain, peer), record)?;
            }
            return Ok(());
        }
        let record = self.rail_record_from(Signal::Entry, slot, domain);
        let header = record.header();
        let refusal = header.verdict().filter(|verdict| *verdict != Verdict::Go);
        let enter = Enter {
            operation,
            signature: Signature(header.0[2]),
            origin: header.0[7],
            refusal: refusal.map(|verdict| (verdict, record.text())),
        };
        self.announce(slot, domain, &enter, to_peer)
    }

    /// Tells every rank that this one refuses, and hands on what others say.
    pub(super) fn enter_refused(&mut self, slot: usize, enter: &Enter<'_>) -> Result<()> {
        self.enter(slot, enter, &|_, _| Terms::rows(0), &|_, _, _| Terms::rows(0))?;
        self.relay(slot, enter.operation, &|_, _, _| Terms::rows(0))
    }

    /// Hears every source's entry, and agrees with the others on whether somebody refuses.
    pub(super) fn gather_entries(&mut self, slot: usize, enter: &Enter<'_>) -> Result<()> {
        let refused = self.hear_entries(slot, enter)?;
        self.conclude(slot, enter, refused)
    }

    /// Hears every source's entry, or reads it again, and returns the first refusal. All are heard,
    /// whatever they say, so that the counts stay right. The own domain comes first: its entries depend on
    /// nobody else, so ranks that are out of step find out.
    pub(super) fn hear_entries(
        &mut self,
        slot: usize,
        enter: &Enter<'_>,
    ) -> Result<Option<Refusal>> {
        let mut refused = None;
        for (domain, peer) in self.domains.pairs() {
            let source = self.domains.place(domain, peer);
            let (operation, phase) = (enter.operation, abi::TY_PHASE_ENTRY);
            let wait = Wait { operation, add: 1, phase, rank: source };
            let came = match self.agreed[slot] {
                Some(_) => !self.losses.is_given_up(self.domains.forwarder(source)),
                None => self.wait(Signal::Entry, slot, source, wait)?,
            };
            if !came {
                self.forget_entry(source);
                continue;
            }
            let record = self.record_from(Signal::Entry, slot, source);
            let header = checked(record, source, operation)?;
            let may_be_gone = domain != self.domains.mine && self.losses.are_masked();
            if may_be_gone && header.verdict() == Some(Verdict::Gone) {
                self.note_gone(source, &header);
                continue;
            }
            if !self.losses.is_handed_on(source, operation) {
                return Err(bad_record(
                    source,
                    "an entry, after its forwarder had said that it is lost".into(),
                ));
            }
            let theirs = Signature(header.0[2]);
            let verdict = verdict_of(&header, source)?;
            let equal = if verdict == Verdict::Go && enter.refusal.is_none() {
                theirs == enter.signature && header.0[7] == enter.origin
            } else {
                theirs.sort() == enter.signature.sort()
            };
            if !equal {
                return Err(mismatch(source, &header, self.rank, enter));
            }
            if verdict == Verdict::Go {
                self.accept_entry(source, &header, record)?;
            } else {
                self.forget_entry(source);
                let record = Some(record);
                refused = Refusal::first(refused, Refusal { rank: source, verdict, record });
            }
        }
        Ok(refused)
    }

    /// A source that brings nothing: it refuses, or was lost.
    pub(super) fn forget_entry(&mut self, source: u32) {
        let local = self.shape.local_experts() as usize;
        self.gathered.entries[source as usize] = NO_ENTRY;
        self.gathered.rows[source as usize] = 0;
        self.gathered.counts[source as usize * local..][..local].fill(0);
    }

    /// A source that its forwarder says is lost; what the record says of the forwarder itself is kept.
    #[cold]
    fn note_gone(&mut self, source: u32, header: &Header) {
        self.losses.note_gone(source, header.operation());
        self.forget_entry(source);
        let [.., rows, base_x, base_weights, _, _] = header.0;
        let entry = Entry { rows, base_x, base_weights, gone: true, ..NO_ENTRY };
        self.gathered.entries[source as usize] = entry;
    }

    fn accept_entry(&mut self, source: u32, header: &Header, record: Record) -> Result<()> {
        let rows = header.0[3];
        if rows > u64::from(self.shape.max_tokens) {
            return Err(bad_record(source, format!("{rows} rows of {}", self.shape.max_tokens)));
        }
        let signature = Signature(header.0[2]);
        let arrays = signature.arrays();
        let entry =
            Entry { rows, arrays, base_x: header.0[4], base_weights: header.0[5], gone: false };
        self.gathered.entries[source as usize] = entry;
        self.gathered.rows[source as usize] = rows as u32;
        if signature.carries_counts() {
            let local = self.shape.local_experts() as usize;
            let counts = &mut self.gathered.counts[source as usize * local..][..local];
            record.copy_counts(0, counts);
        }
        Ok(())
    }

    /// Keeps where the rows of a domain's source go at a peer. Checked when they are sent there.
    pub(super) fn accept_grant(
        &mut self,
        (domain, peer): (u32, u32),
        record: Record,
        handle: usize,
    ) {
        let header = record.header();
        let place = Place { tokens: header.0[3], rows: header.0[4], first: header.0[5] };
        let local = self.shape.local_experts() as usize;
        let leg = &mut self.handles[handle].legs[domain as usize];
        leg.places[peer as usize] = place;
        record.copy_counts(0, &mut leg.expert_bases[peer as usize * local..][..local]);
        self.gathered.regions[self.domains.place(domain, peer) as usize] = header.0[2];
    }
}

/// The header of a record, if it is of this operation.
pub(super) fn checked(record: Record, rank: u32, operation: u64) -> Result<Header> {
    let header = record.header();
    if header.operation() == operation {
        return Ok(header);
    }
    let found = header.operation();
    Err(bad_record(rank, format!("operation {found}, while this rank is at {operation}")))
}

/// What a rank says of itself.
pub(super) fn verdict_of(header: &Header, rank: u32) -> Result<Verdict> {
    let verdict = header.verdict().filter(|verdict| *verdict != Verdict::Gone);
    verdict.ok_or_else(|| bad_record(rank, format!("verdict {}", header.0[1])))
}

#[cold]
pub(super) fn bad_record(peer: u32, found: String) -> Error {
    Error::new(
        ErrorKind::Protocol,
        "read record",
        format!("rank {peer} sent a record with {found}"),
    )
    .with_rank(peer)
}

#[cold]
fn mismatch(peer: u32, header: &Header, rank: u32, enter: &Enter<'_>) -> Error {
    let theirs = Signature(header.0[2]);
    let (theirs, ours) = if theirs == enter.signature {
        let handle = |origin| format!("used the handle of dispatch {origin}");
        (handle(header.0[7]), handle(enter.origin))
    } else {
        let call = |signature: Signature| format!("called a {}", signature.describe());
        (call(theirs), call(enter.signature))
    };
    Error::new(
        ErrorKind::Mismatch,
        "enter operation",
        format!("operation {}: rank {peer} {theirs}; rank {rank} {ours}", enter.operation),
    )
    .with_rank(peer)
    .with_fix("all ranks must call the same operations in the same order with the same types")
}
