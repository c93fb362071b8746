//! L0 to L2 with ranks as threads, over shared memory, by loads and stores and by puts.

#![allow(clippy::expect_used, reason = "a test may end where its own setup is wrong")]

use libtest_mimic::{Arguments, Failed, Trial};
use tokenyard_conformance::runner::Settings;
use tokenyard_conformance::suite::{self, Level, Outcome, Test};
use tokenyard_core::config::Config;

fn config(load_store: bool) -> Config {
    let text = format!(
        "[world]\ndeadline_ms = 8000\nlate_ms = 16000\n\
         [kernels]\nuse = \"cpu\"\n\
         [transport.scale_up]\nuse = \"shm\"\n\
         [transport.scale_up.shm]\nload_store = {load_store}\n"
    );
    Config::parse(&text, "in_threads").expect("a valid config")
}

fn trial(prefix: &str, settings: &Settings, test: Test) -> Trial {
    let settings = settings.clone();
    Trial::test(format!("{prefix}::{}", test.name), move || match settings.run_in_threads(&test) {
        Ok(Outcome::Pass) => Ok(()),
        // A transport may declare less than there is; exchanges work on every one.
        Ok(Outcome::NotSupported(_)) if test.level == Level::L0 => Ok(()),
        Ok(Outcome::NotSupported(why)) => Err(Failed::from(format!("not supported: {why}"))),
        Err(error) => Err(Failed::from(format!("{error:#}"))),
    })
}

fn main() {
    tokenyard_cpu::link();
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for (prefix, load_store) in [("load_store", true), ("put", false)] {
        let settings = Settings::new(config(load_store)).expect("the transport probes");
        let tests = suite::tests(settings.capabilities()).into_iter();
        trials.extend(tests.map(|test| trial(prefix, &settings, test)));
    }
    libtest_mimic::run(&arguments, trials).exit();
}
