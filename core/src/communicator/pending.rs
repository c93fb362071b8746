//! Operations that were sent and not yet received.

use std::marker::PhantomData;

use super::abandoned::Sent;
use super::arguments::Combine;
use super::tensor::TensorRef;
use crate::moe::{Layout, ScaleLayout};

/// A dispatch that was sent. Finish it with [`Communicator::dispatch_recv`](super::Communicator::dispatch_recv);
/// until then its inputs stay borrowed, and the operation counts as open.
///
/// Inputs that are [named by their addresses](TensorRef::from_memory) are borrowed for any time that the
/// caller names, `'static` too; pass the owner of their memory to [`keeping`](Self::keeping). So a framework
/// can store a pending operation in an object of its own.
#[derive(Debug)]
#[must_use = "a dispatch that is never received leaves the other ranks waiting"]
pub struct PendingDispatch<'a> {
    pub(super) sent: Sent,
    pub(super) arrival: Arrival,
    pub(super) tokens: usize,
    pub(super) worst_case: bool,
    pub(super) has_weights: bool,
    /// The handle slot that it fills.
    pub(super) slot: u32,
    pub(super) inputs: PhantomData<TensorRef<'a>>,
}

/// A replay that was sent. Finish it with [`Communicator::replay_recv`](super::Communicator::replay_recv); until then
/// its inputs stay borrowed, and the operation counts as open. It holds the needed state of its handle, which may be
/// dropped.
#[derive(Debug)]
#[must_use = "a replay that is never received leaves the other ranks waiting"]
pub struct PendingReplay<'a> {
    pub(super) sent: Sent,
    pub(super) arrival: Arrival,
    pub(super) inputs: PhantomData<TensorRef<'a>>,
}

/// How the rows of a dispatch arrive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) layout: Layout,
    pub(super) scale_layout: ScaleLayout,
    /// M of the dispatch.
    pub(super) max_tokens: u32,
}

/// A combine that was sent. Finish it with [`Communicator::combine_recv`](super::Communicator::combine_recv); until
/// then its tensors stay borrowed, as for [`PendingDispatch`]. It holds the needed state of its handle, which may be
/// dropped.
#[derive(Debug)]
#[must_use = "a combine that is never received leaves the other ranks waiting"]
pub struct PendingCombine<'a> {
    pub(super) sent: Sent,
    pub(super) arguments: PhantomData<Combine<'a>>,
}

macro_rules! keeping {
    ($($pending:ident),+) => {$(
        impl $pending<'_> {
            /// Holds a value, such as the tensors of another language, until the operation was received. If
            /// it never is, other ranks may still use its tensors: the value lives on until the communicator
            /// and every pending operation of it are dropped.
            pub fn keeping(mut self, owner: impl Send + 'static) -> Self {
                self.sent.owners.push(Box::new(owner));
                self
            }
        }
    )+};
}

keeping!(PendingDispatch, PendingReplay, PendingCombine);

macro_rules! layout {
    ($($pending:ident),+) => {$(
        impl $pending<'_> {
            /// The layout of the rows that arrive.
            pub fn layout(&self) -> Layout {
                self.arrival.layout
            }

            /// How their scales will lie in memory.
            pub fn scale_layout(&self) -> ScaleLayout {
                self.arrival.scale_layout
            }
        }
    )+};
}

layout!(PendingDispatch, PendingReplay);
