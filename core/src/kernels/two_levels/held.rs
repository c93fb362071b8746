//! The rows that pass between two exchanges, in the arena of the rail.

use crate::host::NO_TENSOR;
use crate::moe::{Arena, DType, Holder, REGION_ALIGN};
use crate::{Result, abi};

/// The rows of an operation.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "one per slot, and an operation allocates nothing")]
pub enum Rows {
    /// Those that a dispatch receives on the rail, with room for the most that may come.
    Received(abi::TyReceived),
    /// Those that a combine makes inside.
    Sums(Sums),
}

/// The sums of a combine inside a domain, and their weights: the rows of the combine on the rail.
#[derive(Clone, Copy, Debug)]
pub struct Sums {
    /// Their region.
    pub region: u64,
    /// `[rows, H]`.
    pub x: abi::TyTensor,
    /// `[rows, K]` f32, or absent.
    pub weights: abi::TyTensor,
}

/// The rows that a combine needs memory for before it enters.
#[derive(Clone, Copy, Debug)]
pub struct SumRows {
    /// The operation's number.
    pub operation: u64,
    /// Rows that this forwarder had forwarded.
    pub rows: u64,
    /// Bytes of a sum, and of the weights of a row; 0 of weights that do not return.
    pub widths: [u64; 2],
    /// The type code of the caller's rows.
    pub dtype: u32,
    /// H.
    pub hidden: u32,
    /// Bytes of the rows that return to this rank over the rail; 0 where it reads them in place.
    pub landing: u64,
}

/// Bytes of this many rows, and of their weights.
pub fn bytes_of(rows: u64, widths: [u64; 2]) -> [u64; 2] {
    widths.map(|width| (rows * width).next_multiple_of(REGION_ALIGN))
}

impl Sums {
    /// Reserves memory for sums, in an arena that starts at `base`. It also ensures that there is memory for the rows
    /// that return to this rank: ranks of other rails would not learn of a rank without, once rows move.
    ///
    /// # Errors
    /// [`Full`](crate::ErrorKind::Full), and nothing is held.
    pub fn reserve(arena: &mut Arena, of: &SumRows, base: *mut u8) -> Result<Self> {
        let SumRows { rows, widths, .. } = *of;
        let holder = Holder::Combine(of.operation);
        let bytes = bytes_of(rows, widths);
        let region = arena.allocate(bytes[0] + bytes[1], holder)?;
        let landing = (of.landing > 0).then(|| arena.allocate(of.landing, holder)).transpose();
        match landing {
            Ok(landing) => landing.iter().for_each(|landing| arena.release(landing.id)),
            Err(error) => {
                arena.release(region.id);
                return Err(error);
            }
        }
        let tensor = |at: u64, dtype: u32, columns: u64| abi::TyTensor {
            data: base.wrapping_add((region.offset + at) as usize),
            dtype,
            reserved: 0,
            shape: [rows, columns],
            stride: [columns as i64, 1],
        };
        let weights = match widths[1] {
            0 => NO_TENSOR,
            width => tensor(bytes[0], DType::F32.code(), width / 4),
        };
        Ok(Self { region: region.id, x: tensor(0, of.dtype, of.hidden.into()), weights })
    }
}

/// By slot of the caller's operations, the rows that an operation holds until it is received, or refused.
#[derive(Debug)]
pub struct HeldRows {
    slots: Vec<Option<(u64, Rows)>>,
}

// SAFETY: tensors describe memory of an arena, which the owner of this value has too; they are used where that is.
unsafe impl Send for HeldRows {}

impl HeldRows {
    /// Room for the rows of `in_flight` operations.
    pub(super) fn new(in_flight: u32) -> Self {
        Self { slots: vec![None; in_flight.max(1) as usize] }
    }

    fn slot(&self, operation: u64) -> usize {
        (operation % self.slots.len() as u64) as usize
    }

    fn of(&self, operation: u64) -> Option<Rows> {
        self.slots[self.slot(operation)].filter(|(of, _)| *of == operation).map(|(_, rows)| rows)
    }

    /// Holds the rows of an operation.
    pub fn hold(&mut self, operation: u64, rows: Rows) {
        let slot = self.slot(operation);
        self.slots[slot] = Some((operation, rows));
    }

