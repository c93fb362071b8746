//! The first failure of a share, for all threads of a proxy.

use std::sync::OnceLock;

use crate::export::kind_of;
use crate::{Error, ErrorKind, Result};

/// The first failure; it stays (INV-7).
#[derive(Debug, Default)]
pub(super) struct Health(OnceLock<ProxyFailure>);

/// Stored as data: every call makes a new error of it.
#[derive(Debug)]
pub(super) enum ProxyFailure {
    /// A call of a share failed as a whole.
    Call { thread: u32, call: &'static str, status: i32 },
    /// A share panicked.
    Panic { thread: u32, text: String },
    /// A share broke the rules of [`FabricShare`](super::FabricShare).
    Rules { thread: u32, text: String },
}

impl Health {
    /// Stores the failure if it is the first.
    #[cold]
    pub(super) fn fail(&self, failure: ProxyFailure) {
        // The second failure is most often a consequence of the first.
        let _ = self.0.set(failure);
    }

    pub(super) fn get(&self) -> Result<()> {
        self.0.get().map_or(Ok(()), |failure| Err(failure.to_error()))
    }
}

impl ProxyFailure {
    /// The status of the commands that end with it.
    pub(super) fn status(&self) -> i32 {
        match self {
            Self::Call { status, .. } => *status,
            Self::Panic { .. } => crate::abi::TY_PANIC,
            Self::Rules { .. } => crate::abi::TY_INTERNAL,
        }
    }

    fn to_error(&self) -> Error {
        let internal = |text: String, thread: &u32| {
            Error::new(ErrorKind::Internal, "drive share", text)
                .with_context("thread", thread)
                .with_fix("report this: it is a bug of the transport")
        };
        match self {
            Self::Call { thread, call, status } => {
                let text = format!("{call} failed: {} (status {status})", kind_of(*status).name());
                Error::new(ErrorKind::Transport, "drive share", text).with_context("thread", thread)
            }
            Self::Panic { thread, text } => internal(format!("the share panicked: {text}"), thread),
            Self::Rules { thread, text } => internal(text.clone(), thread),
        }
    }
}
