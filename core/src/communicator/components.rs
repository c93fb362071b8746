//! The components of a communicator, and the order in which they end.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::claims::Claims;
use crate::abi;
use crate::host::OpenKernels;
use crate::session::progress::{Progress, Proxies};
use crate::session::reporter::Looking;
use crate::session::stuck::{Kept, Stuck};
use crate::session::transports::Transports;
use crate::session::watchdog::Watchdog;

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
        })
    }
}

impl CallForm {
    /// Bits `TY_NEEDS_*`, each of which includes it.
    pub(super) fn bits(self) -> u32 {
        match self {
            Self::CallTokens => abi::TY_NEEDS_CALL_TOKENS,
            Self::RoundOnce => abi::TY_NEEDS_ROUND_ONCE,
            Self::PackedSums => abi::TY_NEEDS_ROUND_ONCE | abi::TY_NEEDS_PACKED_SUMS,
            Self::SumWeights => abi::TY_NEEDS_SUM_WEIGHTS,
            Self::Statistics => abi::TY_NEEDS_STATISTICS,
            Self::PackedForms => abi::TY_NEEDS_PACKED_FORMS,
            Self::LogFmt10 => abi::TY_NEEDS_LOGFMT10,
        }
    }
}

/// The components of a communicator. Outputs and handles hold them alive, because they point into
/// windows.
pub(super) struct Components {
    /// Ends before everything else: reports read all components.
    pub(super) looking: Looking,
    pub(super) stuck: Stuck,
    pub(super) open: OpenComponents,
}

impl Drop for Components {
    fn drop(&mut self) {
        if !self.looking.end() {
            self.stuck.set("a transport has not answered a report");
        }
    }
}

impl Deref for Components {
    type Target = OpenComponents;

    fn deref(&self) -> &OpenComponents {
        &self.open
    }
}

/// The components while open, in the order in which they are dropped.
pub(super) struct OpenComponents {
    /// Uses the transports, so it is dropped before them.
    pub(super) _progress: Option<Progress>,
    /// Uses the transports and the rings of the kernel set.
    pub(super) _proxies: Proxies,
    /// After its drop, no transport accesses windows.
    pub(super) _transports: Kept<Transports>,
    /// Its drop frees the windows. Behind a lock so that outputs may hold the components from any
    /// thread. The communicator takes the lock, and so does a copy from device memory or its release:
    /// those wait for a running operation.
    pub(super) kernels: Mutex<Kept<OpenKernels>>,
    /// Watches this communicator's waits; the kernel set points to its board, so it is dropped last.
    pub(super) watchdog: Kept<Watchdog>,
    pub(super) claims: Claims,
    /// The device whose memory the kernel set works on; none where it works on host memory.
    pub(super) device: Option<i32>,
    /// The forms of calls that the kernel set takes: bits `TY_NEEDS_*`.
    pub(super) forms: u32,
}

impl OpenComponents {
    /// True if the kernel set takes a form of calls, one of `TY_NEEDS_*`.
    pub(super) fn takes(&self, form: u32) -> bool {
        self.forms & form != 0
    }

    pub(super) fn kernels(&self) -> MutexGuard<'_, Kept<OpenKernels>> {
        // A poisoned lock means a panic between two calls of the component; the component itself reports
        // its own panics.
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Components {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Components").field("transports", &self._transports).finish_non_exhaustive()
    }
}
