//! One exchange on a yard, checked against the oracle: dispatch, experts, combine.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, ensure};
use tokenyard_core::moe::{DType, Layout as MoeLayout};
use tokenyard_core::yard::{
    Cast, Combine, CombineInput, Dispatch, Handle, Received, Replay, Sizes, TensorMut, TensorRef,
    Yard, YardOptions,
};

use crate::device::{Copied, Copies};
use crate::oracle::{
    self, Arrived, Case, Elem, ExpertOutput, Input, Inputs, Layout, RankInputs, RowType, Scales,
};

/// The yard that a case needs.
pub fn options(case: &Case) -> YardOptions {
    YardOptions::new(
        case.experts as u32,
        case.topk as u32,
        case.hidden as u32,
        case.max_tokens as u32,
    )
}

/// Domains that `yard` routes over: those that combine rounds for.
pub fn domains(yard: &Yard) -> usize {
    let report = yard.report();
    if report.algorithm == "direct" { 1 } else { report.domains as usize }
}

/// The product's word for an element type of the oracle.
pub fn dtype(elem: Elem) -> DType {
    match elem {
        Elem::Bf16 => DType::Bf16,
        Elem::F16 => DType::F16,
        Elem::F32 => DType::F32,
        Elem::E4m3 => DType::Fp8E4m3,
        Elem::I32 | Elem::Bits32 => DType::I32,
        Elem::I64 => DType::I64,
    }
}

/// The product's word for a row type of the oracle.
pub fn row_dtype(row: RowType) -> DType {
    match row {
        RowType::Bf16 => DType::Bf16,
        RowType::F16 => DType::F16,
        RowType::F32 => DType::F32,
    }
}

/// The product's word for a layout of the oracle.
pub fn layout(case: &Case) -> MoeLayout {
    match case.layout {
        Layout::Flat => MoeLayout::Flat,
        Layout::ExpertMajor { alignment, zero_padding } => {
            MoeLayout::ExpertMajor { alignment: alignment as u32, zero_padding }
        }
        Layout::Packed => MoeLayout::Packed,
    }
}

fn cast(input: Input) -> Cast {
    match input {
        Input::Plain(_) | Input::Opaque(_) => Cast::None,
        Input::Cast(_, Scales::F32) => Cast::Fp8,
        Input::Cast(_, Scales::RoundedF32) => Cast::Fp8Round,
        Input::Cast(_, Scales::Ue8m0) => Cast::Fp8Ue8m0,
    }
}

/// Bytes at an address that suits every element type.
#[derive(Clone, Debug)]
pub struct Aligned {
    words: Vec<u64>,
    bytes: usize,
}

impl Aligned {
    /// `bytes` bytes of `fill`.
    pub fn filled(bytes: usize, fill: u8) -> Self {
        Self { words: vec![u64::from_ne_bytes([fill; 8]); bytes.div_ceil(8)], bytes }
    }

    /// A copy of `from`.
    pub fn copy_of(from: &[u8]) -> Self {
        let mut new = Self::filled(from.len(), 0);
        new.bytes_mut().copy_from_slice(from);
        new
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the words are initialised and at least `bytes` long; any byte is a value.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.bytes) }
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.bytes) }
    }
}

/// What one rank brings to a case, as the product takes it.
#[derive(Clone, Debug)]
pub struct Brought {
    case: Case,
    rank: usize,
    inputs: RankInputs,
    x: Aligned,
    scales: Option<Aligned>,
    biases: Vec<Aligned>,
    copies: Copies,
}

impl Brought {
    /// Takes the inputs of `rank`.
    pub fn new(case: &Case, rank: usize, inputs: RankInputs) -> Self {
        Self {
            case: case.clone(),
            rank,
            x: Aligned::copy_of(&inputs.x),
            scales: inputs.scales.as_deref().map(Aligned::copy_of),
            biases: inputs.biases.iter().map(|b| Aligned::copy_of(b)).collect(),
            copies: Copies::default(),
            inputs,
        }
    }

    /// T on this rank.
    pub fn tokens(&self) -> usize {
        self.case.tokens_of(self.rank)
    }

