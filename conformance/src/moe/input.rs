//! Reads the routing and the rows that a framework dumped: a safetensors file with `x`, `topk_idx` and,
//! optionally, `topk_weights`. `docs/input-files.md` describes it for users.
//!
//! The file is hostile until checked. Every size in it is compared with the bytes of the file before it is
//! used. Everything that would make an exchange fail is found here, before a rank starts.

use std::io::Read;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorView};
use tokenyard_core::{Error, ErrorKind, Result, files};

use crate::moe::oracle::number::{f32s, i32s, i64s};
use crate::moe::oracle::{
    Case, Combine, Input, Inputs, RankInputs, Routing, RowType, Sums, Tokens,
};

/// The largest file that is read, in bytes: 4 GiB.
pub const MAX_BYTES: u64 = 4 << 30;
/// The longest header, in bytes: three tensors and some metadata need less than one KiB.
pub const MAX_HEADER: usize = 1 << 20;
/// The bytes in front of the header, which hold its length.
const LENGTH_BYTES: u64 = 8;
/// The metadata entry that holds the number of experts.
pub const EXPERTS_KEY: &str = "num_experts";
/// The most ranks, experts or top-k that a file may state. Core's own limits are tighter; this limit
/// prevents overflow in products of sizes.
const MAX_COUNT: usize = 1 << 20;

const OPERATION: &str = "read input file";
const NAMES: [&str; 3] = ["x", "topk_idx", "topk_weights"];

/// A file that was read and checked. Plain data: may be read from any thread.
#[derive(Clone, Debug, PartialEq)]
pub struct InputFile {
    /// Its path; `None` for bytes without a file.
    path: Option<PathBuf>,
    /// Its size.
    bytes: u64,
    /// R, if the tensors have a rank dimension.
    ranks: Option<usize>,
    /// Tokens in all.
    tokens: usize,
    hidden: usize,
    topk: usize,
    experts: Option<usize>,
    row: RowType,
    x: Vec<u8>,
    topk_idx: Vec<i64>,
    topk_weights: Option<Vec<f32>>,
    digest: u64,
}

impl InputFile {
    /// Reads the file at `path`, which must be a regular file of at most [`MAX_BYTES`]. Its header is
    /// checked, and compared with the file's size, before the tensors are read.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`], naming the file, what was found and what was expected.
    pub fn read(path: &Path) -> Result<Self> {
        let named = |error: Error| error.with_context("file", path.display());
        let unreadable =
            |e: std::io::Error| named(refuse("the file cannot be read").with_source(e));
        let (file, about) = files::open(path)
            .map_err(|error| Error::file(ErrorKind::InvalidInput, OPERATION, &error))?;
        let length = about.len();
        if length > MAX_BYTES {
            let message = format!("found {length} bytes; expected at most {MAX_BYTES}");
            return Err(named(refuse(message).with_fix("save fewer tokens in one file")));
        }
        let mut bytes = Vec::new();
        let mut start = (&file).take(LENGTH_BYTES);
        start.read_to_end(&mut bytes).map_err(unreadable)?;
        let header = header_length(&bytes, length).map_err(named)?;
        (&file).take(header).read_to_end(&mut bytes).map_err(unreadable)?;
        check_header(&bytes, length).map_err(named)?;
        // The file may grow or shrink while it is read; the size is compared once more below.
        file.take(length - bytes.len() as u64).read_to_end(&mut bytes).map_err(unreadable)?;
        let parsed = Self::parse(&bytes).map_err(named)?;
        Ok(Self { path: Some(path.to_owned()), ..parsed })
    }

    /// The size of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// An error about this file.
    fn refuse(&self, message: impl Into<String>) -> Error {
        match &self.path {
            Some(path) => refuse(message).with_context("file", path.display()),
            None => refuse(message),
        }
    }

    /// An error about a row of one of the file's tensors.
    fn refuse_row(&self, message: impl Into<String>, tensor: &str, token: usize) -> Error {
        let row = match self.ranks {
            Some(ranks) => {
                format!("[{}, {}]", token * ranks / self.tokens, token % (self.tokens / ranks))
            }
            None => token.to_string(),
        };
        self.refuse(message).with_context("tensor", tensor).with_context("row", row)
    }

