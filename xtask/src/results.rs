//! `docs/conformance.md`: the results of the suite on each transport, from the reports that the steps of
//! the test command save. The page states results, so it is generated and not written by hand.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// One saved report and how the page shows it.
struct Shown {
    /// File name without `.json`, below `target/conformance/results`.
    file: &'static str,
    title: &'static str,
    /// The hardware that it ran on, or the stand-in for it.
    on: &'static str,
}

const SHOWN: &[Shown] = &[
    Shown { file: "cpu", title: "`shm`, built in", on: "shared memory" },
    Shown {
        file: "cpu-plugin",
        title: "`shm`, loaded plugin",
        on: "shared memory; part of the suite: the code is that of the line above",
    },
    Shown { file: "example-c", title: "`example_c`, plugin in C", on: "POSIX shared memory" },
    Shown {
        file: "example-cpp",
        title: "the same, built as C++",
        on: "POSIX shared memory; L0: the source is the same",
    },
    Shown { file: "faulty-1", title: "`faulty` over `shm`: reordered", on: BAD_DAY },
    Shown { file: "faulty-2", title: "the same, many held, refusing often", on: BAD_DAY },
    Shown { file: "faulty-3", title: "the same, delayed, reporting late", on: BAD_DAY },
    Shown { file: "faulty-domains", title: "the same at both levels of two domains", on: BAD_DAY },
    Shown {
        file: "libfabric-tcp",
        title: "`libfabric`, provider `tcp`",
        on: "sockets of one machine, which stand in for a network",
    },
    Shown { file: "libfabric-shm", title: "`libfabric`, provider `shm`", on: "shared memory" },
    Shown {
        file: "libfabric-udp",
        title: "`libfabric`, provider `udp`",
        on: "sockets of one machine; for conformance only",
    },
    Shown {
        file: "libfabric-verbs",
        title: "`libfabric`, provider `verbs`",
        on: "soft-RoCE in an emulated machine, which stands in for an RDMA NIC; one device, part of the suite",
    },
    Shown {
        file: "verbs",
        title: "`verbs`",
        on: "soft-RoCE in an emulated machine, which stands in for an RDMA NIC; part of the suite",
    },
    Shown { file: "verbs-hca", title: "`verbs` on a software HCA", on: SOFTWARE_HCA },
    Shown {
        file: "ibgda-hca",
        title: "`ibgda` on a software HCA, the host posts",
        on: SOFTWARE_HCA,
    },
];

const SOFTWARE_HCA: &str = "unmodified libibverbs and libmlx5, over a device in software that stands in for a \
     ConnectX; part of the suite";

const BAD_DAY: &str = "shared memory by puts, for a fabric that keeps no order";

const LEVELS: [&str; 4] = ["L0", "L1", "L2", "L3"];

const PAGE: &str = "docs/conformance.md";

const HEAD: &str = "\
# Conformance results

For operators and vendors: the results of the suite on each transport. `cargo xtask results` makes this page from the
reports of `cargo xtask test`, which fails if the page differs from them. `tokenyard conformance CONFIG` makes the same
report for any config, plugins of others included.

Levels: **L0** the transport alone, **L1** exchanges against the oracle, and messages, shards and entries byte by
byte, **L2** concurrency and chaining, **L3** killed, stopped and misled ranks. A cell says how many tests passed; `not
supported` tests are those whose capability the transport does not declare, or that need more ranks than the run had.
An empty cell: that level was not run there.

";

/// Writes the page.
pub(crate) fn write(root: &Path, target: &Path) -> Result<()> {
    let page = root.join(PAGE);
    std::fs::write(&page, text(target)?).with_context(|| format!("write {}", page.display()))?;
    println!("wrote {PAGE}");
    Ok(())
}

/// Fails if the page differs from the saved reports.
pub(crate) fn check(root: &Path, target: &Path) -> Result<()> {
    let page = root.join(PAGE);
    let found =
        std::fs::read_to_string(&page).with_context(|| format!("read {}", page.display()))?;
    let expected = text(target)?;
    if found == expected {
        println!("{PAGE} agrees with the reports");
        return Ok(());
    }
    let differs = found.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    let (found, expected) = differs.unwrap_or(("another number of lines", ""));
    bail!(
        "{PAGE} differs from the reports of this run: found `{found}`, expected `{expected}`; \
         run cargo xtask results and commit the page"
    )
}

