//! The share of a run's processor time that each step has, and each program of tests in it.
//!
//! Machines differ in speed, so times of one say little about another; shares say the same on all. A whole run
//! compares its shares with the checked-in file and fails where one has more than doubled, so that growth has a
//! name. The run also writes its own shares, in the form of the file: `cargo xtask shares` takes them over.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;
use std::{fs, iter};

use anyhow::{Context, Result, bail};

const FILE: &str = "xtask/shares.txt";
const FOUND: &str = "shares.txt";

const HEAD: &str = "\
# Shares of the processor time of `cargo xtask test`, in thousandths of the whole: of each step, and of each program
# of tests in it. Shares below 5 are left out. `cargo xtask shares` writes this file from the last whole run.
";

/// Shares below this many thousandths are noise.
const LEAST: u64 = 5;
/// A share may grow by this factor.
const MARGIN: u64 = 2;

/// Processor time by name: of a step, or of a program, whose name begins with its step's.
pub(crate) type Used = BTreeMap<String, Duration>;

/// Compares what a whole run used with the file; returns a line for each share that has grown too much.
///
/// # Errors
/// The file cannot be read, or the run's own cannot be written.
pub(crate) fn check(
    root: &Path,
    target: &Path,
    used: &Used,
    total: Duration,
) -> Result<Vec<String>> {
    let found = shares(used, total);
    fs::write(target.join(FOUND), text(&found))
        .with_context(|| format!("write {}", target.join(FOUND).display()))?;
    let path = root.join(FILE);
    let known = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(grown(&found, &read(&known)?))
}

/// Takes over the shares of the last whole run.
///
/// # Errors
/// There was no whole run, or the file cannot be written.
pub(crate) fn take_over(root: &Path, target: &Path) -> Result<()> {
    let from = target.join(FOUND);
    fs::copy(&from, root.join(FILE))
        .with_context(|| format!("copy {}, which `cargo xtask test` writes", from.display()))?;
    println!("wrote {FILE}");
    Ok(())
}

/// Thousandths of `total`.
fn shares(used: &Used, total: Duration) -> BTreeMap<String, u64> {
    let total = total.as_millis().max(1);
    let of = |time: &Duration| u64::try_from(time.as_millis() * 1000 / total).unwrap_or(u64::MAX);
    used.iter().map(|(name, time)| (name.clone(), of(time))).collect()
}

fn grown(found: &BTreeMap<String, u64>, known: &BTreeMap<String, u64>) -> Vec<String> {
    let grown = found.iter().filter_map(|(name, share)| {
        let had = known.get(name).copied().unwrap_or(0);
        (*share > MARGIN * had.max(LEAST)).then(|| {
            format!(
                "{name}: found {share} thousandths of the run's processor time, expected at most {} \
                 ({FILE} has {had}); find what grew, or take the new shares over: cargo xtask shares",
                MARGIN * had.max(LEAST)
            )
        })
    });
    grown.collect()
}

fn text(shares: &BTreeMap<String, u64>) -> String {
    let mut text = HEAD.to_owned();
    for (name, share) in shares.iter().filter(|(_, share)| **share >= LEAST) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{share:4} {name}");
    }
    text
}

fn read(text: &str) -> Result<BTreeMap<String, u64>> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    iter::zip(1.., lines)
        .map(|(number, line)| {
            let entry = line
                .trim()
                .split_once(' ')
                .and_then(|(share, name)| Some((name, share.parse().ok()?)));
            match entry {
                Some((name, share)) => Ok((name.to_owned(), share)),
                None => bail!(
                    "read {FILE}: found `{line}` as share {number}, expected a number and a name"
                ),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(times: &[(&str, u64)]) -> Used {
        times
            .iter()
            .map(|(name, seconds)| ((*name).to_owned(), Duration::from_secs(*seconds)))
            .collect()
    }

    #[test]
    fn a_share_that_more_than_doubled_is_named_and_a_slower_machine_is_none() {
        let known = read("  500 build\n 20 unit a/b\n").unwrap();
        let check = |times: &[(&str, u64)], total| {
            grown(&shares(&used(times), Duration::from_secs(total)), &known)
        };
        assert!(check(&[("build", 500), ("unit a/b", 39)], 1000).is_empty());
        assert!(check(&[("build", 50_000), ("unit a/b", 3_900)], 100_000).is_empty());
        let found = check(&[("build", 400), ("unit a/b", 41)], 1000);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("unit a/b: found 41 thousandths"), "{found:?}");
        // A share that the file lacks may be small.
        assert!(check(&[("new", 10)], 1000).is_empty());
        assert_eq!(check(&[("new", 11)], 1000).len(), 1);
    }

    #[test]
    fn what_a_run_writes_is_what_the_next_one_reads() {
        let found = shares(
            &used(&[("build", 7), ("unit conformance/masking", 3)]),
            Duration::from_secs(1000),
        );
        assert_eq!(read(&text(&found)).unwrap(), BTreeMap::from([("build".to_owned(), 7)]));
        assert!(read("x build\n").is_err());
    }
}
