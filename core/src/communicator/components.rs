//! The components of a communicator, and the forms of calls that they take.

use std::sync::MutexGuard;

use super::claims::Claims;
use crate::host::OpenKernels;
use crate::moe::Shape;
use crate::session::stuck::Kept;
use crate::session::user::User;
use crate::{Error, ErrorKind, Result, abi};

/// A form of calls that not every kernel set takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallForm {
    /// [`Dispatch::max_tokens`](super::Dispatch::max_tokens).
    CallTokens,
    /// [`Combine::round_once`](super::Combine::round_once), [`Combine::topk`](super::Combine::topk), and a
    /// [`Replay`](super::Replay) of rows of another width.
    RoundOnce,
    /// The first two of these, of the packed layout.
    PackedSums,
    /// [`Combine::sum_weights`](super::Combine::sum_weights).
    SumWeights,
    /// [`OnStream::with_statistics`](super::OnStream::with_statistics), in the packed layout.
    Statistics,
    /// [`Dispatch::scale_layout`](super::Dispatch::scale_layout) and
    /// [`Dispatch::source_index`](super::Dispatch::source_index), also of a [`Replay`](super::Replay).
    PackedForms,
    /// [`Compression::LogFmt10`](crate::moe::Compression::LogFmt10) of a combine.
    LogFmt10,
    /// [`Layout::RankMajor`](crate::moe::Layout::RankMajor).
    RankMajor,
    /// [`Dispatch::cap`](super::Dispatch::cap).
    RowCap,
}

impl std::fmt::Display for CallForm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::CallTokens => "max_tokens of a dispatch",
            Self::RoundOnce => "round_once and topk of a combine",
            Self::PackedSums => "round_once and topk of a combine of the packed layout",
            Self::SumWeights => "sum_weights of a combine",
            Self::Statistics => "statistics of a call of the packed layout",
            Self::PackedForms => "scale_layout and source_index of a call of the packed layout",
            Self::LogFmt10 => "LogFMT-10 of a combine of the packed layout",
            Self::RankMajor => "the rank-major layout",
            Self::RowCap => "max_rows of a dispatch",
        })
    }
}

impl CallForm {
    /// Bits `TY_KERNELS_CAP_*`, each of which includes it.
    pub(super) fn bits(self) -> u32 {
        match self {
            Self::CallTokens => abi::TY_KERNELS_CAP_CALL_TOKENS,
            Self::RoundOnce => abi::TY_KERNELS_CAP_ROUND_ONCE,
            Self::PackedSums => abi::TY_KERNELS_CAP_ROUND_ONCE | abi::TY_KERNELS_CAP_PACKED_SUMS,
            Self::SumWeights => abi::TY_KERNELS_CAP_SUM_WEIGHTS,
            Self::Statistics => abi::TY_KERNELS_CAP_STATISTICS,
            Self::PackedForms => abi::TY_KERNELS_CAP_PACKED_FORMS,
            Self::LogFmt10 => abi::TY_KERNELS_CAP_LOGFMT10,
            Self::RankMajor => abi::TY_KERNELS_CAP_RANK_MAJOR,
            Self::RowCap => abi::TY_KERNELS_CAP_ROW_CAP,
        }
    }
}

/// The components of a communicator. Outputs and handles hold them alive, because they point into windows.
#[derive(Debug)]
pub(crate) struct Components {
    pub(crate) user: User,
    pub(super) claims: Claims,
    /// The shape that all ranks agreed on.
    pub(crate) shape: Shape,
}

impl Components {
    /// The kernel set.
    pub(crate) fn kernels(&self) -> MutexGuard<'_, Kept<OpenKernels>> {
        self.user.kernels()
    }

    /// A free slot for a handle.
    pub(super) fn take_handle(&self) -> Result<u32> {
        self.claims.take_handle().map_err(|all| {
            Error::new(
                ErrorKind::Full,
                "take handle",
                format!("all {all} handles of this communicator are alive"),
            )
            .with_fix("drop handles that are combined, or open the communicator with more handles")
        })
    }
}