    /// The rows that a dispatch receives on the rail.
    pub fn received(&self, operation: u64) -> Option<abi::TyReceived> {
        match self.of(operation)? {
            Rows::Received(received) => Some(received),
            Rows::Sums(_) => None,
        }
    }

    /// The sums of a combine.
    pub fn sums(&self, operation: u64) -> Option<Sums> {
        match self.of(operation)? {
            Rows::Sums(sums) => Some(sums),
            Rows::Received(_) => None,
        }
    }

    /// Forgets the rows of an operation, which no exchange reads any more. Returns their region, which the caller
    /// releases.
    #[must_use]
    pub fn take(&mut self, operation: u64) -> Option<u64> {
        let rows = self.of(operation)?;
        let slot = self.slot(operation);
        self.slots[slot] = None;
        Some(match rows {
            Rows::Received(received) => received.region,
            Rows::Sums(sums) => sums.region,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panic")]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::host::NO_OUTPUT;

    const SUMS: SumRows =
        SumRows { operation: 4, rows: 3, widths: [100, 8], dtype: 2, hidden: 50, landing: 256 };
    const BASE: usize = 1 << 20;

    fn reserve(arena: &mut Arena, of: &SumRows) -> Result<Sums> {
        Sums::reserve(arena, of, std::ptr::without_provenance_mut(BASE))
    }

    #[test]
    fn sums_and_their_weights_lie_in_one_region_and_rows_that_return_leave_none() {
        let mut arena = Arena::new(1 << 16, "key");
        let first = arena.allocate(1, Holder::CombineInput(0)).unwrap();
        let free = arena.largest_gap();
        let sums = reserve(&mut arena, &SUMS).unwrap();
        assert_eq!(bytes_of(3, [100, 8]), [384, 128]);
        assert_eq!(arena.largest_gap(), free - 384 - 128);
        let start = BASE + first.bytes as usize;
        assert_eq!([sums.x, sums.weights].map(|t| t.data.addr()), [start, start + 384]);
        assert_eq!([sums.x, sums.weights].map(|t| t.shape), [[3, 50], [3, 2]]);
        assert_eq!((sums.x.dtype, sums.weights.dtype), (2, DType::F32.code()));
        arena.release(sums.region);
        assert_eq!(arena.largest_gap(), free);
        let bare = reserve(&mut arena, &SumRows { widths: [100, 0], ..SUMS }).unwrap();
        assert!(bare.weights.data.is_null());
    }

    #[test]
    fn no_rows_have_an_address_too() {
        let mut arena = Arena::new(1 << 16, "key");
        let none = SumRows { rows: 0, landing: 0, ..SUMS };
        let sums = reserve(&mut arena, &none).unwrap();
        assert!(!sums.x.data.is_null() && !sums.weights.data.is_null());
    }

    #[test]
    fn an_arena_without_room_for_the_rows_that_return_holds_no_sums() {
        let mut arena = Arena::new(1024, "key");
        let error = reserve(&mut arena, &SumRows { landing: 640, ..SUMS }).unwrap_err();
        assert_eq!((error.kind(), arena.largest_gap()), (ErrorKind::Full, 1024));
        assert!(reserve(&mut arena, &SUMS).is_ok());
    }

    #[test]
    fn rows_are_held_for_their_own_operation_until_they_are_taken() {
        let mut held = HeldRows::new(2);
        let sums = |region| Rows::Sums(Sums { region, x: NO_TENSOR, weights: NO_TENSOR });
        let received = abi::TyReceived { region: 8, ..NO_OUTPUT };
        held.hold(6, sums(7));
        held.hold(7, Rows::Received(received));
        assert_eq!(held.sums(6).map(|sums| sums.region), Some(7));
        assert_eq!(held.received(7).map(|received| received.region), Some(8));
        assert!(held.received(6).is_none() && held.sums(7).is_none());
        assert!(held.sums(8).is_none(), "another operation of the slot");
        assert_eq!(
            [8, 6, 6, 7].map(|operation| held.take(operation)),
            [None, Some(7), None, Some(8)]
        );
        held.hold(8, sums(9));
        assert_eq!(held.take(8), Some(9));
    }
}
