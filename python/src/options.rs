//! Options that are words.

use tokenyard_core::Result;
use tokenyard_core::communicator::{Cast, RefusedCall};
use tokenyard_core::moe::{Compression, Layout, Overflow, ScaleLayout, SourceIndex};
use tokenyard_core::ops::gather::reduce::Precision;

use crate::argument::{Argument, Word};
use crate::errors::invalid;

/// The word of a layout.
pub(crate) fn layout_name(layout: Layout) -> &'static str {
    match layout {
        Layout::Flat => "flat",
        Layout::ExpertMajor { .. } => "expert_major",
        Layout::Packed => "packed",
        Layout::RankMajor { .. } => "rank_major",
    }
}

/// Reads `layout`, `alignment` and `zero_padding`.
///
/// # Errors
/// Another word, and options that the layout does not have.
pub(crate) fn layout(
    word: &Word<'_>,
    alignment: &Argument<u32>,
    zero_padding: &Argument<bool>,
) -> Result<Layout> {
    let word = word.get("layout")?;
    let (alignment, zero_padding) =
        (alignment.get("alignment")?, zero_padding.get("zero_padding")?);
    let plain = alignment == 1 && !zero_padding;
    match &*word {
        "expert_major" => Ok(Layout::ExpertMajor { alignment, zero_padding }),
        "rank_major" if alignment == 1 => Ok(Layout::RankMajor { zero_padding }),
        "flat" if plain => Ok(Layout::Flat),
        "packed" if plain => Ok(Layout::Packed),
        "flat" | "packed" | "rank_major" => Err(invalid(format!(
            "layout: found alignment = {alignment} and zero_padding = {zero_padding} with {word:?}; expected \
             them with \"expert_major\" alone, and zero_padding with \"rank_major\", too"
        ))),
        _ => Err(invalid(format!(
            "layout: found {word:?}; expected \"flat\", \"expert_major\", \"packed\" or \"rank_major\""
        ))),
    }
}

/// Reads `cast`.
///
/// # Errors
/// Another word.
pub(crate) fn cast(word: Option<&Word<'_>>) -> Result<Cast> {
    match word.map(|word| word.get("cast")).transpose()?.as_deref() {
        None => Ok(Cast::None),
        Some("fp8") => Ok(Cast::Fp8),
        Some("fp8_round") => Ok(Cast::Fp8Round),
        Some("fp8_ue8m0") => Ok(Cast::Fp8Ue8m0),
        Some(word) => Err(invalid(format!(
            "cast: found {word:?}; expected None, \"fp8\", \"fp8_round\" or \"fp8_ue8m0\""
        ))),
    }
}

/// Reads `scale_layout`.
///
/// # Errors
/// Another word.
pub(crate) fn scale_layout(word: &Word<'_>) -> Result<ScaleLayout> {
    let word = word.get("scale_layout")?;
    match &*word {
        "row_major" => Ok(ScaleLayout::RowMajor),
        "column_major" => Ok(ScaleLayout::ColumnMajor),
        _ => Err(invalid(format!(
            "scale_layout: found {word:?}; expected \"row_major\" or \"column_major\""
        ))),
    }
}

/// Reads `source_index`.
///
/// # Errors
/// Another word.
pub(crate) fn source_index(word: &Word<'_>) -> Result<SourceIndex> {
    let word = word.get("source_index")?;
    match &*word {
        "rank_and_token" => Ok(SourceIndex::RankAndToken),
        "token" => Ok(SourceIndex::Token),
        _ => Err(invalid(format!(
            "source_index: found {word:?}; expected \"rank_and_token\" or \"token\""
        ))),
    }
}

/// Reads `overflow`.
///
/// # Errors
/// Another word.
pub(crate) fn overflow(word: &Word<'_>) -> Result<Overflow> {
    let word = word.get("overflow")?;
    match &*word {
        "error" => Ok(Overflow::Error),
        "drop" => Ok(Overflow::Drop),
        _ => Err(invalid(format!("overflow: found {word:?}; expected \"error\" or \"drop\""))),
    }
}

/// Reads `compress` of a combine.
///
/// # Errors
/// Another word.
pub(crate) fn compression(word: Option<&Word<'_>>) -> Result<Compression> {
    match word.map(|word| word.get("compress")).transpose()?.as_deref() {
        None => Ok(Compression::None),
        Some("logfmt10") => Ok(Compression::LogFmt10),
        Some(word) => {
            Err(invalid(format!("compress: found {word:?}; expected None or \"logfmt10\"")))
        }
    }
}

/// Reads `precision` of a sum.
///
/// # Errors
/// Another word.
pub(crate) fn precision(word: &Word<'_>) -> Result<Precision> {
    let word = word.get("precision")?;
    match &*word {
        "fp32" => Ok(Precision::Fp32),
        "bf16" => Ok(Precision::Bf16),
        _ => Err(invalid(format!("precision: found {word:?}; expected \"fp32\" or \"bf16\""))),
    }
}

/// Reads `operation`: what a rank refuses.
///
/// # Errors
/// Another word.
pub(crate) fn refused_call(word: &str, layout: Layout) -> Result<RefusedCall> {
    match word {
        "dispatch" => Ok(RefusedCall::Dispatch(layout)),
        "replay" => Ok(RefusedCall::Replay(layout)),
        "combine" => Ok(RefusedCall::Combine),
        _ => Err(invalid(format!(
            "operation: found {word:?}; expected \"dispatch\", \"replay\" or \"combine\""
        ))),
    }
}