    fn x(&self) -> Result<TensorRef<'_>> {
        let (elem, hidden) = (dtype(self.case.sent_elem()), self.case.hidden);
        Ok(TensorRef::from_bytes(self.x.bytes(), elem, self.tokens(), hidden)?)
    }

    fn scales(&self) -> Result<Option<TensorRef<'_>>> {
        let columns = self.case.scales().map_or(0, |(_, n)| n);
        self.scales
            .as_ref()
            .map(|s| TensorRef::from_bytes(s.bytes(), DType::I32, self.tokens(), columns))
            .transpose()
            .map_err(Into::into)
    }

    fn weights(&self) -> Result<Option<TensorRef<'_>>> {
        self.inputs
            .topk_weights
            .as_ref()
            .map(|w| TensorRef::from_slice(w.as_slice(), self.tokens(), self.case.topk))
            .transpose()
            .map_err(Into::into)
    }

    /// The arguments of the dispatch, where `yard` works.
    ///
    /// # Errors
    /// What the yard's device refuses.
    pub fn dispatch_on(&self, yard: &Yard) -> Result<Dispatch<'_>> {
        self.copies.dispatch(yard, self.dispatch()?)
    }

    /// The arguments of the dispatch, in host memory.
    ///
    /// # Errors
    /// Sizes that do not go together.
    pub fn dispatch(&self) -> Result<Dispatch<'_>> {
        Ok(Dispatch {
            x: self.x()?,
            scales: self.scales()?,
            topk_idx: TensorRef::from_slice(
                self.inputs.topk_idx.as_slice(),
                self.tokens(),
                self.case.topk,
            )?,
            topk_weights: self.weights()?,
            layout: layout(&self.case),
            cast: cast(self.case.input),
            sizes: if self.case.worst_case { Sizes::WorstCase } else { Sizes::Exact },
        })
    }

    /// The arguments of a replay, where `yard` works.
    ///
    /// # Errors
    /// What the yard's device refuses.
    pub fn replay_on(&self, yard: &Yard) -> Result<Replay<'_>> {
        self.copies.replay(yard, self.replay()?)
    }

    /// The arguments of a replay, in host memory.
    ///
    /// # Errors
    /// Sizes that do not go together.
    pub fn replay(&self) -> Result<Replay<'_>> {
        Ok(Replay {
            x: self.x()?,
            scales: self.scales()?,
            topk_weights: self.weights()?,
            cast: cast(self.case.input),
        })
    }

    /// The biases of the combine.
    pub fn biases(&self) -> Result<[Option<TensorRef<'_>>; 2]> {
        let mut out = [None, None];
        let (elem, hidden) = (row_dtype(self.case.combine.row), self.case.hidden);
        for (slot, bias) in out.iter_mut().zip(&self.biases) {
            *slot = Some(TensorRef::from_bytes(bias.bytes(), elem, self.tokens(), hidden)?);
        }
        Ok(out)
    }
}

/// The arrays of an output, as the oracle calls them.
pub(crate) const ARRAYS: [&str; 9] =
    ["x", "scales", "ids", "weights", "source", "slots", "counts", "rank_rows", "ranges"];

/// The array of an output that the oracle calls `name`.
pub(crate) fn array<'a>(received: &'a Received, name: &str) -> Option<TensorRef<'a>> {
    match name {
        "x" => Some(received.x()),
        "scales" => received.scales(),
        "ids" => received.ids(),
        "weights" => received.weights(),
        "source" => received.source(),
        "slots" => received.slots(),
        "counts" => received.expert_counts(),
        "rank_rows" => received.source_counts(),
        "ranges" => received.ranges(),
        _ => None,
    }
}

/// Compares what arrived on `rank` with what the oracle says.
///
/// # Errors
/// The first difference.
pub fn check_received(
    case: &Case,
    inputs: &Inputs,
    rank: usize,
    received: &Received,
) -> Result<()> {
    compare_received(case, &oracle::expected_dispatch(case, inputs, rank), received)
}

