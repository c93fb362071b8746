//! A communicator that its Python object, pending operations and outputs share.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokenyard_core::bootstrap::World as CoreWorld;
use tokenyard_core::communicator::{BringUpReport, CallForm, Communicator as CoreCommunicator};
use tokenyard_core::moe::{Layout, Shape};

use crate::guarded::Guarded;
use crate::owned::Owned;

/// A communicator, and what its operations need. Pending operations keep it.
pub(crate) struct Shared {
    pub(crate) comm: Arc<Guarded<CoreCommunicator>>,
    pub(crate) shape: Shape,
    pub(crate) report: BringUpReport,
    pub(crate) works_on_device: bool,
    pub(crate) forms: Vec<&'static str>,
    /// Bytes of outputs that live.
    pub(crate) held: Arc<AtomicU64>,
}

impl Shared {
    pub(crate) fn new(comm: CoreCommunicator, world: Arc<Owned<Arc<CoreWorld>>>) -> Self {
        Self {
            shape: *comm.shape(),
            report: comm.report().clone(),
            works_on_device: comm.works_on_device(),
            forms: forms(&comm),
            held: Arc::default(),
            comm: Guarded::new(comm, world),
        }
    }

    /// Whether combines of packed rows take weights and ids themselves, without a replay.
    pub(crate) fn takes_packed_sums(&self) -> bool {
        self.forms.contains(&"packed_sums")
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    pub(crate) fn held(&self) -> &Arc<AtomicU64> {
        &self.held
    }
}

/// The words of the calls that a communicator takes.
fn forms(comm: &CoreCommunicator) -> Vec<&'static str> {
    let all = [
        ("streams", comm.has_streams()),
        ("without_sync", comm.has_graphs()),
        ("max_tokens", comm.takes(CallForm::CallTokens)),
        ("round_once", comm.takes(CallForm::RoundOnce)),
        ("sum_weights", comm.takes(CallForm::SumWeights)),
        ("statistics", comm.takes(CallForm::Statistics)),
        ("packed_forms", comm.takes(CallForm::PackedForms)),
        ("logfmt10", comm.takes(CallForm::LogFmt10)),
        ("packed_sums", comm.sends_weights(Layout::Packed)),
        ("rank_major", comm.takes(CallForm::RankMajor)),
        ("max_rows", comm.takes(CallForm::RowCap)),
    ];
    all.into_iter().filter(|(_, takes)| *takes).map(|(word, _)| word).collect()
}