fn text(target: &Path) -> Result<String> {
    let folder = target.join("conformance/results");
    refuse_unknown(&folder)?;
    let mut out = HEAD.to_owned();
    out.push_str("| transport | on | L0 | L1 | L2 | L3 | not supported | declares |\n");
    out.push_str("|---|---|---|---|---|---|---|---|\n");
    let mut notes = String::new();
    for shown in SHOWN {
        let report = read(&folder.join(shown.file).with_extension("json"))?;
        out.push_str(&row(shown, &report)?);
        notes.push_str(&reasons(shown, &report)?);
    }
    if !notes.is_empty() {
        out.push_str("\n## Cases that did not apply, failed as expected, or may fail\n\n");
        out.push_str(&notes);
    }
    Ok(out)
}

/// Refuses a report that the page would leave out: no reader would see its result.
fn refuse_unknown(folder: &Path) -> Result<()> {
    let entries = std::fs::read_dir(folder)
        .with_context(|| format!("read {}; run cargo xtask test first", folder.display()))?;
    for entry in entries {
        let path: PathBuf = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        ensure!(
            SHOWN.iter().any(|shown| shown.file == stem),
            "found report {}, which the page does not show; add it to SHOWN",
            path.display()
        );
    }
    Ok(())
}

fn read(file: &Path) -> Result<Value> {
    let bytes = std::fs::read(file)
        .with_context(|| format!("read {}; run cargo xtask test first", file.display()))?;
    serde_json::from_slice(&bytes).with_context(|| format!("read {}", file.display()))
}

fn row(shown: &Shown, report: &Value) -> Result<String> {
    let mut text = format!("| {} | {}", shown.title, shown.on);
    // A run with more time gives results of another kind.
    let slow = report["environment"]["slow"].as_u64().unwrap_or(1);
    if slow > 1 {
        let _ = write!(text, "; deadlines times {slow}");
    }
    text.push_str(" |");
    let mut unsupported = 0;
    for level in LEVELS {
        let counts = &report["levels"][level];
        let count = |word: &str| counts[word].as_u64().unwrap_or(0);
        unsupported += count("not supported");
        let (passed, expected, chance) = (count("pass"), count("expected fail"), count("may fail"));
        let failed = count("FAIL") + count("UNEXPECTED PASS");
        // Writing to a String cannot fail.
        let _ = match (counts.is_object(), failed, expected, chance) {
            (false, ..) => write!(text, " |"),
            (true, 0, 0, 0) => write!(text, " {passed} |"),
            (true, 0, 0, _) => write!(text, " {passed}, {chance} that may fail |"),
            (true, 0, ..) => write!(text, " {passed}, {expected} failed as expected |"),
            (true, ..) => write!(text, " {passed}, **{failed} FAILED** |"),
        };
    }
    let flags = report["environment"]["capabilities"]["flags"].as_array();
    let flags = flags.context("a report has no capabilities")?;
    let flags: Vec<_> = flags.iter().filter_map(Value::as_str).collect();
    let _ = writeln!(text, " {unsupported} | {} |", flags.join(", "));
    Ok(text)
}

