//! L0 to L2 with ranks as threads, over shared memory: by loads and stores, by puts, and through the
//! `faulty` transport, which must not change a bit.

#![allow(clippy::expect_used, reason = "a test may end where its own setup is wrong")]

use libtest_mimic::{Arguments, Failed, Trial};
use tokenyard_conformance::runner::Settings;
use tokenyard_conformance::suite::{self, Level, Outcome, Test};
use tokenyard_core::config::Config;

/// Name, transport and its table. A seed is another order of everything; the days differ in what is
/// bad about them.
const WAYS: [(&str, &str, &str); 6] = [
    ("load_store", "shm", "load_store = true"),
    ("put", "shm", "load_store = false"),
    ("faulty_1", "faulty", "inner = \"shm\"\nseed = 1"),
    (
        "faulty_2",
        "faulty",
        "inner = \"shm\"\nseed = 2\nreorder = 200\nback_pressure = 80\nquiet = 0",
    ),
    ("faulty_3", "faulty", "inner = \"shm\"\nseed = 3\nreorder = 5\ndelay_us = 300\nquiet = 20"),
    // Rows are stored, and the signals about them overtake each other.
    ("faulty_stores", "faulty", "inner = \"shm\"\nseed = 4\nload_store = true"),
];

fn config(transport: &str, table: &str) -> Config {
    let text = format!(
        "[world]\ndeadline_ms = 8000\nlate_ms = 16000\n\
         [kernels]\nuse = \"cpu\"\n\
         [transport.scale_up]\nuse = \"{transport}\"\n\
         [transport.scale_up.{transport}]\n{table}\n"
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
    tokenyard_faulty::link();
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for (prefix, transport, table) in WAYS {
        let settings = Settings::new(config(transport, table)).expect("the transport probes");
        let tests = suite::tests(settings.capabilities()).into_iter();
        trials.extend(tests.map(|test| trial(prefix, &settings, test)));
    }
    libtest_mimic::run(&arguments, trials).exit();
}