    /// Reads a file from its bytes.
    ///
    /// # Errors
    /// As [`InputFile::read`].
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        check_header(bytes, bytes.len() as u64)?;
        let file = SafeTensors::deserialize(bytes).map_err(not_safetensors)?;
        for name in file.names() {
            if !NAMES.contains(&name) {
                let message = format!("found tensor {name:?}; expected {}", NAMES.join(", "));
                return Err(refuse(message).with_fix("save these tensors alone"));
            }
        }
        let (x, idx) = (required(&file, "x")?, required(&file, "topk_idx")?);
        let weights = file.tensor("topk_weights").ok();
        let dims = Dims::of(&x, &idx, weights.as_ref())?;
        let row = row_type(&x)?;
        let parsed = Self {
            path: None,
            bytes: bytes.len() as u64,
            ranks: dims.ranks,
            tokens: dims.tokens,
            hidden: dims.hidden,
            topk: dims.topk,
            experts: experts(bytes)?,
            row,
            x: x.data().to_vec(),
            topk_idx: indices(&idx)?,
            topk_weights: weights.as_ref().map(floats).transpose()?,
            digest: digest(bytes),
        };
        parsed.check_values()?;
        Ok(parsed)
    }

    /// R, if the tensors have a rank dimension.
    pub fn ranks(&self) -> Option<usize> {
        self.ranks
    }

    /// E, if the metadata states it.
    pub fn experts(&self) -> Option<usize> {
        self.experts
    }

    /// The type of the rows.
    pub fn row(&self) -> RowType {
        self.row
    }

    /// The exchange that the file describes: flat, not cast, expert outputs of the rows' own type.
    ///
    /// Without a rank dimension the tokens are dealt out in order, evenly: rank r gets tokens
    /// `r*T/R` to `(r+1)*T/R`, rounded down.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the file is for another number of ranks or experts, or does
    /// not say how many experts there are and `experts` does not either.
    pub fn case(&self, ranks: usize, experts: Option<usize>) -> Result<Case> {
        if let Some(found) = self.ranks.filter(|found| *found != ranks) {
            return Err(self
                .refuse(format!("found tensors of {found} ranks; expected {ranks}"))
                .with_fix(format!("run with --ranks {found}")));
        }
        let experts = match (self.experts, experts) {
            (Some(file), Some(asked)) if file != asked => {
                return Err(self.refuse(format!(
                    "found {EXPERTS_KEY} = {file} in the file; expected {asked} as asked for"
                )));
            }
            (None, None) => {
                return Err(self
                    .refuse(format!(
                        "found no {EXPERTS_KEY} in the metadata; expected the number of experts"
                    ))
                    .with_fix("name it with --experts, or save it as metadata"));
            }
            (file, asked) => file.or(asked).unwrap_or_default(),
        };
        let counts: Vec<usize> = (0..ranks).map(|rank| self.share(rank, ranks).len()).collect();
        let case = Case {
            ranks,
            experts,
            topk: self.topk,
            hidden: self.hidden,
            max_tokens: counts.iter().copied().max().unwrap_or_default().max(1),
            tokens: Tokens::Exactly(counts),
            input: Input::Plain(self.row),
            weights: self.topk_weights.is_some(),
            combine: Combine { row: self.row, biases: 0, weighted: false, sums: Sums::ByRank },
            routing: Routing::Given(self.digest),
            ..Case::default()
        };
        case.validate().map_err(|e| self.refuse(e.0))?;
        Ok(case)
    }

    /// The inputs of each rank of `case`, which [`InputFile::case`] made.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] names the file, its row and the expert that does not exist or
    /// is selected twice.
    pub fn inputs(&self, case: &Case) -> Result<Inputs> {
        self.check_routing(case.experts)?;
        let row_bytes = self.hidden * self.row.bytes();
        let ranks = (0..case.ranks).map(|rank| {
            let tokens = self.share(rank, case.ranks);
            let entries = tokens.start * self.topk..tokens.end * self.topk;
            RankInputs {
                x: self.x[tokens.start * row_bytes..tokens.end * row_bytes].to_vec(),
                scales: None,
                topk_idx: self.topk_idx[entries.clone()].to_vec(),
                topk_weights: self.topk_weights.as_ref().map(|w| w[entries].to_vec()),
                biases: Vec::new(),
            }
        });
        Inputs::given(case, ranks.collect()).map_err(|e| self.refuse(e.0))
    }

    /// Checks that every expert exists and that no token selects one twice.
    fn check_routing(&self, experts: usize) -> Result<()> {
        for (token, row) in self.topk_idx.chunks_exact(self.topk).enumerate() {
            let at = |message| Err(self.refuse_row(message, "topk_idx", token));
            for (k, expert) in row.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
                if *expert >= experts as i64 {
                    return at(format!("k {k}: found expert {expert}; expected below {experts}"));
                }
                if row[..k].contains(expert) {
                    return at(format!("k {k}: found expert {expert} twice; expected it once"));
                }
            }
        }
        Ok(())
    }

    /// The tokens of one rank. With a rank dimension this is its own slice.
    fn share(&self, rank: usize, ranks: usize) -> std::ops::Range<usize> {
        self.tokens * rank / ranks..self.tokens * (rank + 1) / ranks
    }

    /// Rows and weights must be numbers: a sum with a NaN would prove nothing about the exchange.
    fn check_values(&self) -> Result<()> {
        let bytes = self.hidden * self.row.bytes();
        for (token, row) in self.x.chunks_exact(bytes).enumerate() {
            if let Some(at) = self.row.decode(row).iter().position(|v| !v.is_finite()) {
                let message = format!("h {at}: found NaN or infinity; expected finite numbers");
                return Err(self.refuse_row(message, "x", token));
            }
        }
        let weights = self.topk_weights.iter().flatten().zip(&self.topk_idx);
        for (i, (weight, expert)) in weights.enumerate() {
            // The weight of an entry that selects nothing is ignored.
            if *expert >= 0 && !weight.is_finite() {
                let (token, k) = (i / self.topk, i % self.topk);
                let message = format!("k {k}: found {weight}; expected finite numbers");
                return Err(self.refuse_row(message, "topk_weights", token));
            }
        }
        Ok(())
    }
}

