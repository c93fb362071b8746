//! Several transports of which the first that works is taken: each is judged on its own.

use std::collections::BTreeSet;

use tokenyard_errors::words::first_names;
use tokenyard_machine::Machine;

use crate::components::Component;
use crate::{Components, DoctorReport, Facility, Finding, Job, Tried, Verdict, judge, rules};

rules! {
    ALTERNATIVE = "alternative",
}

/// A transport of the list, judged as if it were the only one.
struct Rung {
    name: String,
    findings: Vec<Finding>,
    /// Why it would not be taken.
    why_not: Option<String>,
}

/// Judges a node for a job with alternatives.
pub(crate) fn examine(
    machine: &Machine,
    job: &Job,
    components: Option<&Components>,
    tried: Option<&Tried>,
) -> Vec<Finding> {
    let alternatives: BTreeSet<&str> = job.alternatives.iter().map(|a| a.name.as_str()).collect();
    let of =
        |name: Option<&str>| components.map(|components| taking(components, &alternatives, name));
    let common = judge(machine, &job.with(None), of(None).as_ref(), tried);
    let rungs: Vec<Rung> = job
        .alternatives
        .iter()
        .map(|alternative| {
            let (name, of) = (alternative.name.clone(), of(Some(&alternative.name)));
            let findings = judge(machine, &job.with(Some(alternative)), of.as_ref(), tried);
            let why_not = match components {
                Some(components) => probed(components, &name),
                None => broken(&findings, &common),
            };
            Rung { name, findings, why_not }
        })
        .collect();
    let taken = rungs.iter().position(|rung| rung.why_not.is_none());
    let mut findings = match taken {
        Some(taken) => rungs[taken].findings.clone(),
        None => all_of(&rungs),
    };
    findings.splice(0..0, tell(machine, job, &rungs, taken));
    findings
}

/// The reason of its probe against it.
fn probed(components: &Components, name: &str) -> Option<String> {
    let is_it = |component: &&Component| component.kind == "transport" && component.name == name;
    match components.components.iter().find(is_it) {
        Some(component) => component.why_not.clone(),
        None => Some("no part of this name".to_owned()),
    }
}

/// The components, with only this one of the `alternatives` chosen. A name that no component has stays in the
/// result: the communicator does not open with it, whatever else the list has.
fn taking(
    components: &Components,
    alternatives: &BTreeSet<&str>,
    name: Option<&str>,
) -> Components {
    let mut components = components.clone();
    for component in &mut components.components {
        let is_other =
            alternatives.contains(component.name.as_str()) && Some(&*component.name) != name;
        if component.kind == "transport" && is_other {
            component.chosen = false;
        }
    }
    components
}

/// Findings that are broken with this transport and not without it.
fn broken(findings: &[Finding], common: &[Finding]) -> Option<String> {
    let is_common = |finding: &Finding| {
        common.iter().any(|other| {
            (other.id, &other.subject, other.verdict)
                == (finding.id, &finding.subject, finding.verdict)
        })
    };
    let own: Vec<String> = findings
        .iter()
        .filter(|finding| finding.verdict == Verdict::Broken && !is_common(finding))
        .map(|finding| format!("{}: {}", finding.subject, finding.found))
        .collect();
    (!own.is_empty()).then(|| first_names(own))
}

/// The findings of all transports; for each thing, the worst one.
fn all_of(rungs: &[Rung]) -> Vec<Finding> {
    let mut all: Vec<Finding> = Vec::new();
    for finding in rungs.iter().flat_map(|rung| &rung.findings) {
        let is_same =
            |other: &&mut Finding| (other.id, &other.subject) == (finding.id, &finding.subject);
        match all.iter_mut().find(is_same) {
            Some(known) if (known.needed, known.verdict) < (finding.needed, finding.verdict) => {
                *known = finding.clone();
            }
            Some(_) => {}
            None => all.push(finding.clone()),
        }
    }
    all
}

fn tell(machine: &Machine, job: &Job, rungs: &[Rung], taken: Option<usize>) -> Vec<Finding> {
    let mut report = DoctorReport::new(machine, job);
    for (place, rung) in rungs.iter().enumerate() {
        let expected = match taken.map(|taken| (taken, &rungs[taken].name)) {
            Some((taken, _)) if place < taken => {
                "nothing, as another transport is taken".to_owned()
            }
            Some((taken, name)) if place > taken => {
                format!("nothing, while {name} works everywhere")
            }
            _ => ALTERNATIVE.words().expected.clone(),
        };
        let (verdict, found) = match &rung.why_not {
            Some(why) if taken.is_none() => {
                (Verdict::Broken, format!("cannot be used here: {why}"))
            }
            Some(why) => {
                let falls = match taken.map(|taken| (taken, &rungs[taken].name)) {
                    Some((taken, name)) if place < taken => format!("; the config falls to {name}"),
                    _ => String::new(),
                };
                (Verdict::Ok, format!("cannot be used here: {why}{falls}"))
            }
            None if taken == Some(place) => (Verdict::Ok, "would be taken".to_owned()),
            None => (Verdict::Ok, "works here too".to_owned()),
        };
        let subject = format!("transport {}", rung.name);
        let finding = report.note(&ALTERNATIVE, Facility::Node, subject, verdict.on(found));
        finding.expected(expected);
        finding.needed = taken.is_none_or(|taken| taken == place);
    }
    report.finish()
}
