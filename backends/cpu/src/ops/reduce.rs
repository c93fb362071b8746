//! Reduce-scatter: each rank gets its part of the sum of all ranks' tensors.
//!
//! It uses the slots and the records of a [gather](super::gather), and each rank sends each other one its part alone.
//! Parts for other domains go to the rank of this rail there, which sends them on inside. The receiver adds the parts
//! in the order of ranks, so no sum is made on the way: each part crosses to its domain, once.

pub(crate) mod bucket;
pub(crate) mod layout;
mod round;

use tokenyard_core::moe::RECORD_TEXT;
use tokenyard_core::ops::record::{RECORD, Shards, text_of, verdict};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::gather::{Gather, Landing};
use bucket::Bucket;
use layout::ReduceLayout;

impl Gather {
    /// Sends each rank its part of the tensors.
    ///
    /// # Safety
    /// As [`KernelSet::reduce_send`](tokenyard_core::kernels::KernelSet::reduce_send).
    pub(crate) unsafe fn reduce_send(&mut self, reduce: &abi::TyReduce) -> Result<()> {
        let (operation, slot) = (reduce.operation, self.slot(reduce.operation));
        self.reduces()?;
        check_even("number", operation)?;
        for line in &mut self.lines.all {
            line.order.open_slot(operation)?;
        }
        // SAFETY: by this function's contract.
        let (text, tensors) = unsafe { (text_of(&reduce.refusal), tensors_of(reduce)) };
        let refusal = text[..text.len().min(RECORD_TEXT as usize)].to_vec();
        let tensors = if refusal.is_empty() { tensors } else { &[] };
        let bucket = Bucket::new(reduce, tensors, self.layout.ranks())?;
        let (bytes, lengths) = (bucket.bytes(), bucket.number());
        let shards = Shards { rank: self.rank, number: operation, bytes, lengths, refusal };
        // SAFETY: the place has room for the parts, which core has checked, and no other rank writes to it.
        unsafe {
            let at = self.lines.window.at(self.layout.place(self.rank, slot) + RECORD);
            bucket.write_own(tensors, self.rank, at);
        }
        self.pass_parts(&shards, &bucket, tensors)?;
        self.own[slot] = Some(shards);
        self.buckets[slot] = Some(bucket);
        Ok(())
    }

    /// Sends this rank's parts inside, and on the rail those for all ranks of each other domain.
    fn pass_parts(
        &self,
        shards: &Shards,
        bucket: &Bucket,
        tensors: &[abi::TyTensor],
    ) -> Result<()> {
        let (operation, slot, domains) = (shards.number, self.slot(shards.number), &self.domains);
        let (layout, room) = (self.reduces()?, self.layout.room);
        let inside = self.turn(0, operation);
        inside.pass_from(shards, inside.landing(self.rank, self.rank), |way| {
            let rank = domains.place(domains.mine, way.peer);
            way.from = layout.leaving(room, rank, slot);
            // SAFETY: the place of this rank's part in the peer's window, or in this one until it is put.
            unsafe { bucket.write(tensors, rank, inside.line.start(way)) };
        })?;
        if self.lines.all.len() == 1 {
            return Ok(());
        }
        let rail = self.turn(1, operation);
        rail.pass_from(shards, self.through(self.rank, slot)?, |way| {
            way.from = layout.leaving(room, domains.place(way.peer, 0), slot);
            for peer in 0..domains.size {
                let rank = domains.place(way.peer, peer);
                // SAFETY: as above; the parts for a domain follow each other.
                unsafe {
                    let to = rail.line.start(way).add((u64::from(peer) * shards.bytes) as usize);
                    bucket.write(tensors, rank, to);
                }
            }
        })
    }

