//! How ranks enter an operation together, and leave it together when one of them refuses.

use tokenyard_core::abi;
use tokenyard_core::moe::{RECORD_HEADER, Shape};
use tokenyard_core::{Error, ErrorKind, Result};

use super::control::{Header, Signal, Signature, Verdict};
use super::engine::{Body, Engine, Wait};
use super::handle::Place;

/// What one rank said when it entered the operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) rows: u64,
    /// Packed: how often the row signal rises for each row.
    pub(super) arrays: u64,
    /// Replay: offset of the owner's region. Combine: where rows are read or written.
    pub(super) base_x: u64,
    pub(super) base_weights: u64,
}

/// That of a rank that does not take part.
const NO_ENTRY: Entry = Entry { rows: 0, arrays: 0, base_x: 0, base_weights: 0 };

/// What all ranks said. Room for R entries and E counts, from the start.
#[derive(Debug)]
pub(super) struct Gathered {
    pub(super) entries: Vec<Entry>,
    /// Rows from each source, for the receive plan.
    pub(super) rows: Vec<u32>,
    /// `[R, El]`: rows from each source for each local expert.
    pub(super) counts: Vec<u32>,
    /// Arena offset of each owner's region.
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

/// How a rank enters.
pub(super) struct Enter<'a> {
    pub(super) operation: u64,
    pub(super) signature: Signature,
    /// Which dispatch made the handle that is used; nothing where this rank refuses.
    pub(super) origin: u64,
    /// Why this rank does not take part.
    pub(super) refusal: Option<(Verdict, &'a str)>,
}

impl Enter<'_> {
    /// The header of this rank's entry.
    pub(super) fn header(&self, rows: u64, base_x: u64, base_weights: u64) -> Header {
        let verdict = self.refusal.map_or(Verdict::Go, |(verdict, _)| verdict);
        let (operation, signature) = (self.operation, self.signature.0);
        let verdict = verdict as u64;
        Header([operation, verdict, signature, rows, base_x, base_weights, 0, self.origin])
    }
}

impl Engine {
    /// Tells every rank that this one refuses.
    pub(super) fn enter_refused(&self, slot: usize, enter: &Enter<'_>) -> Result<()> {
        let text = enter.refusal.map_or("", |(_, text)| text);
        for peer in self.rotation() {
            let record = (enter.header(0, 0, 0), Body::Text(text));
            self.send_record(Signal::Entry, slot, peer, record)?;
        }
        Ok(())
    }

    /// Hears every rank's entry. All are heard, whatever they say, so that the counts stay right;
    /// then the first refusal, in order of ranks, is everybody's answer.
    pub(super) fn gather_entries(&mut self, slot: usize, enter: &Enter<'_>) -> Result<()> {
        let mut refused = None;
        let mut different = None;
        for peer in self.rotation() {
            let phase = abi::TY_PHASE_ENTRY;
            let wait = Wait { operation: enter.operation, add: 1, phase };
            self.wait(Signal::Entry, slot, peer, wait)?;
            let header = self.read_header(Signal::Entry, slot, peer, enter.operation)?;
            let theirs = Signature(header.0[2]);
            let both_go = header.verdict() == Some(Verdict::Go) && enter.refusal.is_none();
            let equal = if both_go {
                theirs == enter.signature && header.0[7] == enter.origin
            } else {
                theirs.sort() == enter.signature.sort()
            };
            if !equal {
                different = different.or(Some((peer, header)));
            }
            match header.verdict() {
                Some(Verdict::Go) => self.accept_entry(slot, peer, &header)?,
                Some(_) if refused.is_some_and(|(first, _)| first < peer) => {
                    self.forget_entry(peer);
                }
                Some(verdict) => {
                    self.forget_entry(peer);
                    refused = Some((peer, verdict));
                }
                None => return Err(bad_record(peer, format!("verdict {}", header.0[1]))),
            }
        }
        if let Some((peer, header)) = different {
            return Err(mismatch(peer, &header, self.rank, enter));
        }
        match refused {
            Some((peer, verdict)) => Err(self.refusal_of(Signal::Entry, slot, peer, verdict)),
            None => Ok(()),
        }
    }

