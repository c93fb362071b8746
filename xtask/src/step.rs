//! A step of `cargo xtask test`, and which steps a run has. Their table is `steps.rs`.

use std::fmt::Write;

use anyhow::{Result, bail};

use crate::needs::Need;

/// A named part of the tests.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Earlier steps whose results this one uses. It fails if one of them failed.
    pub(crate) after: &'static [&'static str],
    pub(crate) needs: &'static [Need],
    pub(crate) lane: Lane,
    pub(crate) quick: Quick,
    /// They run in order in the repository root, up to the first that fails.
    pub(crate) commands: &'static [Cmd],
}

/// The lane of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Tests, which depend on deadlines: one step at a time.
    Tests,
    /// Steps that only compute: at the same time as the tests, with the processor time that those leave.
    Beside,
}

/// Whether `cargo xtask test --quick` has a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quick {
    No,
    Too,
    /// Only a quick run has it: a whole run covers all of it in other steps.
    Only,
}

/// A command line without a shell: words between spaces. `{target}` stands for cargo's target
/// folder, `{xtask}` for this program, `{workspace}` for the packages that are built for tests.
pub(crate) struct Cmd {
    pub(crate) env: &'static [(&'static str, &'static str)],
    pub(crate) line: &'static str,
}

pub(crate) const fn cmd(line: &'static str) -> Cmd {
    Cmd { env: &[], line }
}

/// The named steps, and those that they build on, in the order of the table; all if none is named.
pub(crate) fn select(steps: &'static [Step], only: &[&str]) -> Result<Vec<&'static Step>> {
    if only.is_empty() {
        return Ok(steps.iter().filter(|step| step.quick != Quick::Only).collect());
    }
    for name in only {
        if !steps.iter().any(|step| step.name == *name) {
            let names: Vec<_> = steps.iter().map(|step| step.name).collect();
            bail!("found step `{name}`, expected one of {}", names.join(", "));
        }
    }
    let mut wanted = only.to_vec();
    let mut selected = Vec::new();
    // It goes backwards, because a step builds on earlier ones only.
    for step in steps.iter().rev() {
        if wanted.contains(&step.name) {
            wanted.extend(step.after);
            selected.push(step);
        }
    }
    selected.reverse();
    Ok(selected)
}

/// The steps of a quick run.
pub(crate) fn quick(steps: &'static [Step]) -> Vec<&'static Step> {
    steps.iter().filter(|step| step.quick != Quick::No).collect()
}

/// One line per step.
pub(crate) fn list(steps: &[Step]) -> String {
    let width = steps.iter().map(|step| step.name.len()).max().unwrap_or_default();
    let mut text = String::new();
    for step in steps {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{:width$}  {}", step.name, step.about);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::STEPS;

    const CHAIN: &[Step] = &[bare("a", &[]), bare("b", &[]), bare("c", &["a"]), bare("d", &["c"])];

    const fn bare(name: &'static str, after: &'static [&'static str]) -> Step {
        let (lane, quick) = (Lane::Tests, Quick::No);
        Step { name, about: "about", after, needs: &[], lane, quick, commands: &[] }
    }

    fn names(selected: &[&Step]) -> Vec<&'static str> {
        selected.iter().map(|step| step.name).collect()
    }

    #[test]
    fn a_selected_step_brings_what_it_builds_on_in_order() {
        assert_eq!(names(&select(CHAIN, &[]).unwrap()), ["a", "b", "c", "d"]);
        assert_eq!(names(&select(CHAIN, &["b"]).unwrap()), ["b"]);
        assert_eq!(names(&select(CHAIN, &["d"]).unwrap()), ["a", "c", "d"]);
        assert_eq!(names(&select(CHAIN, &["c", "b", "c"]).unwrap()), ["a", "b", "c"]);
    }

    #[test]
    fn a_quick_run_has_what_it_builds_on_and_a_whole_one_has_no_shortcut() {
        let quick = quick(STEPS);
        for step in &quick {
            let there = |name: &&str| quick.iter().any(|step| step.name == *name);
            assert!(step.after.iter().all(there), "{}", step.name);
        }
        assert!(names(&quick).contains(&"quick"));
        assert!(!names(&select(STEPS, &[]).unwrap()).contains(&"quick"));
    }

    #[test]
    fn an_unknown_step_is_refused_with_the_names_there_are() {
        let error = select(CHAIN, &["z"]).err().unwrap().to_string();
        assert_eq!(error, "found step `z`, expected one of a, b, c, d");
    }

    #[test]
    fn the_table_has_unique_names_and_builds_on_earlier_steps_only() {
        for (i, step) in STEPS.iter().enumerate() {
            let earlier: Vec<_> = STEPS[..i].iter().map(|step| step.name).collect();
            assert!(!earlier.contains(&step.name), "{} is there twice", step.name);
            assert!(step.after.iter().all(|name| earlier.contains(name)), "{}", step.name);
            assert!(!step.commands.is_empty(), "{}", step.name);
            assert!(step.commands.iter().all(|cmd| !cmd.line.is_empty()), "{}", step.name);
        }
        assert_eq!(list(STEPS).lines().count(), STEPS.len());
    }
}
