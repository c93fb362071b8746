use super::memory::Argument;
use super::output::Handle;
use super::tensor::{TensorMut, TensorRef};
use crate::moe::{
    Cast, Compression, DType, Layout, RowCap, ScaleLayout, Shape, SourceIndex, TopkScratch,
    validate_topk,
};
use crate::{Error, ErrorKind, Result};

/// The sizes of outputs: known to the host, or only to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Sizes {
    /// The host learns the counts; outputs have exactly as many rows.
    #[default]
    Exact,
    /// The host learns nothing: outputs have room for the worst case, counts stay in device
    /// memory (`Received::totals`).
    WorstCase,
}

/// One dispatch.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch<'a> {
    /// `[T, H]`, rows contiguous; bf16, fp16, fp32, or FP8 e4m3 with `scales`.
    pub x: TensorRef<'a>,
    /// `[T, S]` of 4-byte elements, any strides: opaque, they pass untouched.
    pub scales: Option<TensorRef<'a>>,
    /// `[T, K]` i64: experts; a negative entry selects nothing.
    pub topk_idx: TensorRef<'a>,
    /// `[T, K]` f32.
    pub topk_weights: Option<TensorRef<'a>>,
    /// The arrangement of received rows. Equal on all ranks, as are the next two.
    pub layout: Layout,
    /// The conversion of rows on their way.
    pub cast: Cast,
    /// Exact or worst-case sizes of outputs.
    pub sizes: Sizes,
    /// M of this call, 1 to M of the communicator; none means the communicator's. No rank has more tokens. It
    /// bounds worst-case sizes, and packed and rank-major blocks, and it is the factor in `source`. Equal on all ranks.
    pub max_tokens: Option<u32>,
    /// A cap on the rows of this rank's output, in the flat and the expert-major layout, if the kernel set [takes
    /// one](super::CallForm::RowCap). With worst-case sizes it drops: rows are not counted before they move.
    /// Ranks may have different ones, or none.
    pub cap: Option<RowCap>,
    /// How received scales lie in memory. By columns in the packed layout alone, if the kernel set [supports
    /// it](super::CallForm::PackedForms); so is the next one.
    pub scale_layout: ScaleLayout,
    /// The numbers in `source` of received rows.
    pub source_index: SourceIndex,
}

/// A dispatch of new rows with the routing of a handle: no counting, same places.
#[derive(Clone, Copy, Debug)]
pub struct Replay<'a> {
    /// As in [`Dispatch`]; T is that of the handle. Without a cast it may be `[T, any]`, with at most as many
    /// bytes as [`Shape::widest_row`] numbers of f32. Rows of another width take the same routes, if the kernel
    /// set [supports it](super::CallForm::RoundOnce).
    pub x: TensorRef<'a>,
    /// As in [`Dispatch`].
    pub scales: Option<TensorRef<'a>>,
    /// As in [`Dispatch`].
    pub topk_weights: Option<TensorRef<'a>>,
    /// As in [`Dispatch`].
    pub cast: Cast,
    /// As in [`Dispatch`].
    pub scale_layout: ScaleLayout,
    /// As in [`Dispatch`].
    pub source_index: SourceIndex,
}