    /// Hears every owner's grant. `bases` gets this rank's first row in each expert's block.
    pub(super) fn gather_grants(
        &mut self,
        slot: usize,
        operation: u64,
        handle: usize,
    ) -> Result<()> {
        let mut refused: Option<(u32, Verdict)> = None;
        for peer in self.rotation() {
            let wait = Wait { operation, add: 1, phase: abi::TY_PHASE_GRANT };
            self.wait(Signal::Grant, slot, peer, wait)?;
            let header = self.read_header(Signal::Grant, slot, peer, operation)?;
            match header.verdict() {
                Some(Verdict::Go) => self.accept_grant(slot, peer, &header, handle)?,
                Some(verdict) if refused.is_none_or(|(first, _)| peer < first) => {
                    refused = Some((peer, verdict));
                }
                Some(_) => {}
                None => return Err(bad_record(peer, format!("verdict {}", header.0[1]))),
            }
        }
        match refused {
            Some((peer, verdict)) => Err(self.refusal_of(Signal::Grant, slot, peer, verdict)),
            None => Ok(()),
        }
    }

    fn read_header(
        &self,
        signal: Signal,
        slot: usize,
        peer: u32,
        operation: u64,
    ) -> Result<Header> {
        // SAFETY: the record lies in this rank's control window; its writer is done with it, since
        // its signal was seen (INV-1), and writes it again only after this operation.
        let header =
            unsafe { self.record_from(signal, slot, peer).cast::<Header>().read_volatile() };
        if header.operation() != operation {
            return Err(bad_record(
                peer,
                format!("operation {}, while this rank is at {operation}", header.operation()),
            ));
        }
        Ok(header)
    }

    fn accept_entry(&mut self, slot: usize, peer: u32, header: &Header) -> Result<()> {
        let rows = header.0[3];
        if rows > u64::from(self.shape.max_tokens) {
            return Err(bad_record(peer, format!("{rows} rows of {}", self.shape.max_tokens)));
        }
        let arrays = Signature(header.0[2]).arrays();
        let entry = Entry { rows, arrays, base_x: header.0[4], base_weights: header.0[5] };
        self.gathered.entries[peer as usize] = entry;
        self.gathered.rows[peer as usize] = rows as u32;
        if !Signature(header.0[2]).is_fresh() {
            return Ok(());
        }
        let local = self.shape.local_experts() as usize;
        let record = self.record_from(Signal::Entry, slot, peer);
        let counts = &mut self.gathered.counts[peer as usize * local..][..local];
        // SAFETY: as in `read_header`; a record has room for El counts, 4-byte aligned.
        unsafe {
            std::ptr::copy_nonoverlapping(
                record.add(RECORD_HEADER as usize).cast::<u32>(),
                counts.as_mut_ptr(),
                local,
            );
        }
        Ok(())
    }

    fn forget_entry(&mut self, peer: u32) {
        self.gathered.entries[peer as usize] = NO_ENTRY;
        self.gathered.rows[peer as usize] = 0;
    }

    fn accept_grant(
        &mut self,
        slot: usize,
        peer: u32,
        header: &Header,
        handle: usize,
    ) -> Result<()> {
        let place = Place { tokens: header.0[3], rows: header.0[4], first: header.0[5] };
        let local = self.shape.local_experts() as usize;
        let record = self.record_from(Signal::Grant, slot, peer);
        let state = &mut self.handles[handle];
        let rows = u64::from(state.send.rank_counts()[peer as usize]);
        if place.first.saturating_add(rows) > place.tokens {
            return Err(bad_record(
                peer,
                format!("a grant from row {} of {}", place.first, place.tokens),
            ));
        }
        state.places[peer as usize] = place;
        self.gathered.regions[peer as usize] = header.0[2];
        let bases = &mut state.expert_bases[peer as usize * local..][..local];
        // SAFETY: as in `accept_entry`.
        unsafe {
            std::ptr::copy_nonoverlapping(
                record.add(RECORD_HEADER as usize).cast::<u32>(),
                bases.as_mut_ptr(),
                local,
            );
        }
        Ok(())
    }

    #[cold]
    fn refusal_of(&self, signal: Signal, slot: usize, peer: u32, verdict: Verdict) -> Error {
        let record = self.record_from(signal, slot, peer);
        // SAFETY: as in `read_header`; the text's length is bounded by its room.
        let text = unsafe {
            let header = record.cast::<Header>().read_volatile();
            let text = record.add(RECORD_HEADER as usize);
            let bytes = std::slice::from_raw_parts(text, header.text_bytes());
            String::from_utf8_lossy(bytes).into_owned()
        };
        let (kind, word) = match verdict {
            Verdict::Full => (ErrorKind::Full, "has no room"),
            Verdict::Refused | Verdict::Go => (ErrorKind::Refused, "refused its input"),
        };
        Error::new(kind, "enter operation", format!("rank {peer} {word}: {text}")).with_rank(peer)
    }
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
