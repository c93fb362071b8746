//! Configs with domains and twins that `tokenyard bench` refuses before it looks for GPUs.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

mod common;

use common::{Config, expect_code, stderr, tokenyard};

const DOMAINS: &str = "[kernels]\nuse = \"cuda\"\n[transport.scale_up]\nuse = \"nvlink\"\n\
                       [transport.scale_out]\nuse = \"gin\"\n[topology]\nuse = \"auto\"\ndomains = 2\n";
const TWIN: &str = "[kernels]\nuse = \"cuda\"\n[transport.scale_up]\nuse = \"twin\"\n\
                    [transport.scale_out]\nuse = \"paced\"\n[transport.scale_out.paced]\ntwin = 2\n\
                    [topology]\nuse = \"auto\"\ndomains = 2\n";

/// The error of a command of `bench` with a config of this text.
fn refused(text: &str, command: &str, more: &[&str]) -> String {
    let config = Config::with("");
    let gpus = config.file("gpus.toml");
    std::fs::write(&gpus, text).unwrap();
    let output = tokenyard().args(["bench", command]).arg(&gpus).args(more).output().unwrap();
    expect_code(&output, 2);
    stderr(&output)
}

#[test]
fn bench_asks_for_the_rates_of_two_levels_before_it_looks_for_gpus() {
    for (text, option) in [(DOMAINS, "--out-rate"), (TWIN, "--inside-rate")] {
        for command in ["dispatch", "combine", "pair"] {
            let text = refused(text, command, &[]);
            assert!(text.contains("expected one") && text.contains(option), "{text}");
        }
    }
}

#[test]
fn a_twin_of_one_domain_and_the_link_of_a_twin_are_refused() {
    let one = TWIN.replace("domains = 2", "domains = 1");
    for command in ["dispatch", "combine", "pair"] {
        let text = refused(&one, command, &["--inside-rate", "365"]);
        assert!(text.contains("found `twin` with one domain"), "{text}");
    }
    let text = refused(TWIN, "link", &[]);
    assert!(text.contains("found `twin`; expected GPUs for all ranks"), "{text}");
}

#[test]
fn numbers_of_ranks_that_a_twin_or_its_gpus_have_not_are_refused() {
    let inside = ["--inside-rate", "365"];
    let four = TWIN.replace("\"twin\"\n", "\"twin\"\n[transport.scale_up.twin]\ngpus = 4\n");
    let text = refused(&four, "dispatch", &inside);
    assert!(text.contains("found 4 GPUs of twin, and 2 of paced"), "{text}");
    let four = four.replace("twin = 2", "twin = 4");
    let text = refused(&four, "dispatch", &[&inside[..], &["--ranks", "4"]].concat());
    assert!(text.contains("found 4 ranks in 2 domains; expected 4 to 72 ranks of each"), "{text}");
    let shared = DOMAINS.replace("\"cuda\"\n", "\"cuda\"\n[kernels.cuda]\ndevice = 0\n");
    let text = refused(&shared, "dispatch", &["--out-rate", "46", "--ranks", "4"]);
    assert!(text.contains("found fewer GPUs (1) than ranks (4)"), "{text}");
    let one = shared.replace("domains = 2", "domains = 1");
    let text = refused(&one, "link", &["--ranks", "4"]);
    assert!(text.contains("found fewer GPUs (1) than ranks (4)"), "{text}");
}