/// Compares what arrived with what is expected.
///
/// # Errors
/// The first difference.
pub fn compare_received(
    case: &Case,
    expected: &oracle::Received,
    received: &Received,
) -> Result<()> {
    let found = total_rows(received)?;
    if found != expected.rows as i64 {
        return Err(anyhow!("totals: found N = {found}, expected {}", expected.rows));
    }
    if !case.worst_case && received.tokens() != expected.rows {
        return Err(anyhow!("found {} tokens, expected {}", received.tokens(), expected.rows));
    }
    let mut arrays = BTreeMap::new();
    for name in ARRAYS {
        if let Some(tensor) = array(received, name) {
            arrays.insert(name, tensor.to_vec()?);
        }
    }
    expected.compare(|name| arrays.get(name).map(Vec::as_slice)).map_err(|e| anyhow!("{e}"))
}

/// The true N.
fn total_rows(received: &Received) -> Result<i64> {
    let totals = received.totals().context("the output has no totals")?.to_vec()?;
    oracle::number::i64s(&totals).first().copied().context("the totals are empty")
}

/// Runs this rank's experts on what arrived.
///
/// # Errors
/// Arrays that contradict each other.
pub fn run_experts(case: &Case, rank: usize, received: &Received) -> Result<ExpertOutput> {
    let fetch = |tensor: Option<TensorRef<'_>>| tensor.map(|t| t.to_vec()).transpose();
    let (x, scales) = (received.x().to_vec()?, fetch(received.scales())?);
    let (ids, weights) = (fetch(received.ids())?, fetch(received.weights())?);
    let counts = fetch(received.expert_counts())?.unwrap_or_default();
    let arrived = Arrived {
        rows: total_rows(received)? as usize,
        x: &x,
        scales: scales.as_deref(),
        ids: ids.as_deref(),
        weights: weights.as_deref(),
        counts: &counts,
    };
    oracle::experts::run(case, rank, &arrived).map_err(|e| anyhow!("{e}"))
}

/// Where combine finds the expert outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// In memory of the caller.
    Outside,
    /// In the arena, in the room that the yard gives.
    CombineInput,
}

/// What one rank got back.
#[derive(Clone, Debug)]
pub struct Got {
    /// `[T, H]`.
    pub x: Aligned,
    /// `[T, K]`, if weights travelled.
    pub weights: Option<Vec<f32>>,
    /// `[T]`: experts that are left out of each token's sum.
    pub missing: Vec<u8>,
}

/// The memory of one combine of the caller: what goes in, and what comes out.
#[derive(Debug)]
pub struct Buffers {
    rows: Aligned,
    weights: Option<Vec<f32>>,
    got: Got,
    /// Where the yard works on a device: x, weights, both biases, out, out_weights, missing.
    copies: [Option<Copied>; 7],
}

impl Buffers {
    /// Copies `output`; what will be written is poisoned, so that rows that are not written show.
    pub fn new(brought: &Brought, output: &ExpertOutput) -> Self {
        let (tokens, case) = (brought.tokens(), &brought.case);
        let x = Aligned::filled(tokens * case.hidden * case.combine.row.bytes(), 0x7f);
        let weights = output.weights.as_ref().map(|_| vec![f32::NAN; tokens * case.topk]);
        Self {
            rows: Aligned::copy_of(&output.rows),
            weights: output.weights.clone(),
            got: Got { x, weights, missing: vec![0xff; tokens] },
            copies: Default::default(),
        }
    }