/// The reasons why tests did not pass plainly, each once.
fn reasons(shown: &Shown, report: &Value) -> Result<String> {
    let tests = report["tests"].as_array().context("a report has no tests")?;
    let mut reasons: Vec<(String, usize)> = Vec::new();
    for test in tests {
        let outcome = test["outcome"].as_str().unwrap_or_default();
        let key = match outcome {
            "pass" => continue,
            "not_supported" => format!("not supported: {}", test["why"].as_str().unwrap_or("?")),
            // Of these a run may pass any part: the page says the same of each run.
            "may_fail" => format!("may fail: {}", test["reason"].as_str().unwrap_or("?")),
            _ => format!(
                "{} {}: {}",
                outcome.replace('_', " "),
                test["name"].as_str().unwrap_or("?"),
                test["reason"].as_str().or(test["message"].as_str()).unwrap_or("?")
            ),
        };
        match reasons.iter_mut().find(|(reason, _)| *reason == key) {
            Some((_, count)) => *count += 1,
            None => reasons.push((key, 1)),
        }
    }
    let mut text = String::new();
    if !reasons.is_empty() {
        let _ = writeln!(text, "- {}", shown.title);
    }
    for (reason, count) in reasons {
        let _ = writeln!(text, "  - {count} × {}", reason.lines().next().unwrap_or_default());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(folder: &Path, file: &str, failed: u64) {
        let report = serde_json::json!({
            "environment": { "capabilities": { "flags": ["get"] }, "slow": slow(file) },
            "levels": { "L0": { "pass": 20, "not supported": 1 }, "L1": { "pass": 3, "FAIL": failed } },
            "tests": [
                { "name": "l0/a", "outcome": "not_supported", "why": "no load_store" },
                { "name": "l1/b", "outcome": "pass" },
            ],
        });
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(file), report.to_string()).unwrap();
    }

    fn slow(file: &str) -> u64 {
        if file == "verbs.json" { 5 } else { 1 }
    }

    fn target() -> tempfile::TempDir {
        let target = tempfile::tempdir().unwrap();
        for shown in SHOWN {
            let folder = target.path().join("conformance/results");
            save(&folder, &format!("{}.json", shown.file), 0);
        }
        target
    }

    #[test]
    fn the_page_shows_counts_per_level_and_reasons() {
        let text = text(target().path()).unwrap();
        assert!(text.contains("| 20 | 3 | | | 1 | get |"), "{text}");
        assert!(text.contains("1 × not supported: no load_store"), "{text}");
        assert_eq!(text.matches("; deadlines times 5 | 20 |").count(), 1, "{text}");
        assert!(!text.contains("times 1"), "{text}");
    }

    #[test]
    fn a_failure_is_shown_as_one() {
        let target = target();
        save(&target.path().join("conformance/results"), "cpu.json", 2);
        assert!(text(target.path()).unwrap().contains("3, **2 FAILED**"));
    }

    #[test]
    fn the_page_is_the_same_whether_what_may_fail_passed_or_not() {
        let page = |message: Option<&str>| {
            let target = target();
            let test = |name| serde_json::json!({ "name": name, "outcome": "may_fail", "reason": "by chance" });
            let mut tests = [test("l3/a"), test("l3/b")];
            if let Some(message) = message {
                tests[0]["message"] = message.into();
            }
            let report = serde_json::json!({
                "environment": { "capabilities": { "flags": [] } },
                "levels": { "L3": { "pass": 5, "may fail": 2 } },
                "tests": tests,
            });
            let file = target.path().join("conformance/results/cpu.json");
            std::fs::write(file, report.to_string()).unwrap();
            text(target.path()).unwrap()
        };
        assert_eq!(page(None), page(Some("it hangs")));
        assert!(page(None).contains("| 5, 2 that may fail |"), "{}", page(None));
        assert!(page(None).contains("2 × may fail: by chance"), "{}", page(None));
    }

    #[test]
    fn a_report_that_the_page_would_leave_out_is_refused() {
        let target = target();
        save(&target.path().join("conformance/results"), "other.json", 0);
        let error = text(target.path()).unwrap_err().to_string();
        assert!(error.contains("other.json, which the page does not show"), "{error}");
    }

    #[test]
    fn a_page_that_differs_from_the_reports_is_found() {
        let (root, target) = (tempfile::tempdir().unwrap(), target());
        std::fs::create_dir(root.path().join("docs")).unwrap();
        write(root.path(), target.path()).unwrap();
        check(root.path(), target.path()).unwrap();
        save(&target.path().join("conformance/results"), "cpu.json", 2);
        let error = check(root.path(), target.path()).unwrap_err().to_string();
        assert!(error.contains("run cargo xtask results"), "{error}");
    }
}
