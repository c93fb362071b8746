//! Outputs in memory of the caller, instead of the arena.

use super::memory::{Argument, check_memory};
use super::output::Received;
use super::stream::Stream;
use super::tensor::{TensorMut, TensorRef, byte_length};
use super::{Communicator, OnStream};
use crate::moe::DType;
use crate::{Error, ErrorKind, Result};

/// Memory of the caller for arrays of a [`Received`] of the same names: of the same type and columns,
/// with as many rows or more. Arrays without memory are not copied.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// `[rows, H]`.
    pub x: Option<TensorMut<'a>>,
    /// `[rows, S]`.
    pub scales: Option<TensorMut<'a>>,
    /// `[N, K]` i32; in host memory also i64, as the dispatch took them.
    pub ids: Option<TensorMut<'a>>,
    /// f32: `[N, K]` (flat), else `[rows, 1]`.
    pub weights: Option<TensorMut<'a>>,
    /// i32: `[N, 1]`, or `[rows, 1]` (packed).
    pub source: Option<TensorMut<'a>>,
    /// `[N, K]` i32.
    pub slots: Option<TensorMut<'a>>,
    /// `[E/R, 1]` i32.
    pub expert_counts: Option<TensorMut<'a>>,
    /// `[E/R, 1]` i32.
    pub expert_starts: Option<TensorMut<'a>>,
    /// `[E/R, 1]` i32.
    pub expert_ends: Option<TensorMut<'a>>,
    /// `[R, 1]` i32.
    pub source_counts: Option<TensorMut<'a>>,
    /// `[R, 1]` i32.
    pub source_ends: Option<TensorMut<'a>>,
    /// `[E/R, R]` i64.
    pub ranges: Option<TensorMut<'a>>,
}

/// An array of an output, and the destination of its front.
struct Pair<'a> {
    name: &'static str,
    from: Option<TensorRef<'a>>,
    to: &'a TensorMut<'a>,
}

impl Pair<'_> {
    /// The array, if it fits the destination.
    fn check(&self) -> Result<TensorRef<'_>> {
        let name = self.name;
        let Some(from) = self.from else {
            return refuse(format!(
                "{name}: found room for it; expected none, as the output has none"
            ));
        };
        let to = self.to.as_ref();
        let (found, expected) = (to.dtype(), from.dtype());
        if found != expected && !self.widens() {
            let [found, expected] = [found, expected].map(|d| d.map_or("unknown", DType::name));
            return refuse(format!("{name}: found type {found}; expected {expected}"));
        }
        if to.cols() != from.cols() || to.rows() < from.rows() {
            return refuse(format!(
                "{name}: found shape [{}, {}]; expected [{} or more, {}]",
                to.rows(),
                to.cols(),
                from.rows(),
                from.cols()
            ));
        }
        if byte_length(&from.raw()).is_none() {
            return refuse(format!(
                "{name}: the kernel set gave strides {:?}; expected rows without gaps",
                from.strides()
            ));
        }
        Ok(from)
    }

    /// Whether ids of 32 bits go where there is room for 64.
    fn widens(&self) -> bool {
        let from = self.from.filter(|from| self.name == "ids" && !from.is_on_device());
        from.is_some() && self.to.as_ref().dtype() == Some(DType::I64)
    }
}

/// # Safety
/// `to` has room for the ids.
unsafe fn widen(to: *mut u8, ids: &[i32]) {
    let to = to.cast::<i64>();
    for (place, id) in ids.iter().enumerate() {
        // SAFETY: by this function's contract; the address was checked when the tensor was made.
        unsafe { to.add(place).write(i64::from(*id)) }
    }
}

impl Communicator {
    /// Copies arrays of an output to memory of the caller, who may drop the output then: its place in
    /// the arena becomes free at once. The handle needs nothing of a flat output; the handles of other
    /// layouts hold their output's place until they are dropped. Local: no other rank takes part.
    ///
    /// Behind [`Communicator::on`] the copies are queued on the stream.
    ///
    /// # Errors
    /// Room of another type or shape, too small, in another memory, or for an array that the output
    /// does not have: then nothing is copied. Errors of the device.
    pub fn copy_out(&mut self, received: &Received, outputs: &mut Outputs<'_>) -> Result<()> {
        self.copy_arrays(received, outputs, None)
    }

    fn copy_arrays(
        &mut self,
        received: &Received,
        outputs: &mut Outputs<'_>,
        stream: Option<Stream>,
    ) -> Result<()> {
        self.check_open()?;
        self.check_stream(stream)?;
        if !received.is_of(&self.components) {
            return refuse("the output belongs to another communicator".to_owned());
        }
        let pairs = pairs(received, outputs);
        for pair in pairs.iter().flatten() {
            let to = Argument::other(pair.name, Some(pair.to.as_ref()));
            check_memory(&[to], self.components.device)?;
            pair.check()?;
        }
        for pair in pairs.iter().flatten() {
            let from = pair.check()?;
            if pair.widens() {
                // SAFETY: checked above: as many elements are there.
                unsafe { widen(pair.to.raw().data, from.elements()) };
                continue;
            }
            let from = from.raw();
            let bytes = byte_length(&from).unwrap_or(0);
            if bytes > 0 {
                // SAFETY: checked above: both sides have as many bytes, and are borrowed; on a stream
                // for the time that the contract of `Stream::new` states.
                unsafe { self.copy_array(pair.to.raw().data, from.data, bytes, stream)? };
            }
        }
        Ok(())
    }