/// Sizes in which all tensors must agree.
struct Dims {
    ranks: Option<usize>,
    tokens: usize,
    hidden: usize,
    topk: usize,
}

impl Dims {
    fn of(
        x: &TensorView<'_>,
        idx: &TensorView<'_>,
        weights: Option<&TensorView<'_>>,
    ) -> Result<Self> {
        let (lead, hidden) = split_shape("x", "H", x)?;
        let (idx_lead, topk) = split_shape("topk_idx", "K", idx)?;
        if lead != idx_lead {
            return Err(refuse(format!(
                "found x of shape {:?} and topk_idx of shape {:?}; expected equal sizes but the last",
                x.shape(),
                idx.shape()
            )));
        }
        if let Some(weights) = weights.filter(|w| w.shape() != idx.shape()) {
            return Err(refuse(format!(
                "topk_weights: found shape {:?}; expected that of topk_idx, {:?}",
                weights.shape(),
                idx.shape()
            )));
        }
        let tokens = lead.iter().product();
        if tokens == 0 || hidden == 0 || topk == 0 || topk > MAX_COUNT {
            return Err(refuse(format!(
                "found {tokens} tokens of {hidden} elements with {topk} experts each; expected at \
                 least one of each, and at most {MAX_COUNT} experts"
            )));
        }
        let ranks = if lead.len() == 2 { Some(lead[0]) } else { None };
        if ranks.is_some_and(|ranks| ranks > MAX_COUNT) {
            return Err(refuse(format!("found {} ranks; expected at most {MAX_COUNT}", lead[0])));
        }
        Ok(Self { ranks, tokens, hidden, topk })
    }
}

/// Splits a shape into its last size and the product of the others. The file holds the bytes of the tensor,
/// so the product of the sizes cannot overflow unless one of them is 0; then it is 0, in this order.
fn split_shape<'a>(
    name: &str,
    last: &str,
    tensor: &'a TensorView<'_>,
) -> Result<(&'a [usize], usize)> {
    match tensor.shape().split_last() {
        Some((size, lead)) if (1..=2).contains(&lead.len()) && !lead.contains(&0) => {
            Ok((lead, *size))
        }
        _ => Err(refuse(format!(
            "{name}: found shape {:?}; expected [T, {last}] or [R, T, {last}], T at least 1",
            tensor.shape()
        ))),
    }
}

