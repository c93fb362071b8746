//! L0 to L2 with ranks as threads, over shared memory: by loads and stores, by puts, and through the
//! `faulty` transport, which must not change a bit; in one domain and in several.
//!
//! A default run meets each case with each way to move rows, and with one of the bad days. With
//! the variable `TOKENYARD_TEST_ALL`, each case meets each bad day.

#![allow(clippy::expect_used, reason = "a test may end where its own setup is wrong")]

use std::collections::HashMap;

use libtest_mimic::{Arguments, Failed, Trial};
use tokenyard_conformance::runner::Settings;
use tokenyard_conformance::suite::{self, Level, Outcome, Test};
use tokenyard_core::config::{Config, OnFailure};

const HEAD: &str = "[world]\ndeadline_ms = 8000\nlate_ms = 16000\n[kernels]\nuse = \"cpu\"\n";

/// Name, transport and its table.
const WAYS: [(&str, &str, &str); 2] =
    [("load_store", "shm", "load_store = true"), ("put", "shm", "load_store = false")];

/// A seed is another order of all commands; the bad days differ in their faults.
const BAD_DAYS: [(&str, &str, &str); 4] = [
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
        "{HEAD}[transport.scale_up]\nuse = \"{transport}\"\n\
         [transport.scale_up.{transport}]\n{table}\n"
    );
    Config::parse(&text, "in_threads").expect("a valid config")
}

/// By loads and stores, by puts, and by puts on a bad day, inside a domain.
const INSIDE: [&str; 3] = [
    "use = \"shm\"\nshm.load_store = true",
    "use = \"shm\"\nshm.load_store = false",
    "use = \"faulty\"\nfaulty = { inner = \"shm\", seed = 5 }",
];

/// Between domains.
const PUTS: &str = "use = \"shm\"\nshm.load_store = false";
const BAD_DAY: &str = "use = \"faulty\"\nfaulty = { inner = \"shm\", seed = 6 }";

/// One machine split into domains.
fn split(domains: u32, scale_up: &str, scale_out: &str) -> Config {
    let text = format!(
        "{HEAD}[transport.scale_up]\n{scale_up}\n[transport.scale_out]\n{scale_out}\n\
         [topology]\ndomains = {domains}\n"
    );
    Config::parse(&text, "in_threads").expect("a valid config")
}

fn trial(prefix: &str, settings: &Settings, test: Test) -> Trial {
    let settings = settings.clone();
    Trial::test(format!("{prefix}::{}", test.name), move || match settings.run_in_threads(&test) {
        Ok(Outcome::Pass | Outcome::PassAndOver) => Ok(()),
        // A transport may declare less than the backend has; exchanges work on every one.
        Ok(Outcome::NotSupported(_)) if test.level == Level::L0 => Ok(()),
        // Operations beside MoE do not go on without a rank, and the kernel set works on the host.
        Ok(Outcome::NotSupported(why))
            if is_beside_moe(&test.name) && why.contains("on_failure = \"mask\"") =>
        {
            Ok(())
        }
        Ok(Outcome::NotSupported(why))
            if test.name.starts_with("l2/streams/") && why.ends_with("has no streams")
                || test.name.starts_with("l2/graphs/")
                    && why.ends_with("has no calls without sync") =>
        {
            Ok(())
        }
        Ok(Outcome::IsLost(loss)) => Err(Failed::from(format!("{loss:?} among threads"))),
        Ok(Outcome::NotSupported(why)) => Err(Failed::from(format!("not supported: {why}"))),
        Err(error) => Err(Failed::from(format!("{error:#}"))),
    })
}

fn is_beside_moe(name: &str) -> bool {
    ["/pipe/", "/gather/", "/reduce/", "/table/"].iter().any(|word| name.contains(word))
}