    /// # Safety
    /// Both ranges are valid and do not overlap; where there is a stream, until it has passed the copy.
    unsafe fn copy_array(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: Option<Stream>,
    ) -> Result<()> {
        let length = bytes as u64;
        match (self.components.device, stream) {
            // SAFETY: by this function's contract, in host memory.
            (None, _) => unsafe { to.copy_from_nonoverlapping(from, bytes) },
            // SAFETY: by this function's contract.
            (Some(_), None) => unsafe { self.components.kernels().copy(to, from, length)? },
            // SAFETY: by this function's contract; the stream lives by that of `Stream::new`.
            (Some(_), Some(stream)) => unsafe {
                self.components.kernels().copy_on(stream.raw(), to, from, length)?;
            },
        }
        Ok(())
    }
}

impl OnStream<'_> {
    /// As [`Communicator::copy_out`], in the order of the stream: the output may be dropped as soon as this
    /// returns.
    ///
    /// # Errors
    /// As there.
    pub fn copy_out(&mut self, received: &Received, outputs: &mut Outputs<'_>) -> Result<()> {
        let (comm, stream) = self.components();
        comm.copy_arrays(received, outputs, stream)
    }
}

/// The arrays of an output, each with its destination.
fn pairs<'a>(received: &'a Received, outputs: &'a Outputs<'a>) -> [Option<Pair<'a>>; 12] {
    let pair =
        |name, from, to: &'a Option<TensorMut<'a>>| to.as_ref().map(|to| Pair { name, from, to });
    [
        pair("x", Some(received.x()), &outputs.x),
        pair("scales", received.scales(), &outputs.scales),
        pair("ids", received.ids(), &outputs.ids),
        pair("weights", received.weights(), &outputs.weights),
        pair("source", received.source(), &outputs.source),
        pair("slots", received.slots(), &outputs.slots),
        pair("expert_counts", received.expert_counts(), &outputs.expert_counts),
        pair("expert_starts", received.expert_starts(), &outputs.expert_starts),
        pair("expert_ends", received.expert_ends(), &outputs.expert_ends),
        pair("source_counts", received.source_counts(), &outputs.source_counts),
        pair("source_ends", received.source_ends(), &outputs.source_ends),
        pair("ranges", received.ranges(), &outputs.ranges),
    ]
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidInput, "copy output", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(from: Option<TensorRef<'_>>, to: &TensorMut<'_>) -> Result<()> {
        Pair { name: "ids", from, to }.check().map(|_| ())
    }

    #[test]
    fn room_must_have_the_type_and_columns_of_the_array_and_its_rows_at_least() {
        let from = [0_i32; 6];
        let from = TensorRef::from_slice(&from, 3, 2).unwrap();
        let (mut room, mut other) = ([0_i32; 8], [0_f32; 6]);
        let text = |to: TensorMut<'_>| check(Some(from), &to).unwrap_err().to_string();
        assert!(check(Some(from), &TensorMut::from_slice(&mut room, 4, 2).unwrap()).is_ok());
        let short = text(TensorMut::from_slice(&mut room[..4], 2, 2).unwrap());
        assert!(short.contains("ids: found shape [2, 2]; expected [3 or more, 2]"), "{short}");
        let wide = text(TensorMut::from_slice(&mut room, 2, 4).unwrap());
        assert!(wide.contains("found shape [2, 4]"), "{wide}");
        let float = text(TensorMut::from_slice(&mut other, 3, 2).unwrap());
        assert!(float.contains("found type fp32; expected i32"), "{float}");
    }

    #[test]
    fn ids_may_go_where_there_is_room_for_64_bits() {
        let from = [3_i32, -1];
        let ids = TensorRef::from_slice(&from, 1, 2).unwrap();
        let mut room = [7_i64; 4];
        let to = TensorMut::from_slice(&mut room, 2, 2).unwrap();
        let pair = Pair { name: "ids", from: Some(ids), to: &to };
        assert!(pair.widens() && pair.check().is_ok());
        // SAFETY: room for four, of which two are written.
        unsafe { widen(pair.to.raw().data, ids.elements()) };
        assert!(!Pair { name: "slots", ..pair }.widens());
        assert_eq!(room, [3, -1, 7, 7]);
    }

    #[test]
    fn room_for_an_array_that_an_output_does_not_have_is_refused_by_name() {
        let mut room = [0_i32; 2];
        let to = TensorMut::from_slice(&mut room, 1, 2).unwrap();
        let text = check(None, &to).unwrap_err().to_string();
        assert!(text.contains("ids: found room for it; expected none"), "{text}");
    }
}