    /// The arguments of the combine, where the yard of the handle works.
    ///
    /// # Errors
    /// Sizes that do not go together; what the yard's device refuses.
    pub fn arguments<'a>(
        &'a mut self,
        brought: &'a Brought,
        handle: &Handle,
    ) -> Result<Combine<'a>> {
        self.arguments_but(brought, handle, |_| Ok(()))
    }

    /// The same, changed by `change` while they are in host memory.
    ///
    /// # Errors
    /// As [`arguments`](Self::arguments), and what `change` says.
    pub fn arguments_but<'a>(
        &'a mut self,
        brought: &'a Brought,
        handle: &Handle,
        change: impl FnOnce(&mut Combine<'a>) -> Result<()>,
    ) -> Result<Combine<'a>> {
        let case = &brought.case;
        let (elem, hidden, tokens) = (row_dtype(case.combine.row), case.hidden, brought.tokens());
        let columns = if case.layout == Layout::Flat { case.topk } else { 1 };
        let weights = self.weights.as_deref();
        let out_weights = self.got.weights.as_mut();
        let mut host = Combine {
            x: TensorRef::from_bytes(self.rows.bytes(), elem, handle.rows(), hidden)?,
            weights: weights
                .map(|w| TensorRef::from_slice(w, w.len() / columns, columns))
                .transpose()?,
            bias: brought.biases()?,
            weighted: case.combine.weighted,
            out: TensorMut::from_bytes(self.got.x.bytes_mut(), elem, tokens, hidden)?,
            out_weights: out_weights
                .map(|w| TensorMut::from_slice(w.as_mut_slice(), tokens, case.topk))
                .transpose()?,
            missing: Some(TensorMut::from_slice(&mut self.got.missing, tokens, 1)?),
        };
        change(&mut host)?;
        if handle.is_on_device() { on_device(host, handle, &mut self.copies) } else { Ok(host) }
    }

    /// What came back.
    ///
    /// # Errors
    /// What the yard's device refuses.
    pub fn into_got(mut self) -> Result<Got> {
        let [.., out, out_weights, missing] = &self.copies;
        if let Some(out) = out {
            self.got.x.bytes_mut().copy_from_slice(&out.tensor()?.to_vec()?);
        }
        if let Some(missing) = missing {
            self.got.missing.copy_from_slice(&missing.tensor()?.to_vec()?);
        }
        if let (Some(out), Some(weights)) = (out_weights, &mut self.got.weights) {
            weights.copy_from_slice(&oracle::number::f32s(&out.tensor()?.to_vec()?));
        }
        Ok(self.got)
    }
}

/// The same arguments over copies on the device.
fn on_device<'a>(
    host: Combine<'a>,
    handle: &Handle,
    copies: &'a mut [Option<Copied>; 7],
) -> Result<Combine<'a>> {
    let tensors = [
        Some(host.x),
        host.weights,
        host.bias[0],
        host.bias[1],
        Some(host.out.as_ref()),
        host.out_weights.as_ref().map(TensorMut::as_ref),
        host.missing.as_ref().map(TensorMut::as_ref),
    ];
    for (copy, tensor) in copies.iter_mut().zip(tensors) {
        *copy = tensor.map(|tensor| Copied::beside(handle, &tensor)).transpose()?;
    }
    let [x, weights, bias0, bias1, out, out_weights, missing] = copies;
    let there = |copy: &'a Option<Copied>| copy.as_ref().map(Copied::tensor).transpose();
    let out = out.as_mut().context("the output has a copy")?.tensor_mut()?;
    Ok(Combine {
        x: there(x)?.context("the rows have a copy")?,
        weights: there(weights)?,
        bias: [there(bias0)?, there(bias1)?],
        weighted: host.weighted,
        out,
        out_weights: out_weights.as_mut().map(Copied::tensor_mut).transpose()?,
        missing: missing.as_mut().map(Copied::tensor_mut).transpose()?,
    })
}

/// Expert outputs in their place, and room for what comes back: all that a combine needs.
#[derive(Debug)]
pub struct Staged {
    room: Option<CombineInput>,
    buffers: Buffers,
}

impl Staged {
    /// Puts the expert outputs into their place for the combine of `handle`.
    ///
    /// # Errors
    /// What the yard says.
    pub fn new(
        yard: &mut Yard,
        (brought, output): (&Brought, &ExpertOutput),
        handle: &Handle,
        placed: Placed,
    ) -> Result<Self> {
        let mut room = None;
        if placed == Placed::CombineInput {
            let dtype = row_dtype(brought.case.combine.row);
            let taken = room.insert(yard.combine_input(handle, dtype)?);
            taken.tensor_mut().write(&output.rows)?;
        }
        Ok(Self { room, buffers: Buffers::new(brought, output) })
    }

