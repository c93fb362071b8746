//! Outputs in memory of the caller, instead of the arena.

use crate::abi;
use crate::communicator::components::Components;
use crate::communicator::memory::{Argument, check_memory};
use crate::communicator::tensor::byte_length;
use crate::communicator::{OnStream, Received, Stream, TensorMut, TensorRef};
use crate::kernels::Copies;
use crate::moe::dispatch::copies::Form;
use crate::moe::{DType, Layout, ScaleLayout};
use crate::{Error, ErrorKind, Result};

/// Memory of the caller for arrays of a [`Received`] of the same names: of the same type and columns,
/// with as many rows or more. Arrays without memory are not copied.
///
/// Of flat rows, those behind the ones that arrived become -1 in `ids`, `wide_ids` and `source_tokens`, and 0 in
/// `weights`, up to the end of the memory. In other arrays they are undefined.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// `[rows, H]`.
    pub x: Option<TensorMut<'a>>,
    /// `[rows, S]`.
    pub scales: Option<TensorMut<'a>>,
    /// `[S, rows or more]`: row-major `scales`, column by column.
    pub scale_columns: Option<TensorMut<'a>>,
    /// i32, or i64 as the dispatch took them: `[N, K]` (flat), or `[rows, K]` (rank-major).
    pub ids: Option<TensorMut<'a>>,
    /// As `ids`, i64: for a caller that wants them a second time.
    pub wide_ids: Option<TensorMut<'a>>,
    /// f32: `[rows, K]` (flat and rank-major), else `[rows, 1]`.
    pub weights: Option<TensorMut<'a>>,
    /// i32: `[N, 1]`, or `[rows, 1]` (packed and rank-major).
    pub source: Option<TensorMut<'a>>,
    /// As `source`, but the source token alone.
    pub source_tokens: Option<TensorMut<'a>>,
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
    /// `[E/R, 1]` i32.
    pub dropped: Option<TensorMut<'a>>,
    /// `[1, 1]` i32.
    pub overflow: Option<TensorMut<'a>>,
    /// `[E/R, R]` i64.
    pub ranges: Option<TensorMut<'a>>,
    /// `[T, K]` i64 of the caller, and room of the same shape. This copy runs in the same kernel as those of the
    /// output.
    pub topk_idx: Option<(TensorRef<'a>, TensorMut<'a>)>,
}

/// An array of an output, and the destination of its front.
struct Pair<'a> {
    name: &'static str,
    from: Option<TensorRef<'a>>,
    to: &'a TensorMut<'a>,
    form: Form,
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
        if found != expected && !self.is_wide() {
            let [found, expected] = [found, expected].map(|d| d.map_or("unknown", DType::name));
            return refuse(format!("{name}: found type {found}; expected {expected}"));
        }
        let (fits, shape) = match self.form.is_transposed {
            true => (
                to.rows() == from.cols() && to.cols() >= from.rows(),
                format!("[{}, {} or more]", from.cols(), from.rows()),
            ),
            false => (
                to.cols() == from.cols() && to.rows() >= from.rows(),
                format!("[{} or more, {}]", from.rows(), from.cols()),
            ),
        };
        if !fits {
            let (rows, cols) = (to.rows(), to.cols());
            return refuse(format!("{name}: found shape [{rows}, {cols}]; expected {shape}"));
        }
        if self.is_callers() {
            self.check_callers(&from)?;
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
    fn is_wide(&self) -> bool {
        matches!(self.name, "ids" | "wide_ids") && self.to.as_ref().dtype() == Some(DType::I64)
    }

    /// Whether the array is memory of the caller, too.
    fn is_callers(&self) -> bool {
        self.name == "topk_idx"
    }

    /// Elements of the destination: of 8 bytes where ids become wide, else of 4.
    fn room(&self, to: &TensorRef<'_>) -> u64 {
        let bytes = to.rows() * to.cols() * to.dtype().map_or(0, DType::bytes);
        bytes as u64 / if self.is_wide() { 8 } else { 4 }
    }

    /// Refuses ids of another type or shape than their room, or with gaps.
    fn check_callers(&self, from: &TensorRef<'_>) -> Result<()> {
        let (rows, cols) = (self.to.as_ref().rows(), self.to.as_ref().cols());
        if from.dtype() != Some(DType::I64) || from.rows() != rows || from.strides() != [cols, 1] {
            return refuse(format!(
                "{}: found shape [{}, {}] with strides {:?}; expected i64 of shape [{rows}, {cols}] without gaps",
                self.name,
                from.rows(),
                from.cols(),
                from.strides()
            ));
        }
        Ok(())
    }

    /// Whether it has rows of H elements: the device's own copies move them fast.
    fn is_rows(&self) -> bool {
        matches!(self.name, "x" | "scales")
    }

    /// The copy, in elements of 4 bytes.
    fn copy(&self, from: &TensorRef<'_>) -> abi::TyCopy {
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let to = self.to.as_ref();
        abi::TyCopy {
            from: from.raw().data,
            to: self.to.raw().data,
            elements: byte_length(&from.raw()).unwrap_or(0) as u64 / 4,
            room: self.room(&to),
            columns: from.cols() as u32,
            modulus: self.form.modulus,
            fill: self.form.fill.unwrap_or(0),
            flags: flag(self.is_wide(), abi::TY_COPY_WIDE)
                | flag(self.form.fill.is_some(), abi::TY_COPY_FILL)
                | flag(self.form.is_transposed, abi::TY_COPY_COLUMNS),
        }
    }
}