/// Checks the header against the `length` of the file; `start` has at least the whole header. It also finds
/// errors that `safetensors` does not: the library's own sum of the sizes can overflow.
fn check_header(start: &[u8], length: u64) -> Result<()> {
    let header_length = header_length(start, length)?;
    let data = header(start)?.data_len() as u64;
    let expected = data.saturating_add(LENGTH_BYTES + header_length);
    if expected == length {
        return Ok(());
    }
    let message = format!("found {length} bytes; its header speaks of {expected}");
    Err(refuse(message).with_fix(if expected > length {
        "the file is cut short: copy it again"
    } else {
        "the file has more bytes than its tensors: save it again"
    }))
}

/// The bytes of the header, as the first bytes of a file of `length` bytes state them.
fn header_length(start: &[u8], length: u64) -> Result<u64> {
    let header = start.first_chunk::<{ LENGTH_BYTES as usize }>().map(|b| u64::from_le_bytes(*b));
    match header {
        Some(header) if header > MAX_HEADER as u64 => {
            Err(refuse(format!("found a header of {header} bytes; expected at most {MAX_HEADER}"))
                .with_fix("name a safetensors file"))
        }
        Some(header) if header + LENGTH_BYTES <= length => Ok(header),
        _ => Err(within_header(length)),
    }
}

fn within_header(length: u64) -> Error {
    refuse(format!("found {length} bytes, which end within the header; expected more"))
        .with_fix("the file is cut short, or it is no safetensors file")
}

fn header(bytes: &[u8]) -> Result<Metadata> {
    let length = header_length(bytes, bytes.len() as u64)? as usize;
    let header = bytes.get(LENGTH_BYTES as usize..).and_then(|rest| rest.get(..length));
    let header = header.ok_or_else(|| within_header(bytes.len() as u64))?;
    serde_json::from_slice(header)
        .map_err(|e| refuse("the header is not that of a safetensors file").with_source(e))
}

fn experts(bytes: &[u8]) -> Result<Option<usize>> {
    let metadata = header(bytes)?;
    let Some(text) = metadata.metadata().as_ref().and_then(|map| map.get(EXPERTS_KEY)) else {
        return Ok(None);
    };
    match text.parse::<usize>() {
        Ok(count) if (1..=MAX_COUNT).contains(&count) => Ok(Some(count)),
        _ => Err(refuse(format!(
            "metadata {EXPERTS_KEY}: found {:?}; expected a number from 1 to {MAX_COUNT}",
            text.chars().take(40).collect::<String>()
        ))),
    }
}

fn required<'a>(file: &SafeTensors<'a>, name: &str) -> Result<TensorView<'a>> {
    file.tensor(name).map_err(|_| {
        let found = file.names().join(", ");
        let found = if found.is_empty() { "no tensors".to_owned() } else { found };
        refuse(format!("found {found}; expected a tensor called {name}"))
    })
}

fn row_type(x: &TensorView<'_>) -> Result<RowType> {
    match x.dtype() {
        Dtype::BF16 => Ok(RowType::Bf16),
        Dtype::F16 => Ok(RowType::F16),
        Dtype::F32 => Ok(RowType::F32),
        other => Err(wrong_type("x", other, "BF16, F16 or F32")),
    }
}

fn indices(tensor: &TensorView<'_>) -> Result<Vec<i64>> {
    match tensor.dtype() {
        Dtype::I64 => Ok(i64s(tensor.data())),
        Dtype::I32 => Ok(i32s(tensor.data()).into_iter().map(i64::from).collect()),
        other => Err(wrong_type("topk_idx", other, "I64 or I32")),
    }
}

fn floats(tensor: &TensorView<'_>) -> Result<Vec<f32>> {
    match tensor.dtype() {
        Dtype::F32 => Ok(f32s(tensor.data())),
        other => Err(wrong_type("topk_weights", other, "F32")),
    }
}

/// FNV-1a: distinguishes files in messages and between ranks; it does not protect against forgery.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn wrong_type(name: &str, found: Dtype, expected: &str) -> Error {
    refuse(format!("{name}: found type {found:?}; expected {expected}"))
        .with_fix("convert it before saving, for example x.to(torch.bfloat16)")
}

fn not_safetensors(error: safetensors::SafeTensorError) -> Error {
    refuse("the file is not a whole safetensors file").with_source(error)
}

fn refuse(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, OPERATION, message)
}

#[cfg(test)]
mod tests;
