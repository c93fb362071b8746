//! L0 to L2 with ranks as threads, over shared memory, by loads and stores and by puts.

#![allow(clippy::expect_used, reason = "a test may end where its own setup is wrong")]

use libtest_mimic::{Arguments, Failed, Trial};
use tokenyard_conformance::runner::Settings;
use tokenyard_conformance::suite::{self, Level, Outcome, Test};
use tokenyard_core::config::Config;

const HEAD: &str = "[world]\ndeadline_ms = 8000\nlate_ms = 16000\n[kernels]\nuse = \"cpu\"\n";

fn config(load_store: bool) -> Config {
    let text = format!(
        "{HEAD}[transport.scale_up]\nuse = \"shm\"\n\
         [transport.scale_up.shm]\nload_store = {load_store}\n"
    );
    Config::parse(&text, "in_threads").expect("a valid config")
}

/// One machine split into domains, with puts between them.
fn split(domains: u32, load_store: bool) -> Config {
    let text = format!(
        "{HEAD}[transport.scale_up]\nuse = \"shm\"\n\
         [transport.scale_up.shm]\nload_store = {load_store}\n\
         [transport.scale_out]\nuse = \"shm\"\n\
         [transport.scale_out.shm]\nload_store = false\n\
         [topology]\ndomains = {domains}\n"
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

/// What tells worlds of many domains apart.
fn worlds(name: &str) -> bool {
    ["l1/worlds/", "l1/routing/", "l2/replay/", "l2/combine_beside_dispatch/"]
        .iter()
        .any(|group| name.starts_with(group))
}

fn main() {
    tokenyard_cpu::link();
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for (prefix, load_store) in [("load_store", true), ("put", false)] {
        let settings = Settings::new(config(load_store)).expect("the transport probes");
        let tests = suite::tests(settings.capabilities(), 1).into_iter();
        trials.extend(tests.map(|test| trial(prefix, &settings, test)));
    }
    for (prefix, domains, load_store) in [
        ("domains_2_load_store", 2, true),
        ("domains_2_put", 2, false),
        ("domains_3_load_store", 3, true),
        ("domains_4_put", 4, false),
    ] {
        let settings = Settings::new(split(domains, load_store)).expect("the transport probes");
        let tests = suite::tests(settings.capabilities(), domains).into_iter();
        // The levels of a yard do not matter to L0; and many ranks need few cases.
        let tests = tests.filter(|test| test.level != Level::L0 && test.ranks <= 8);
        let tests = tests.filter(|test| domains == 2 || worlds(&test.name));
        trials.extend(tests.map(|test| trial(prefix, &settings, test)));
    }
    libtest_mimic::run(&arguments, trials).exit();
}
