//! Every command refuses sizes for which no machine has memory, at once and by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::process::{Command, Output};

use common::{Config, expect_code, stderr};

/// The command with at most 8 GiB of addresses, so that a size which is not refused ends the process
/// and not the machine.
fn bounded(arguments: &[&str]) -> Output {
    let shell = "ulimit -v 8388608; exec \"$0\" \"$@\"";
    let program = env!("CARGO_BIN_EXE_tokenyard");
    Command::new("sh").args(["-c", shell, program]).args(arguments).output().unwrap()
}

fn refused(arguments: &[&str]) -> String {
    let output = bounded(arguments);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
    let says_what = ["found ", "of memory;", "invalid value"].iter().any(|w| text.contains(w));
    assert!(says_what && !text.contains("panicked"), "{arguments:?}: {text}");
    text
}

#[test]
fn a_run_of_sizes_that_no_machine_has_is_refused_whichever_option_asks_for_them() {
    let config = Config::new();
    let config = config.path();
    let config = config.to_str().unwrap();
    for options in [
        "--experts 4294966272 --ranks 1024",
        "--experts 4294967295",
        "--ranks 4294967295",
        "--ranks 1048576 --experts 1048576",
        "--tokens 4294967295",
        "--tokens 536870911 --ranks 4 --hidden 4096",
        "--hidden 4294967295",
        "--hidden 268435456 --tokens 536870911 --ranks 4",
        "--topk 4294967295",
        "--tokens 536870911 --topk 32 --experts 4294967292 --layout packed",
        "--alignment 4294967295 --layout expert-major",
        "--alignment 4096 --layout expert-major --experts 4294967292",
        "--steps 0",
    ] {
        let options: Vec<&str> = ["run", config].into_iter().chain(options.split(' ')).collect();
        refused(&options);
    }
}

#[test]
fn a_measurement_of_sizes_that_no_machine_has_is_refused() {
    let config = Config::new();
    let config = config.path();
    let config = config.to_str().unwrap();
    let link = ["bench", "link", config];
    for (command, options) in [
        (
            &["bench", config][..],
            "--experts 4294967232 --ranks 64 --tokens 33554431 --hidden 65536",
        ),
        (&["bench", config][..], "--experts 4294967295"),
        (&["bench", config][..], "--tokens 4294967295"),
        (&["bench", config][..], "--hidden 4294967292"),
        (&["bench", config][..], "--topk 4294967295"),
        (&["bench", config][..], "--samples 4294967295"),
        (&["bench", config][..], "--samples 0"),
        (&["bench", config][..], "--ranks 4294967295"),
        (&link[..], "--tokens 1073741823 --hidden 268435456"),
        (&link[..], "--samples 4294967295"),
        (&["bench", "gather", config][..], "--bytes 1099511627776"),
        (&["bench", "gather", config][..], "--bytes 17179869184 --ranks 64"),
        (&["bench", "table", config][..], "--entries 8589934592 --entry-bytes 1"),
        (&["bench", "gather", config][..], "--ranks 1"),
        (&["bench", "pipe", config][..], "--bytes 0"),
        (&["bench", "table", config][..], "--entries 18446744073709551615"),
        (&["bench", "table", config][..], "--indices 4294967295 --entry-bytes 4294967295"),
        (&["bench", "dispatch", config][..], "--samples 4294967295"),
        (&["bench", "combine", config][..], "--sms 4294967295"),
        (&["bench", "dispatch", config][..], "--ranks 4294967295"),
    ] {
        let arguments: Vec<&str> = command.iter().copied().chain(options.split(' ')).collect();
        refused(&arguments);
    }
}

#[test]
fn shape_doctor_warm_and_conformance_bear_extreme_sizes() {
    let base = "shape --ranks 2 --experts 8 --topk 2 --hidden 64 --max-tokens 8";
    for (option, value) in [
        ("--ranks", "4294967295"),
        ("--experts", "4294967295"),
        ("--topk", "4294967295"),
        ("--hidden", "4294967295"),
        ("--max-tokens", "4294967295"),
    ] {
        let mut words: Vec<&str> = base.split(' ').collect();
        let at = words.iter().position(|word| *word == option).unwrap();
        words[at + 1] = value;
        refused(&words);
    }
    for option in ["--alignment", "--in-flight", "--handles", "--domains"] {
        let words: Vec<&str> = base.split(' ').chain([option, "4294967295"]).collect();
        refused(&words);
    }
    // Counted to the byte, not allocated.
    let words = "shape --ranks 1 --experts 4294967295 --topk 32 --hidden 268435456 \
                 --max-tokens 2147483647 --layout flat --in-flight 2";
    let output = bounded(&words.split_whitespace().collect::<Vec<_>>());
    assert!([Some(0), Some(2)].contains(&output.status.code()), "{}", stderr(&output));
    refused(&["doctor", "--experts", "4294967295", "--ranks", "4294967295"]);
    let config = Config::new();
    let config = config.path();
    refused(&["warm", config.to_str().unwrap(), "--capability", "4294967295"]);
    // It is only the largest world that tests may have, so the list of tests is the same.
    let list = ["conformance", config.to_str().unwrap(), "--ranks", "4294967295", "--list"];
    expect_code(&bounded(&list), 0);
}