/// The cases that meet the bad day `number` of `count`: each one in a default run of one day, and each operation every
/// day, if it has as many cases. The days shift against the cases, whose layouts come in turn as well.
fn on_day(tests: Vec<Test>, number: usize, count: usize) -> impl Iterator<Item = Test> {
    let all = std::env::var_os("TOKENYARD_TEST_ALL").is_some();
    let mut met: HashMap<String, usize> = HashMap::new();
    tests.into_iter().filter(move |test| {
        // As in `l1/types/...`.
        let operation: Vec<&str> = test.name.splitn(3, '/').take(2).collect();
        let index = met.entry(operation.join("/")).or_default();
        let day = (*index + *index / count) % count;
        *index += 1;
        all || test.level == Level::L0 || day == number
    })
}

/// Whether a test depends on the number of domains beyond two, by its name.
fn worlds(name: &str) -> bool {
    [
        "l1/types/",
        "l1/worlds/",
        "l1/routing/",
        "l1/pipe/",
        "l1/gather/",
        "l1/reduce/",
        "l2/replay/",
        "l2/combine_beside_dispatch/",
        "l2/pipe/",
        "l2/gather/",
        "l2/reduce/",
    ]
    .iter()
    .any(|group| name.starts_with(group))
}

/// Whether a test goes over two levels: a table needs one link that reaches every rank.
fn crosses_levels(test: &Test) -> bool {
    !test.name.contains("/table/")
}

fn main() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_faulty::link();
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for (prefix, transport, table) in WAYS {
        let settings = Settings::new(config(transport, table)).expect("the transport probes");
        let tests = suite::tests(settings.capabilities(), 1).into_iter();
        trials.extend(tests.map(|test| trial(prefix, &settings, test)));
    }
    for (number, (prefix, transport, table)) in BAD_DAYS.into_iter().enumerate() {
        let settings = Settings::new(config(transport, table)).expect("the transport probes");
        let tests = on_day(suite::tests(settings.capabilities(), 1), number, BAD_DAYS.len());
        trials.extend(tests.map(|test| trial(prefix, &settings, test)));
    }
    for (prefix, domains, inside, between) in [
        ("domains_2_load_store", 2, INSIDE[0], PUTS),
        ("domains_2_put", 2, INSIDE[1], PUTS),
        ("domains_2_faulty", 2, INSIDE[2], BAD_DAY),
        ("domains_3_load_store", 3, INSIDE[0], PUTS),
        ("domains_4_put", 4, INSIDE[1], BAD_DAY),
    ] {
        let config = split(domains, inside, between);
        let settings = Settings::new(config).expect("the transport probes");
        let tests = suite::tests(settings.capabilities(), domains).into_iter();
        let tests = tests.filter(crosses_levels);
        // The levels of a communicator do not matter to L0; and many ranks need few cases.
        let tests = tests.filter(|test| test.level != Level::L0 && test.ranks <= 8);
        let tests = tests.filter(|test| domains == 2 || worlds(&test.name));
        // A third of the cases has a bad day at both levels.
        let days = if inside == INSIDE[2] { 3 } else { 1 };
        let tests = on_day(tests.collect(), 0, days);
        trials.extend(tests.map(|test| trial(prefix, &settings, test)));
    }
    // No rank is lost, and the ranks exchange more entries.
    let masked = [
        ("domains_2_masked_load_store", INSIDE[0], PUTS),
        ("domains_2_masked_faulty", INSIDE[2], BAD_DAY),
    ];
    for (number, (prefix, inside, between)) in masked.into_iter().enumerate() {
        let mut config = split(2, inside, between);
        config.world.on_failure = OnFailure::Mask;
        let settings = Settings::new(config).expect("the transport probes");
        let tests = suite::tests(settings.capabilities(), 2).into_iter().filter(crosses_levels);
        let tests = tests.filter(|test| test.level == Level::L2 || worlds(&test.name));
        let tests = on_day(tests.collect(), number, masked.len());
        trials.extend(tests.map(|test| trial(prefix, &settings, test)));
    }
    libtest_mimic::run(&arguments, trials).exit();
}