/// Copies of arrays of one communicator, in the order of a stream if there is one.
pub(crate) struct CopyOut<'a> {
    pub(crate) components: &'a Components,
    pub(crate) stream: Option<Stream>,
}

impl CopyOut<'_> {
    /// Copies the arrays that have room.
    pub(crate) fn arrays(&self, received: &Received, outputs: &mut Outputs<'_>) -> Result<()> {
        let components = self.components;
        components.check_stream(self.stream)?;
        components.check_output(received)?;
        let pairs = pairs(received, outputs);
        for pair in pairs.iter().flatten() {
            let to = Argument::other(pair.name, Some(pair.to.as_ref()));
            let from = Argument::other(pair.name, pair.from.filter(|_| pair.is_callers()));
            check_memory(&[to, from], components.user.device)?;
            pair.check()?;
        }
        let mut small = [NO_COPY; abi::TY_MAX_COPIES];
        let mut count = 0;
        for pair in pairs.iter().flatten() {
            let from = pair.check()?;
            if let Some(place) = small.get_mut(count).filter(|_| !pair.is_rows()) {
                *place = pair.copy(&from);
                count += 1;
                continue;
            }
            let from = from.raw();
            let bytes = byte_length(&from).unwrap_or(0);
            if bytes > 0 {
                // SAFETY: checked above: both sides have as many bytes, and are borrowed; on a stream
                // for the time that the contract of `Stream::new` states.
                unsafe { self.array(pair.to.raw().data, from.data, bytes)? };
            }
        }
        let stream = self.stream.map(Stream::raw);
        let copies =
            Copies { copies: &small[..count], totals: received.raw.totals.data.cast(), stream };
        if count == 0 {
            return Ok(());
        }
        // SAFETY: as above. `totals` is an array of the output.
        unsafe {
            match components.user.device {
                None => crate::moe::dispatch::copies::on_host(&copies),
                Some(_) => components.kernels().copy_out(&copies)?,
            }
        }
        Ok(())
    }

    /// # Safety
    /// Both ranges are valid and do not overlap; where there is a stream, until it has passed the copy.
    unsafe fn array(&self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        let (components, length) = (self.components, bytes as u64);
        match (components.user.device, self.stream) {
            // SAFETY: by this function's contract, in host memory.
            (None, _) => unsafe { to.copy_from_nonoverlapping(from, bytes) },
            // SAFETY: by this function's contract.
            (Some(_), None) => unsafe { components.kernels().copy(to, from, length)? },
            // SAFETY: by this function's contract; the stream lives by that of `Stream::new`.
            (Some(_), Some(stream)) => unsafe {
                components.kernels().copy_on(stream.raw(), to, from, length)?;
            },
        }
        Ok(())
    }
}

impl OnStream<'_> {
    /// As [`Communicator::copy_out`](crate::communicator::Communicator::copy_out), in the order of the stream: the
    /// output may be dropped as soon as this returns.
    ///
    /// # Errors
    /// As there.
    pub fn copy_out(&mut self, received: &Received, outputs: &mut Outputs<'_>) -> Result<()> {
        let (course, stream) = self.course();
        course.check_open()?;
        CopyOut { components: &course.components, stream }.arrays(received, outputs)
    }
}

const NO_COPY: abi::TyCopy = abi::TyCopy {
    from: std::ptr::null(),
    to: std::ptr::null_mut(),
    elements: 0,
    room: 0,
    columns: 1,
    modulus: 0,
    fill: 0,
    flags: 0,
};

