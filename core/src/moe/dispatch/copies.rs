//! Copies of arrays of outputs in host memory, and counts of experts for the host.

use crate::Result;
use crate::abi;
use crate::communicator::Received;
use crate::communicator::course::Course;
use crate::host::optional;
use crate::kernels::Copies;

/// How the elements of an array are copied.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Form {
    /// The value of rows behind those that arrived; none where all rows are copied.
    pub(crate) fill: Option<i32>,
    /// If it is not 0, elements that are not negative become their remainder by it.
    pub(crate) modulus: u32,
    /// The columns of the array become rows.
    pub(crate) is_transposed: bool,
}

/// Makes copies in host memory.
///
/// # Safety
/// As [`KernelSet::copy_out`](crate::kernels::KernelSet::copy_out).
pub(crate) unsafe fn on_host(copies: &Copies<'_>) {
    for copy in copies.copies {
        // SAFETY: by this function's contract; N comes first.
        unsafe { copy_one(copy, copies.totals.read_unaligned()) };
    }
}

/// # Safety
/// The addresses are valid for as many elements as the copy says, and aligned.
unsafe fn copy_one(copy: &abi::TyCopy, arrived: i64) {
    let abi::TyCopy { elements, room, columns, modulus, fill, flags, .. } = *copy;
    if flags & abi::TY_COPY_COLUMNS != 0 {
        // SAFETY: by this function's contract.
        return unsafe { copy_columns(copy) };
    }
    let fills = flags & abi::TY_COPY_FILL != 0;
    let there = if fills { elements.min(arrived as u64 * u64::from(columns)) } else { elements };
    let end = if fills { room } else { elements };
    for at in 0..end as usize {
        // SAFETY: by this function's contract: `there` of `from`, and `end` of `to`.
        unsafe {
            let value = match at < there as usize {
                true => copy.from.cast::<i32>().add(at).read(),
                false => fill,
            };
            let value = match modulus as i32 {
                modulus if modulus > 0 && value >= 0 => value % modulus,
                _ => value,
            };
            match flags & abi::TY_COPY_WIDE != 0 {
                true => copy.to.cast::<i64>().add(at).write(value.into()),
                false => copy.to.cast::<i32>().add(at).write(value),
            }
        }
    }
}

/// # Safety
/// As [`copy_one`].
unsafe fn copy_columns(copy: &abi::TyCopy) {
    let columns = copy.columns.max(1) as usize;
    let (elements, pitch) = (copy.elements as usize, copy.room as usize / columns);
    for at in 0..elements {
        let (row, column) = (at / columns, at % columns);
        // SAFETY: by this function's contract: a column has room for as many elements as there are rows.
        unsafe {
            let value = copy.from.cast::<i32>().add(at).read();
            copy.to.cast::<i32>().add(column * pitch + row).write(value);
        }
    }
}

impl Course {
    /// See [`Communicator::expert_counts`](crate::communicator::Communicator::expert_counts).
    pub(crate) fn expert_counts(&mut self, received: &Received) -> Result<Vec<u32>> {
        self.check_open()?;
        self.components.check_output(received)?;
        let mut counts = vec![0; self.components.shape.local_experts() as usize];
        if self.gives_counts(received.operation) {
            let given = self.components.kernels().expert_counts(received.operation, &mut counts);
            match optional(given) {
                Ok(None) => {}
                Ok(Some(())) => return Ok(counts),
                Err(error) => return Err(self.end_failed(received.operation, error)),
            }
        }
        let bytes = received.expert_counts().map_or(Ok(Vec::new()), |counts| counts.to_vec())?;
        for (count, word) in counts.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *count = u32::from_ne_bytes(*word);
        }
        Ok(counts)
    }

    /// Whether the kernel set may have counts of an operation for the host.
    fn gives_counts(&self, operation: u64) -> bool {
        self.is_recent(operation) && self.components.user.device.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(copy: abi::TyCopy, from: &[i32], arrived: i64) -> Vec<i32> {
        let mut to = vec![7_i32; copy.room as usize];
        let copy = abi::TyCopy {
            from: from.as_ptr().cast(),
            to: to.as_mut_ptr().cast(),
            elements: from.len() as u64,
            ..copy
        };
        // SAFETY: memory of these lengths.
        unsafe { on_host(&Copies { copies: &[copy], totals: &arrived, stream: None }) };
        to
    }

    const COPY: abi::TyCopy = abi::TyCopy {
        from: std::ptr::null(),
        to: std::ptr::null_mut(),
        elements: 0,
        room: 6,
        columns: 2,
        modulus: 0,
        fill: -1,
        flags: abi::TY_COPY_FILL,
    };

    #[test]
    fn rows_behind_those_that_arrived_are_filled_up_to_the_end_of_the_room() {
        assert_eq!(copied(COPY, &[1, 2, 3, 4], 1), [1, 2, -1, -1, -1, -1]);
        assert_eq!(copied(COPY, &[1, 2, 3, 4], 2), [1, 2, 3, 4, -1, -1]);
        let plain = abi::TyCopy { flags: 0, ..COPY };
        assert_eq!(copied(plain, &[1, 2, 3, 4], 1), [1, 2, 3, 4, 7, 7]);
    }

    #[test]
    fn columns_lie_one_after_the_other_where_that_is_asked_for() {
        let copy = abi::TyCopy { flags: abi::TY_COPY_COLUMNS, room: 8, ..COPY };
        // Three rows of two, in columns with room for four.
        assert_eq!(copied(copy, &[1, 2, 3, 4, 5, 6], 1), [1, 3, 5, 7, 2, 4, 6, 7]);
    }

    #[test]
    fn a_source_becomes_its_token_unless_it_is_left_out() {
        let tokens = abi::TyCopy { modulus: 8, columns: 1, room: 4, ..COPY };
        assert_eq!(copied(tokens, &[3, 9, -1, 23], 3), [3, 1, -1, -1]);
    }

    #[test]
    fn wide_elements_keep_their_sign() {
        let (from, mut to) = ([5_i32, -1], [7_i64; 3]);
        let copy = abi::TyCopy {
            from: from.as_ptr().cast(),
            to: to.as_mut_ptr().cast(),
            elements: 2,
            room: 3,
            columns: 1,
            flags: abi::TY_COPY_WIDE | abi::TY_COPY_FILL,
            ..COPY
        };
        // SAFETY: memory of these lengths.
        unsafe { on_host(&Copies { copies: &[copy], totals: &2, stream: None }) };
        assert_eq!(to, [5, -1, -1]);
    }
}
