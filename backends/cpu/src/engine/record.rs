//! Records: what ranks write into each other's control windows.

use tokenyard_core::moe::{ControlLayout, RECORD_HEADER};
use tokenyard_core::refusal::CallRefusal;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::engine::control::{Header, Signal, Verdict};

/// The header of a record, if it is of this operation.
pub(crate) fn checked(record: Record, rank: u32, operation: u64) -> Result<Header> {
    let header = record.header();
    if header.operation() == operation {
        return Ok(header);
    }
    let found = header.operation();
    Err(bad_record(rank, format!("operation {found}, while this rank is at {operation}")))
}

/// A rank's statement about itself.
pub(crate) fn verdict_of(header: &Header, rank: u32) -> Result<Verdict> {
    let verdict = header.verdict().filter(|verdict| *verdict != Verdict::Gone);
    verdict.ok_or_else(|| bad_record(rank, format!("verdict {}", header.0[1])))
}

#[cold]
pub(crate) fn bad_record(peer: u32, found: String) -> Error {
    Error::new(
        ErrorKind::Protocol,
        "read record",
        format!("rank {peer} sent a record with {found}"),
    )
    .with_rank(peer)
}

/// The body behind a record's header.
#[derive(Clone, Copy)]
pub(crate) enum Body<'a> {
    /// Numbers.
    Counts(&'a [u32]),
    /// Why a rank refuses.
    Text(&'a [u8]),
    Nothing,
}

/// A record that is yet to be written.
#[derive(Clone, Copy)]
pub(crate) struct NewRecord<'a> {
    pub(crate) header: Header,
    pub(crate) body: Body<'a>,
}

pub(crate) fn span_of(layout: &ControlLayout, signal: Signal) -> u64 {
    if signal == Signal::Grant { layout.grants.offset } else { layout.entries.offset }
}

pub(crate) fn as_bytes(list: &[u32]) -> &[u8] {
    // SAFETY: any u32 is four bytes.
    unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), size_of_val(list)) }
}

/// A record in this rank's control window. Once its signal was seen, its writer has finished with
/// it (INV-1), and writes it again only after the operation. So read it between the two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record(*const u8);

impl Record {
    /// The record that lies at an address of this rank's control window, aligned to 64 bytes.
    pub(crate) fn at(address: *const u8) -> Self {
        Self(address)
    }

    /// The header, as its writer left it.
    pub(crate) fn header(self) -> Header {
        // SAFETY: records lie inside the window, aligned to 64 bytes, by `Places::record_from`.
        unsafe { self.0.cast::<Header>().read_volatile() }
    }

    /// Copies the counts behind the header, from number `first` on. There is room for as many as
    /// the shape allows, and no caller asks for more.
    pub(crate) fn copy_counts(self, first: usize, into: &mut [u32]) {
        // SAFETY: as in `header`; counts follow the header.
        unsafe {
            let counts = self.0.add(RECORD_HEADER as usize).cast::<u32>().add(first);
            std::ptr::copy_nonoverlapping(counts, into.as_mut_ptr(), into.len());
        }
    }

    /// The text of a refusal, cut to its room.
    pub(crate) fn text(&self) -> &[u8] {
        let bytes = self.header().text_bytes();
        // SAFETY: as in `header`; a record has room for a text.
        unsafe { std::slice::from_raw_parts(self.0.add(RECORD_HEADER as usize), bytes) }
    }
}

/// The record that a rank passes on a refusal.
pub(crate) fn refusal_record<'a>(operation: u64, refusal: &CallRefusal<'a>) -> NewRecord<'a> {
    let (verdict, rank) = (Verdict::of(refusal) as u64, refusal.rank.into());
    let header = Header([operation, verdict, 0, 0, 0, rank, 0, 0]);
    NewRecord { header, body: Body::Text(refusal.why.as_bytes()) }
}