/// The arrays of an output, each with its destination.
fn pairs<'a>(received: &'a Received, outputs: &'a Outputs<'a>) -> [Option<Pair<'a>>; 18] {
    let (plain, is_flat) = (Form::default(), received.layout == Layout::Flat);
    let filled = |fill: i32| Form { fill: is_flat.then_some(fill), ..plain };
    let pair = |name, from, to: &'a Option<TensorMut<'a>>, form| {
        to.as_ref().map(|to| Pair { name, from, to, form })
    };
    let tokens = Form { modulus: received.max_tokens, ..filled(-1) };
    let columns = Form { is_transposed: true, ..plain };
    let by_row = received.scales().filter(|_| received.scale_layout == ScaleLayout::RowMajor);
    [
        pair("x", Some(received.x()), &outputs.x, plain),
        pair("scales", received.scales(), &outputs.scales, plain),
        pair("scale_columns", by_row, &outputs.scale_columns, columns),
        pair("ids", received.ids(), &outputs.ids, filled(-1)),
        pair("wide_ids", received.ids(), &outputs.wide_ids, filled(-1)),
        pair("weights", received.weights(), &outputs.weights, filled(0)),
        pair("source", received.source(), &outputs.source, plain),
        pair("source_tokens", received.source(), &outputs.source_tokens, tokens),
        pair("slots", received.slots(), &outputs.slots, plain),
        pair("expert_counts", received.expert_counts(), &outputs.expert_counts, plain),
        pair("expert_starts", received.expert_starts(), &outputs.expert_starts, plain),
        pair("expert_ends", received.expert_ends(), &outputs.expert_ends, plain),
        pair("source_counts", received.source_counts(), &outputs.source_counts, plain),
        pair("source_ends", received.source_ends(), &outputs.source_ends, plain),
        pair("dropped", received.dropped(), &outputs.dropped, plain),
        pair("overflow", received.overflow(), &outputs.overflow, plain),
        pair("ranges", received.ranges(), &outputs.ranges, plain),
        outputs.topk_idx.as_ref().map(|(from, to)| Pair {
            name: "topk_idx",
            from: Some(*from),
            to,
            form: plain,
        }),
    ]
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidInput, "copy output", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(from: Option<TensorRef<'_>>, to: &TensorMut<'_>) -> Result<()> {
        Pair { name: "ids", from, to, form: Form::default() }.check().map(|_| ())
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
    fn columns_have_room_for_as_many_elements_as_there_are_rows_or_more() {
        let from = [0_i32; 6];
        let from = TensorRef::from_slice(&from, 3, 2).unwrap();
        let mut room = [0_i32; 8];
        let form = Form { is_transposed: true, ..Form::default() };
        let mut check = |rows, cols| {
            let to = TensorMut::from_slice(&mut room[..rows * cols], rows, cols).unwrap();
            let pair = Pair { name: "scale_columns", from: Some(from), to: &to, form };
            pair.check().map(|from| pair.copy(&from))
        };
        let copy = check(2, 4).unwrap();
        assert_eq!((copy.elements, copy.room, copy.columns), (6, 8, 2));
        assert_eq!(copy.flags, abi::TY_COPY_COLUMNS);
        for (rows, cols) in [(2, 2), (3, 2), (1, 6)] {
            let text = check(rows, cols).unwrap_err().to_string();
            assert!(text.contains("expected [2, 3 or more]"), "{text}");
        }
    }

    #[test]
    fn ids_alone_may_go_where_there_is_room_for_64_bits() {
        let from = [3_i32, -1];
        let ids = TensorRef::from_slice(&from, 1, 2).unwrap();
        let mut room = [7_i64; 4];
        let to = TensorMut::from_slice(&mut room, 2, 2).unwrap();
        let pair = Pair { name: "ids", from: Some(ids), to: &to, form: Form::default() };
        assert!(pair.is_wide() && pair.check().is_ok());
        assert_eq!((pair.copy(&ids).elements, pair.copy(&ids).room), (2, 4));
        let other = Pair { name: "slots", ..pair };
        assert!(!other.is_wide() && other.check().is_err());
    }

    #[test]
    fn room_for_an_array_that_an_output_does_not_have_is_refused_by_name() {
        let mut room = [0_i32; 2];
        let to = TensorMut::from_slice(&mut room, 1, 2).unwrap();
        let text = check(None, &to).unwrap_err().to_string();
        assert!(text.contains("ids: found room for it; expected none"), "{text}");
    }
}