/// One combine.
#[derive(Debug)]
pub struct Combine<'a> {
    /// Expert outputs, `[rows, H]` with the rows of the dispatch; bf16, fp16 or fp32.
    pub x: TensorRef<'a>,
    /// f32, of the shape of the dispatch's weights: they return to their tokens.
    pub weights: Option<TensorRef<'a>>,
    /// Each returned weight is the sum of the entries of all ranks that received the token, with or without
    /// the expert (flat and rank-major rows). Otherwise it is the entry of the expert's rank. Equal on all ranks.
    pub sum_weights: bool,
    /// Up to two `[T, H]` of the type of `x`, added first.
    pub bias: [Option<TensorRef<'a>>; 2],
    /// Multiply each expert's row by its weight (not for flat and rank-major rows): that of `topk`, or else the
    /// weight that the dispatch delivered.
    pub weighted: bool,
    /// Round each sum once, on the rank of its token, in the order of ranks and then of k. Otherwise the sum
    /// of each rank's experts is rounded too. Not for flat and rank-major rows: the caller has summed the
    /// experts of each rank already. Equal on all ranks.
    pub round_once: bool,
    /// The format in which each rank's sum for a token travels. Its values are those after the round trip, for a rank's
    /// own tokens too. Packed rows of bf16 that are not rounded once. Equal on all ranks.
    pub compression: Compression,
    /// `[T, K]`, contiguous: weights for a weighted combine, known only now. Given on all ranks or on none. The
    /// combine is two operations then, of which the first sends the weights to the experts' ranks, unless the
    /// kernel set sends them itself ([`PackedSums`](super::CallForm::PackedSums) on a device).
    pub topk: Option<LateTopk<'a>>,
    /// `[T, H]` of the type of `x`.
    pub out: TensorMut<'a>,
    /// `[T, K]` f32; given if and only if `weights` is.
    pub out_weights: Option<TensorMut<'a>>,
    /// `[T, 1]` u8: how many of a token's selected experts are left out of its sum, because their
    /// rank was lost. 0 for all where a loss stops the communicator.
    pub missing: Option<TensorMut<'a>>,
}

/// Weights that a combine passes itself.
#[derive(Clone, Copy, Debug)]
pub struct LateTopk<'a> {
    /// `[T, K]` f32.
    pub weights: TensorRef<'a>,
    /// `[T, K]` i64: the dispatch's ids; where an id is negative, the expert's row is left out, whatever its
    /// contents. None: all rows count.
    pub ids: Option<TensorRef<'a>>,
}

pub(super) fn refuse<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidInput, "check arguments", message))
}

fn expect_tensor(
    name: &str,
    tensor: &TensorRef<'_>,
    dtypes: &[DType],
    shape: [usize; 2],
) -> Result<()> {
    let found = tensor.dtype();
    if !found.is_some_and(|d| dtypes.contains(&d)) {
        let names: Vec<_> = dtypes.iter().map(|d| d.name()).collect();
        let found = found.map_or("unknown", DType::name);
        return refuse(format!("{name}: found type {found}; expected {}", names.join(" or ")));
    }
    if [tensor.rows(), tensor.cols()] != shape {
        return refuse(format!(
            "{name}: found shape [{}, {}]; expected [{}, {}]",
            tensor.rows(),
            tensor.cols(),
            shape[0],
            shape[1]
        ));
    }
    Ok(())
}

fn expect_contiguous(name: &str, tensor: &TensorRef<'_>) -> Result<()> {
    if !tensor.is_contiguous() {
        return refuse(format!(
            "{name}: found strides {:?}; expected [{}, 1]: contiguous rows, one behind the other without a gap, as a \
             contiguous copy has them",
            tensor.raw().stride,
            tensor.cols()
        ));
    }
    Ok(())
}

/// Checks rows and their scales, for dispatch and replay.
fn check_rows(
    shape: &Shape,
    tokens: usize,
    x: &TensorRef<'_>,
    scales: Option<&TensorRef<'_>>,
    cast: Cast,
) -> Result<()> {
    if tokens > shape.max_tokens as usize {
        return refuse(format!(
            "x: found {tokens} tokens; expected at most max_tokens = {}",
            shape.max_tokens
        ));
    }
    let types: &[DType] = if cast == Cast::None && scales.is_some() {
        &[DType::Fp8E4m3, DType::U8]
    } else {
        &[DType::Bf16, DType::F16, DType::F32]
    };
    expect_tensor("x", x, types, [tokens, shape.hidden as usize])?;
    expect_contiguous("x", x)?;
    let element = x.dtype().map_or(1, DType::bytes);
    let row = cast
        .quant()
        .map_or(u64::from(shape.hidden) * element as u64, |quant| quant.value_bytes(shape.hidden));
    if !row.is_multiple_of(16) {
        return refuse(format!(
            "x: a row takes {row} bytes on the wire; expected a multiple of 16 (hidden = {})",
            shape.hidden
        ));
    }
    if let Some(scales) = scales {
        if cast != Cast::None {
            return refuse("scales: found some together with a cast; expected none".into());
        }
        expect_tensor("scales", scales, &[DType::F32, DType::I32], [tokens, scales.cols()])?;
        let most = (shape.hidden as usize / 4).max(1);
        if scales.cols() == 0 || scales.cols() > most {
            return refuse(format!(
                "scales: found {} columns of 4 bytes; expected 1 to hidden / 4 = {most}",
                scales.cols()
            ));
        }
    }
    Ok(())
}

