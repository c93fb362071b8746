//! Warnings of ranks, for people: each text is shown once for a job, whichever ranks it is of.
//!
//! The launcher of this program shows those of its ranks. Ranks of another launcher pass them to rank 0 once they have
//! joined; before, only rank 0 warns. Where a log was asked for, warnings are in it, and nowhere else.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use tokenyard_core::bootstrap::{EventText, ToRankZero, World};
#[cfg(feature = "full")]
use tokenyard_core::config::WorldConfig;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use crate::output::{LOG_VARIABLE, People, Style};

/// The readers of the warnings of this process.
enum Audience {
    /// Into the log alone.
    Log,
    /// To the launcher, which keeps the log to itself.
    Launcher(fn(String)),
    /// To rank 0.
    Passed(ToRankZero),
    /// This is rank 0, which has shown these.
    RankZero(BTreeSet<String>),
}

static AUDIENCE: Mutex<Audience> = Mutex::new(Audience::Log);

/// Uses the readers. Nothing in `action` may warn.
fn with_audience<T>(action: impl FnOnce(&mut Audience) -> T) -> T {
    action(&mut AUDIENCE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Chooses the readers, unless a log was asked for.
fn choose(chosen: Audience) {
    if std::env::var_os(LOG_VARIABLE).is_none() {
        with_audience(|audience| *audience = chosen);
    }
}

/// From now on warnings go to the launcher.
pub(crate) fn tell_launcher(tell: fn(String)) {
    choose(Audience::Launcher(tell));
}

/// From now on warnings of this rank of another launcher go to rank 0.
pub(crate) fn tell_rank_zero(world: &World) {
    choose(match world.rank() {
        0 => Audience::RankZero(BTreeSet::new()),
        _ => Audience::Passed(world.warnings()),
    });
}

/// Joins the world of a config, as a rank of another launcher.
#[cfg(feature = "full")]
pub(crate) fn join(config: &WorldConfig) -> tokenyard_core::Result<World> {
    let world = World::from_config(config)?;
    tell_rank_zero(&world);
    Ok(world)
}

fn pass(to_zero: &ToRankZero, rank: u32, text: &str) {
    if !to_zero.pass(text) {
        show(&EventText::of_rank(rank, text));
    }
}

fn show_once(rank: u32, text: &str) {
    let is_new = with_audience(|audience| match audience {
        Audience::RankZero(shown) => shown.insert(text.to_owned()),
        _ => true,
    });
    if is_new {
        show(&EventText::of_rank(rank, text));
    }
}

fn show(text: &str) {
    let people = People::errors();
    people.prose(format_args!("{} {text}", people.paint(Style::Warn, "warning:")));
}

/// Whether the log's lines have this event. They have no warning that people get in another way.
pub(crate) fn is_in_log(metadata: &Metadata<'_>) -> bool {
    *metadata.level() != Level::WARN
        || with_audience(|audience| matches!(audience, Audience::Log | Audience::Launcher(_)))
}

/// Brings the warnings of the log on their way. Errors there end the rank, whose last message is the error.
pub(crate) struct ToPeople;

impl<S: Subscriber> Layer<S> for ToPeople {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() != Level::WARN {
            return;
        }
        enum Next {
            Nothing,
            Tell(fn(String)),
            Pass(ToRankZero),
            Show,
        }
        let EventText { text, passed_by, .. } = EventText::of(event);
        let next = with_audience(|audience| match audience {
            Audience::Log => Next::Nothing,
            Audience::Launcher(tell) => Next::Tell(*tell),
            // Of this rank, where rank 0 has ended: it was passed before.
            Audience::Passed(_) if passed_by.is_some() => Next::Show,
            Audience::Passed(to_zero) => Next::Pass(to_zero.clone()),
            Audience::RankZero(_) => Next::Show,
        });
        match next {
            Next::Nothing => {}
            Next::Tell(tell) => tell(text),
            Next::Pass(to_zero) => pass(&to_zero, to_zero.rank(), &text),
            Next::Show => show_once(passed_by.unwrap_or_default(), &text),
        }
    }
}
