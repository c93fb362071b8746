//! Warnings of a rank, for the people before `tokenyard run`: the launcher shows each once, whichever rank it is of.

use std::fmt::{Debug, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::message::Message;
use crate::output::{LOG_VARIABLE, print_json};

/// Whether this process is a rank whose launcher keeps its log to itself.
static IS_HEARD: AtomicBool = AtomicBool::new(false);

/// From now on warnings go to the launcher, unless a log was asked for: then they are in it.
pub(crate) fn tell_launcher() {
    IS_HEARD.store(std::env::var_os(LOG_VARIABLE).is_none(), Ordering::Relaxed);
}

/// Makes messages of the warnings in the log. Errors there end the rank, whose last message is the error.
pub(crate) struct ToLauncher;

impl<S: Subscriber> Layer<S> for ToLauncher {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if !IS_HEARD.load(Ordering::Relaxed) || *event.metadata().level() != Level::WARN {
            return;
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        // A launcher that is gone reads no warning.
        let _ = print_json(&Message::Warned { text: text.0 });
    }
}

/// The message of an event, and its other fields behind it.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // A write to memory does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
