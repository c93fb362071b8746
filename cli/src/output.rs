//! What the commands share in talking to people and to programs: people read standard error (and
//! tables on standard output), programs read JSON on standard output.

use std::io::IsTerminal;

/// Sends the log to standard error; `TOKENYARD_LOG` chooses what (default: warnings).
pub(crate) fn init_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("TOKENYARD_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}