fn check_weights(shape: &Shape, tokens: usize, weights: Option<&TensorRef<'_>>) -> Result<()> {
    if let Some(weights) = weights {
        expect_tensor("topk_weights", weights, &[DType::F32], [tokens, shape.topk as usize])?;
        expect_contiguous("topk_weights", weights)?;
    }
    Ok(())
}

impl<'a> Dispatch<'a> {
    /// A dispatch to flat rows: no cast, no weights, exact sizes.
    pub fn new(x: TensorRef<'a>, topk_idx: TensorRef<'a>) -> Self {
        Self {
            x,
            scales: None,
            topk_idx,
            topk_weights: None,
            layout: Layout::Flat,
            cast: Cast::None,
            sizes: Sizes::Exact,
            max_tokens: None,
            cap: None,
            scale_layout: ScaleLayout::default(),
            source_index: SourceIndex::default(),
        }
    }

    /// The forms of its output's arrays.
    pub(super) fn forms(&self) -> PackedForms {
        PackedForms { scales: self.scale_layout, source: self.source_index }
    }

    /// Every tensor of the call.
    pub(super) fn arguments(&self) -> [Argument<'a>; 4] {
        [
            Argument::rows("x", Some(self.x)),
            Argument::other("scales", self.scales),
            Argument::other("topk_idx", Some(self.topk_idx)),
            Argument::other("topk_weights", self.topk_weights),
        ]
    }

    /// Checks everything that this rank can check without the others.
    pub(super) fn check(&self, shape: &Shape, scratch: &mut TopkScratch) -> Result<()> {
        let tokens = self.topk_idx.rows();
        let most = self.max_tokens.unwrap_or(shape.max_tokens);
        if !(1..=shape.max_tokens).contains(&most) {
            return refuse(format!(
                "max_tokens: found {most}; expected 1 to that of the communicator, {}",
                shape.max_tokens
            ));
        }
        let shape = &Shape { max_tokens: most, ..*shape };
        expect_tensor("topk_idx", &self.topk_idx, &[DType::I64], [tokens, shape.topk as usize])?;
        expect_contiguous("topk_idx", &self.topk_idx)?;
        check_rows(shape, tokens, &self.x, self.scales.as_ref(), self.cast)?;
        check_weights(shape, tokens, self.topk_weights.as_ref())?;
        let alignment = self.layout.alignment();
        if alignment == 0 || alignment > 4096 {
            return refuse(format!("alignment: found {alignment}; expected 1 to 4096"));
        }
        // The host cannot read a device's memory: there the kernel set checks the values.
        if self.topk_idx.is_on_device() {
            return Ok(());
        }
        validate_topk(shape, self.topk_idx.elements::<i64>(), scratch)
    }
}

/// The forms of arrays of a packed output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PackedForms {
    pub(super) scales: ScaleLayout,
    pub(super) source: SourceIndex,
}

impl PackedForms {
    /// Refuses, by its name, a form that rows of another layout do not have.
    pub(super) fn check(self, layout: Layout) -> Result<()> {
        let name = match self {
            _ if layout == Layout::Packed => return Ok(()),
            Self { scales: ScaleLayout::ColumnMajor, .. } => "scale_layout: found column-major",
            Self { source: SourceIndex::Token, .. } => "source_index: found tokens alone",
            _ => return Ok(()),
        };
        refuse(format!("{name} with {} rows; expected the packed layout", layout.name()))
    }
}

impl<'a> Replay<'a> {
    /// A replay of rows alone: no cast, no weights.
    pub fn new(x: TensorRef<'a>) -> Self {
        Self {
            x,
            scales: None,
            topk_weights: None,
            cast: Cast::None,
            scale_layout: ScaleLayout::default(),
            source_index: SourceIndex::default(),
        }
    }

