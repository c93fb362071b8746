//! Errors: a code for NCCL, and a message for people.

use std::ffi::{CString, c_int};
use std::sync::OnceLock;

use crate::abi::{self, Logger};

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// The error of a call of the plugin.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Failure {
    pub(crate) code: c_int,
    text: String,
}

impl Failure {
    pub(crate) fn new(code: c_int, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// A system call has failed.
    pub(crate) fn system(what: &str, error: impl std::fmt::Display) -> Self {
        Self::new(abi::SYSTEM_ERROR, format!("{what}: {error}"))
    }
}

static LOGGER: OnceLock<Logger> = OnceLock::new();

/// Stores NCCL's logger, if NCCL passes one.
pub(crate) fn log_to(logger: Option<Logger>) {
    if let Some(logger) = logger {
        LOGGER.get_or_init(|| logger);
    }
}

/// Writes a message to NCCL's log, or to standard error.
pub(crate) fn say(text: &str) {
    match (LOGGER.get(), CString::new(text)) {
        (Some(logger), Ok(text)) => {
            // SAFETY: NCCL's function, with a format and the text that it asks for.
            unsafe {
                logger(
                    abi::LOG_WARN,
                    abi::LOG_ALL,
                    c"softgin".as_ptr(),
                    0,
                    c"%s".as_ptr(),
                    text.as_ptr(),
                );
            }
        }
        _ => eprintln!("softgin: {text}"),
    }
}
