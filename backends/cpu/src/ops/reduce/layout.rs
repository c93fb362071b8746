//! The part of a window behind the slots of gathers, for reduce-scatters.

use tokenyard_core::kernels::KernelShape;

/// For each call in flight: parts on their way to other ranks, and parts of other domains for all ranks of this one.
/// Their records lie at the places of gathers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReduceLayout {
    /// Where it begins.
    start: u64,
    calls: u32,
    ranks: u32,
    /// Ranks of a domain.
    size: u32,
    /// 0 where there is one domain.
    domains: u32,
    /// Whether parts leave from this window, because some link of the ranks cannot store to peers.
    puts: bool,
}

impl ReduceLayout {
    pub(crate) fn new(shape: &KernelShape, puts: bool, start: u64) -> Self {
        let KernelShape { ranks, domains, in_flight, .. } = *shape;
        // A call has two slots: the second is for the gather of its sums.
        let (calls, size) = (in_flight / 2, ranks / domains);
        let domains = if domains > 1 { domains } else { 0 };
        Self { start, calls, ranks, size, domains, puts }
    }

    /// Its length, where parts have so much room each; none beyond the address space.
    pub(crate) fn bytes(&self, room: u64) -> Option<u64> {
        let through = self.through_room(room).checked_mul(self.domains.into())?;
        let leaving = if self.puts { room.checked_mul(self.ranks.into())? } else { 0 };
        leaving.checked_add(through)?.checked_mul(self.calls.into())
    }

    /// Room for the parts of one rank of another domain, for all ranks of this one.
    fn through_room(&self, room: u64) -> u64 {
        room.saturating_mul(self.size.into())
    }

    /// Where the part for a rank leaves from.
    pub(crate) fn leaving(&self, room: u64, rank: u32, slot: usize) -> u64 {
        self.call(room, slot) + room * u64::from(rank)
    }

    /// Where the parts of another domain lie, which this rank sends on.
    pub(crate) fn through(&self, room: u64, domain: u32, slot: usize) -> u64 {
        let leaving = if self.puts { room * u64::from(self.ranks) } else { 0 };
        self.call(room, slot) + leaving + self.through_room(room) * u64::from(domain)
    }

    fn call(&self, room: u64, slot: usize) -> u64 {
        let of_call = self.bytes(room).unwrap_or_default() / u64::from(self.calls);
        self.start + of_call * (slot as u64 / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_all_calls_are_apart_and_within_the_layout() {
        let (room, step) = (128, 2 * 128);
        let layout =
            ReduceLayout { start: 1000, calls: 2, ranks: 4, size: 2, domains: 2, puts: true };
        let call = 4 * room + 2 * step;
        assert_eq!(layout.bytes(room), Some(2 * call));
        let leaving = |slot| [0, 3].map(|rank| layout.leaving(room, rank, slot));
        assert_eq!(leaving(0), [1000, 1000 + 3 * room]);
        assert_eq!(leaving(2), [1000 + call, 1000 + call + 3 * room]);
        let through = [0, 1].map(|domain| layout.through(room, domain, 2));
        assert_eq!(through, [0, 1].map(|domain| 1000 + call + 4 * room + domain * step));
        // Nothing leaves from here where peers are mapped, and nothing goes on where there is one domain.
        assert_eq!(ReduceLayout { puts: false, domains: 0, ..layout }.bytes(room), Some(0));
    }
}