    /// As [`Dispatch::forms`].
    pub(super) fn forms(&self) -> PackedForms {
        PackedForms { scales: self.scale_layout, source: self.source_index }
    }

    /// Every tensor of the call.
    pub(super) fn arguments(&self) -> [Argument<'a>; 3] {
        [
            Argument::rows("x", Some(self.x)),
            Argument::other("scales", self.scales),
            Argument::other("topk_weights", self.topk_weights),
        ]
    }

    /// Checks everything that this rank can check without the others.
    pub(super) fn check(&self, shape: &Shape, handle: &Handle) -> Result<()> {
        let tokens = handle.tokens();
        if self.is_beside(shape) {
            self.check_width(shape)?;
            let shape = Shape { hidden: self.x.cols() as u32, ..*shape };
            return check_rows(&shape, tokens, &self.x, None, self.cast);
        }
        check_rows(shape, tokens, &self.x, self.scales.as_ref(), self.cast)?;
        check_weights(shape, tokens, self.topk_weights.as_ref())
    }

    /// True if its rows have another width than those of dispatches.
    pub(super) fn is_beside(&self, shape: &Shape) -> bool {
        self.x.cols() != shape.hidden as usize
    }

    /// Checks rows of another width: they have no scales, weights or cast, and fit into the space of a
    /// dispatch's rows.
    fn check_width(&self, shape: &Shape) -> Result<()> {
        let others =
            self.scales.is_some() || self.topk_weights.is_some() || self.cast != Cast::None;
        let bytes = self.x.cols() * self.x.dtype().map_or(1, DType::bytes);
        let most = 4 * shape.widest_row() as usize;
        if others || bytes == 0 || bytes > most {
            return refuse(format!(
                "x: found rows of {} numbers, {bytes} bytes; expected hidden = {}, or another number \
                 without scales, weights and cast, of at most {most} bytes",
                self.x.cols(),
                shape.hidden
            ));
        }
        Ok(())
    }
}

impl<'a> Combine<'a> {
    /// A sum without weights and biases.
    pub fn new(x: TensorRef<'a>, out: TensorMut<'a>) -> Self {
        Self {
            x,
            weights: None,
            sum_weights: false,
            bias: [None; 2],
            weighted: false,
            round_once: false,
            compression: Compression::None,
            topk: None,
            out,
            out_weights: None,
            missing: None,
        }
    }
}