    /// Waits for the parts of all ranks, and writes their sums.
    ///
    /// # Safety
    /// As [`KernelSet::reduce_recv`](tokenyard_core::kernels::KernelSet::reduce_recv).
    pub(crate) unsafe fn reduce_recv(&mut self, reduce: &abi::TyReduce) -> Result<()> {
        let (operation, slot) = (reduce.operation, self.slot(reduce.operation));
        let own = self.own[slot].take().filter(|own| own.number == operation);
        let (Some(own), Some(bucket)) = (own, self.buckets[slot].take()) else {
            let text = format!("found reduce-scatter {operation}; expected one that was sent");
            return Err(Error::new(ErrorKind::Internal, "receive reduce-scatter", text));
        };
        let mut all = self.take_through(operation)?;
        self.take_inside(operation, &mut all)?;
        all.push(own);
        all.sort_unstable_by_key(|shards| shards.rank);
        let verdict = verdict(&all);
        if verdict.is_ok() {
            let parts = self.parts(slot, bucket.bytes())?;
            // SAFETY: by this function's contract; all ranks have parts of the same lengths.
            unsafe { bucket.sum(&parts, self.rank as usize, tensors_of(reduce)) };
        }
        self.leave(operation, verdict)
    }

    /// Waits for the parts of other domains on the rail, and sends them on inside.
    fn take_through(&self, operation: u64) -> Result<Vec<Shards>> {
        let slot = self.slot(operation);
        let take = |domain| {
            let rank = self.domains.place(domain, self.domains.index);
            let landing = self.through(rank, slot)?;
            let shards = self.turn(1, operation).take(landing)?;
            let inside = self.turn(0, operation);
            // A rank that gathers has sent no parts. Bytes that lie here go on then, because all ranks count on them;
            // none of them reads them.
            inside.pass_from(&shards, inside.landing(rank, rank), |way| {
                way.from = landing.bytes_at + u64::from(way.peer) * shards.bytes;
                inside.store(way, shards.bytes);
            })?;
            Ok(shards)
        };
        self.domains.others().map(take).collect()
    }

    /// Where the parts of all ranks for this one lie, of so many bytes each.
    fn parts(&self, slot: usize, bytes: u64) -> Result<Vec<*const u8>> {
        let (domains, window) = (&self.domains, &self.lines.window);
        let at = |rank| {
            let domain = domains.domain_of(rank);
            let is_through = domain != domains.mine && domains.peer_of(rank) == domains.index;
            let at = match is_through {
                true => self.through(rank, slot)?.bytes_at + u64::from(domains.index) * bytes,
                false => self.layout.place(rank, slot) + RECORD,
            };
            Ok(window.at(at).cast_const())
        };
        (0..self.layout.ranks()).map(at).collect()
    }

    /// The place that parts of a rank have on its rail: those for all ranks of a domain, behind each other. Their
    /// record says how many bytes are for one rank, as that of shards does.
    fn through(&self, rank: u32, slot: usize) -> Result<Landing> {
        let (layout, place) = (self.reduces()?, self.domains.domain_of(rank));
        let (at, times) = (self.layout.place(rank, slot), self.domains.size);
        let bytes_at = layout.through(self.layout.room, place, slot);
        Ok(Landing { rank, place, at, bytes_at, times })
    }

    fn reduces(&self) -> Result<ReduceLayout> {
        self.layout.reduces.ok_or_else(|| {
            let text = "the instance was planned for gathers alone";
            Error::new(ErrorKind::Internal, "run reduce-scatter", text)
        })
    }
}

/// Checks what numbers and slots of reduce-scatters have in common: each leaves one out, for the gather of its sums.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] for an odd one.
pub(super) fn check_even(what: &str, found: u64) -> Result<()> {
    if found.is_multiple_of(2) {
        return Ok(());
    }
    let text = format!("{what}: found {found}; expected an even one");
    Err(Error::new(ErrorKind::InvalidInput, "reduce", text).with_fix(
        "give each reduce-scatter two numbers and two slots: the second is for a gather of its sums",
    ))
}

/// # Safety
/// The tensors are valid for the call.
unsafe fn tensors_of(reduce: &abi::TyReduce) -> &[abi::TyTensor] {
    match reduce.count {
        0 => &[],
        // SAFETY: by this function's contract.
        count => unsafe { std::slice::from_raw_parts(reduce.tensors, count) },
    }
}