    /// Combines, and returns what came back.
    ///
    /// # Errors
    /// What the yard says.
    pub fn combine(mut self, yard: &mut Yard, brought: &Brought, handle: &Handle) -> Result<Got> {
        let mut arguments = self.buffers.arguments(brought, handle)?;
        if let Some(room) = &self.room {
            arguments.x = room.tensor();
        }
        yard.combine(handle, arguments)?;
        self.buffers.into_got()
    }
}

/// Combines `output` and returns what came back.
///
/// # Errors
/// What the yard says.
pub fn combine(
    yard: &mut Yard,
    brought: &Brought,
    handle: &Handle,
    output: &ExpertOutput,
    placed: Placed,
) -> Result<Got> {
    Staged::new(yard, (brought, output), handle, placed)?.combine(yard, brought, handle)
}

/// As [`combine`], with the expert outputs written over the received rows. The rows of the case
/// arrive in the type that combine sums.
///
/// # Errors
/// What the yard says.
pub fn combine_in_place(
    yard: &mut Yard,
    brought: &Brought,
    handle: &Handle,
    output: &ExpertOutput,
    received: &mut Received,
) -> Result<Got> {
    received.x_mut().write(&output.rows)?;
    let mut buffers = Buffers::new(brought, output);
    let mut arguments = buffers.arguments(brought, handle)?;
    arguments.x = received.x();
    yard.combine(handle, arguments)?;
    buffers.into_got()
}

/// Compares what came back with what the oracle says for the whole round trip.
///
/// # Errors
/// The first difference.
pub fn check_combined(case: &Case, inputs: &Inputs, rank: usize, got: &Got) -> Result<()> {
    check_combined_without(case, inputs, &[], (rank, got))
}

/// As [`check_combined`], where what `lost` ranks owe is left out.
///
/// # Errors
/// The first difference.
pub fn check_combined_without(
    case: &Case,
    inputs: &Inputs,
    lost: &[usize],
    (rank, got): (usize, &Got),
) -> Result<()> {
    check_missing(case, &inputs.ranks[rank], lost, got)?;
    let inputs = inputs.without(case, lost);
    let expected = oracle::expected_round_trip(case, &inputs.ranks[rank], rank);
    expected.x.compare(got.x.bytes()).map_err(|e| anyhow!("combined {e}"))?;
    if let (Some(expected), Some(found)) = (&expected.weights, &got.weights) {
        let found: Vec<u8> = found.iter().flat_map(|w| w.to_le_bytes()).collect();
        expected.compare(&found).map_err(|e| anyhow!("combined {e}"))?;
    }
    Ok(())
}

/// Checks that exactly the experts of `lost` ranks are left out of the sums of this rank's tokens.
fn check_missing(case: &Case, inputs: &RankInputs, lost: &[usize], got: &Got) -> Result<()> {
    let is_lost = |e: &&i64| usize::try_from(**e).is_ok_and(|e| lost.contains(&case.rank_of(e)));
    for (token, row) in inputs.topk_idx.chunks(case.topk).enumerate() {
        let (found, expected) = (got.missing[token], row.iter().filter(is_lost).count() as u8);
        ensure!(
            found == expected,
            "token {token} lacks {found} experts; expected {expected} with {lost:?} lost"
        );
    }
    Ok(())
}

/// One whole exchange of a case on this rank, every element checked.
///
/// # Errors
/// What the yard says, or the first difference from the oracle.
pub fn check(yard: &mut Yard, case: &Case, inputs: &Inputs, placed: Placed) -> Result<()> {
    let rank = yard.rank() as usize;
    let brought = Brought::new(case, rank, inputs.ranks[rank].clone());
    let (received, handle) = yard.dispatch(&brought.dispatch_on(yard)?).context("dispatch")?;
    check_received(case, inputs, rank, &received).context("after dispatch")?;
    let output = run_experts(case, rank, &received).context("experts")?;
    drop(received);
    let got = combine(yard, &brought, &handle, &output, placed).context("combine")?;
    check_combined(case, inputs, rank, &got).context("after combine")
}