impl Combine<'_> {
    /// Every tensor of the call.
    pub(super) fn arguments(&self) -> [Argument<'_>; 9] {
        [
            Argument::rows("x", Some(self.x)),
            Argument::other("weights", self.weights),
            Argument::other("topk weights", self.topk.map(|topk| topk.weights)),
            Argument::other("topk ids", self.topk.and_then(|topk| topk.ids)),
            Argument::rows("bias 0", self.bias[0]),
            Argument::rows("bias 1", self.bias[1]),
            Argument::rows("out", Some(self.out.as_ref())),
            Argument::other("out_weights", self.out_weights.as_ref().map(TensorMut::as_ref)),
            Argument::other("missing", self.missing.as_ref().map(TensorMut::as_ref)),
        ]
    }

    /// Checks everything that this rank can check without the others.
    pub(super) fn check(&self, shape: &Shape, handle: &Handle) -> Result<()> {
        let hidden = shape.hidden as usize;
        let summable = [DType::Bf16, DType::F16, DType::F32];
        expect_tensor("x", &self.x, &summable, [handle.rows, hidden])?;
        expect_contiguous("x", &self.x)?;
        let dtype = self.x.dtype().unwrap_or(DType::Bf16);
        if !(hidden * dtype.bytes()).is_multiple_of(16) {
            return refuse(format!(
                "x: a row takes {} bytes; expected a multiple of 16",
                hidden * dtype.bytes()
            ));
        }
        for (name, bias) in ["bias 0", "bias 1"].into_iter().zip(&self.bias) {
            if let Some(bias) = bias {
                expect_tensor(name, bias, &[dtype], [handle.tokens, hidden])?;
                expect_contiguous(name, bias)?;
            }
        }
        if self.bias[0].is_none() && self.bias[1].is_some() {
            return refuse("bias: found the second without the first".into());
        }
        expect_tensor("out", &self.out.as_ref(), &[dtype], [handle.tokens, hidden])?;
        if let Some(missing) = &self.missing {
            expect_tensor("missing", &missing.as_ref(), &[DType::U8], [handle.tokens, 1])?;
        }
        self.check_compression(handle.layout)?;
        self.check_weighted(handle)?;
        self.check_topk(shape, handle)?;
        self.check_returned_weights(shape, handle)
    }

    fn check_topk(&self, shape: &Shape, handle: &Handle) -> Result<()> {
        let Some(LateTopk { weights, ids }) = &self.topk else { return Ok(()) };
        if !self.weighted {
            return refuse(
                "topk: found weights of an unweighted combine; expected a weighted one".into(),
            );
        }
        let expected = [handle.tokens, shape.topk as usize];
        expect_tensor("topk weights", weights, &[DType::F32], expected)?;
        expect_contiguous("topk weights", weights)?;
        if let Some(ids) = ids {
            expect_tensor("topk ids", ids, &[DType::I64], expected)?;
            expect_contiguous("topk ids", ids)?;
        }
        Ok(())
    }

    fn check_weighted(&self, handle: &Handle) -> Result<()> {
        let (merged, name) = (handle.layout.has_a_row_per_token(), handle.layout.name());
        if merged && self.round_once {
            return refuse(format!(
                "round_once: {name} rows are merged already; expected another layout"
            ));
        }
        if !merged && self.sum_weights {
            return refuse(format!(
                "sum_weights: found it with {name} rows; expected flat or rank-major ones"
            ));
        }
        if !self.weighted {
            return Ok(());
        }
        if merged {
            return refuse(format!(
                "weighted: {name} rows are merged already; expected unweighted, or another layout"
            ));
        }
        if self.topk.is_none() && !handle.has_weights {
            return refuse("weighted: the dispatch had no topk_weights".into());
        }
        Ok(())
    }

    fn check_returned_weights(&self, shape: &Shape, handle: &Handle) -> Result<()> {
        let topk = shape.topk as usize;
        match (&self.weights, &self.out_weights) {
            (None, None) => Ok(()),
            (Some(weights), Some(out)) => {
                let columns = if handle.layout.has_a_row_per_token() { topk } else { 1 };
                let expected = [handle.rows, columns];
                expect_tensor("weights", weights, &[DType::F32], expected)?;
                expect_contiguous("weights", weights)?;
                let out_shape = [handle.tokens, topk];
                expect_tensor("out_weights", &out.as_ref(), &[DType::F32], out_shape)
            }
            (found, _) => refuse(format!(
                "found {} weights and {} out_weights; expected both or neither",
                u8::from(found.is_some()),
                u8::from(self.out_weights.is_some())
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::check_memory;
    use super::*;

    #[test]
    fn every_tensor_of_a_combine_must_lie_on_the_device_of_the_communicator() {
        let rows = [0.0_f32; 4];
        let (mut out, mut out_weights, mut missing) = ([0.0_f32; 4], [0.0_f32; 1], [0_u8; 1]);
        let x = TensorRef::from_slice(&rows, 1, 4).unwrap();
        let combine = Combine {
            x,
            weights: Some(x),
            bias: [Some(x), Some(x)],
            weighted: false,
            round_once: false,
            compression: Compression::None,
            sum_weights: false,
            topk: Some(LateTopk { weights: x, ids: Some(x) }),
            out: TensorMut::from_slice(&mut out, 1, 4).unwrap(),
            out_weights: Some(TensorMut::from_slice(&mut out_weights, 1, 1).unwrap()),
            missing: Some(TensorMut::from_slice(&mut missing, 1, 1).unwrap()),
        };
        let wanted = [
            "x",
            "weights",
            "topk weights",
            "topk ids",
            "bias 0",
            "bias 1",
            "out",
            "out_weights",
            "missing",
        ];
        for (argument, name) in combine.arguments().into_iter().zip(wanted) {
            let text = check_memory(&[argument], Some(0)).unwrap_err().to_string();
            assert!(text.contains(&format!("{name}: found host memory")), "{text}");
        }
    }
}
