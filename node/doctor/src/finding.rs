//! Rules, findings, and the report that collects them.

use serde::Serialize;
use tokenyard_machine::{Machine, Nic};

use crate::components::Components;
use crate::job::{Facility, Job};
use crate::nics::rails;
use crate::node::Tried;
use crate::words::{self, Words};

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As expected, or not needed.
    Ok,
    /// The node does not show it, or it depends on other nodes.
    Unknown,
    /// It works, at less than the hardware could.
    Slow,
    /// It cannot work.
    Broken,
}

impl Verdict {
    /// The verdict in one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Slow => "slow",
            Self::Broken => "broken",
        }
    }

    /// This verdict on what was found.
    pub(crate) fn on(self, found: impl Into<String>) -> Judgement {
        Judgement { verdict: self, found: found.into() }
    }

    /// The exit code: 0, 1 for slow, 2 for broken. An unknown verdict is shown and is no fault.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Ok | Self::Unknown => 0,
            Self::Slow => 1,
            Self::Broken => 2,
        }
    }
}

/// How bad something is, and what was found there.
#[derive(Clone, Debug)]
pub(crate) struct Judgement {
    pub(crate) verdict: Verdict,
    pub(crate) found: String,
}

/// One check.
#[derive(Debug)]
pub struct Rule {
    /// Stable; the anchor of its entry in `docs/findings.md`.
    pub id: &'static str,
}

impl Rule {
    /// The words of its entry.
    pub fn words(&self) -> &'static Words {
        words::of(self.id)
    }
}

/// The rules of a module, in the order of the page: each is a static, and `RULES` has all.
macro_rules! rules {
    ($($name:ident = $id:literal,)*) => {
        $(pub(crate) static $name: $crate::Rule = $crate::Rule { id: $id };)*

        pub(crate) const RULES: &[&$crate::Rule] = &[$(&$name),*];
    };
}
pub(crate) use rules;

/// The result of one check on one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The rule's.
    pub id: &'static str,
    /// The device or thing, `mlx5_3 port 1`.
    pub subject: String,
    /// How bad it is.
    pub verdict: Verdict,
    /// The job uses it, or there is no config and all that is there counts.
    pub needed: bool,
    /// The state that was found.
    pub found: String,
    /// The expected state.
    pub expected: String,
    /// The impact if nothing is done, where something is wrong.
    pub impact: Option<String>,
    /// The fix, where something is wrong.
    pub fix: Option<String>,
    /// Where the rule comes from, where something is wrong.
    pub source: Option<&'static str>,
    /// Where all about it can be read.
    pub page: String,
}

impl Finding {
    /// Replaces the rule's words on what should be.
    pub(crate) fn expected(&mut self, expected: impl Into<String>) -> &mut Self {
        self.expected = expected.into();
        self
    }

    /// Replaces the rule's impact.
    pub(crate) fn impact(&mut self, impact: impl Into<String>) -> &mut Self {
        self.impact = Some(impact.into());
        self
    }

    /// Replaces the rule's fix.
    pub(crate) fn fix(&mut self, fix: impl Into<String>) -> &mut Self {
        self.fix = Some(fix.into());
        self
    }
}

/// Collects the findings of one node.
#[derive(Debug)]
pub struct DoctorReport<'a> {
    /// The facts of the node.
    pub machine: &'a Machine,
    /// The job that is to run.
    pub job: &'a Job,
    /// The parts of the program on this node; none for a recorded node.
    pub(crate) components: Option<&'a Components>,
    /// The facts that only a running process can find out; none for a recorded node.
    pub(crate) tried: Option<&'a Tried>,
    findings: Vec<Finding>,
}

impl<'a> DoctorReport<'a> {
    /// A report with nothing found yet.
    pub fn new(machine: &'a Machine, job: &'a Job) -> Self {
        Self { machine, job, components: None, tried: None, findings: Vec::new() }
    }

    /// Notes how `rule` judges a thing that only users of `facility` need.
    pub(crate) fn note(
        &mut self,
        rule: &'static Rule,
        facility: Facility,
        subject: impl Into<String>,
        judgement: Judgement,
    ) -> &mut Finding {
        let Judgement { verdict, found } = judgement;
        let words = rule.words();
        let finding = Finding {
            id: rule.id,
            subject: subject.into(),
            verdict,
            needed: self.job.needs(facility),
            found,
            expected: words.expected.clone(),
            impact: Some(words.impact.clone()),
            fix: Some(words.fix.clone()),
            source: Some(&words.source),
            page: format!("docs/findings.md#{}", rule.id),
        };
        let place = self.findings.len();
        self.findings.push(finding);
        &mut self.findings[place]
    }

    /// Judges a NIC. A fault of one that no rank uses may matter to other programs.
    pub(crate) fn judge_nic(&mut self, nic: &Nic, judge: impl FnOnce(&mut Self)) {
        let first = self.findings.len();
        judge(self);
        if rails(self).iter().any(|rail| rail.name == nic.name) {
            return;
        }
        for finding in self.findings.iter_mut().skip(first) {
            if finding.verdict > Verdict::Unknown {
                finding.verdict = Verdict::Unknown;
                finding.impact(
                    "nothing to ranks, as they use other NICs: this one is for storage or the like",
                );
            }
        }
    }

    /// The findings. A finding that is not needed is no fault, and without a fault there is no fix.
    pub fn finish(self) -> Vec<Finding> {
        let mut findings = self.findings;
        for finding in &mut findings {
            if !finding.needed {
                finding.verdict = Verdict::Ok;
            }
            if finding.verdict == Verdict::Ok {
                (finding.impact, finding.fix, finding.source) = (None, None, None);
            }
        }
        findings
    }
}
