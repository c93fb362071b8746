//! The rank's side.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_core::host::Lookout;
use tokenyard_core::host::tensors::open_kernels;

use super::Settings;
use super::order::{Answer, JobSpec, TestEnd, Work};
use crate::faults::{Fault, Word};
use crate::names::lasting_names;
use crate::pace::Pace;
use crate::suite::{self, Outcome, Test};

/// The work of a rank's process: it runs the order in `order`, then exits. A failed test is an answer, not
/// an error.
///
/// # Errors
/// An order that cannot be read or run at all; the launcher reads the error on standard error.
pub fn rank_main(order: &Path) -> Result<()> {
    tokenyard_launch::adopt()?;
    let order = JobSpec::read(order)?;
    look_out();
    match order.work {
        Work::Tests(names) => run_tests(&order.config, order.pace, &names),
        Work::Fault { name, ranks } => run_fault(&order.config, order.pace, &name, ranks),
    }
}

fn run_tests(config: &Path, pace: Pace, names: &[String]) -> Result<()> {
    let settings = Settings::at(pace, Config::load(config)?)?;
    let world = Arc::new(World::from_config(&settings.config().world)?);
    // A framework holds the device with tensors of its own. Without that, a GPU's driver makes its context anew
    // for each test, which takes longer than most tests.
    let _device = open_kernels(settings.config(), &world)?;
    let tests = suite::tests(settings.capabilities(), settings.domains());
    for name in names {
        let test = find(&tests, name)?;
        let outcome = settings.run_on(&world, test);
        let loss = match outcome {
            Ok(Outcome::IsLost(loss)) => Some(loss),
            _ => None,
        };
        let outcome = TestEnd::from(outcome);
        let over = matches!(outcome, TestEnd::Fail(_) | TestEnd::PassAndOver);
        Answer::Test { name: name.clone(), outcome }.say()?;
        if let Some(loss) = loss {
            loss.befall()?;
        }
        if over {
            return Ok(());
        }
        // A rank whose test failed is gone; the launcher knows from its answer.
        if world.barrier("next test").is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// The time between two checks of the slots of the transport under test.
const LOOK: Duration = Duration::from_secs(2);

/// Starts a thread that reports which slot does not return, and when none is left.
fn look_out() {
    let mut lookout = Lookout::new();
    std::thread::spawn(move || {
        let mut reported = false;
        loop {
            std::thread::sleep(LOOK);
            let slot = lookout.stuck().map(str::to_owned);
            if slot.is_some() || reported {
                reported = slot.is_some();
                // If the launcher is gone, the report has no reader.
                let _ = Answer::Stuck { slot }.say();
            }
        }
    });
}

fn find<'a>(tests: &'a [Test], name: &str) -> Result<&'a Test> {
    tests
        .iter()
        .find(|test| test.name == name)
        .with_context(|| format!("run tests: no test is called {name}"))
}

fn run_fault(config: &Path, pace: Pace, name: &str, ranks: u32) -> Result<()> {
    let fault =
        Fault::find(name).with_context(|| format!("run fault: no fault is called {name}"))?;
    let fault = fault.at(pace).within(ranks);
    if let Some(meeting) = meeting_place() {
        Answer::Meeting { path: meeting }.say()?;
    }
    fault.play(config, &|word| match word {
        Word::Faulty => {
            Answer::Uses { names: lasting_names(std::process::id()) }.say()?;
            Answer::Faulty.say()
        }
        Word::Ended(error) => {
            let rank = error
                .chain()
                .find_map(|e| e.downcast_ref::<tokenyard_core::Error>())
                .and_then(tokenyard_core::Error::rank);
            Answer::Ended { error: format!("{error:#}"), rank }.say()
        }
        Word::Lacks(why) => Answer::Lacks { why: why.to_owned() }.say(),
    })
}

/// The folder in which the ranks of the launcher meet.
fn meeting_place() -> Option<std::path::PathBuf> {
    let spec = std::env::var(tokenyard_core::bootstrap::BOOTSTRAP_VARIABLE).ok()?;
    Some(Path::new(spec.strip_prefix("file://")?).parent()?.to_path_buf())
}
