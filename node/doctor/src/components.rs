//! The parts of the program on this node.

use serde::Serialize;
use tokenyard_machine::Machine;

use crate::node::{COMPONENT, PLUGIN};
use crate::{DoctorReport, Facility, Finding, Job, Verdict};

/// A component of the program, and whether it works here.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Components {
    /// The components, those of plugins too.
    pub components: Vec<Component>,
    /// Names of the config that no component has.
    pub missing: Vec<MissingComponent>,
    /// Plugin files that failed the handshake: path and error.
    pub broken_files: Vec<(String, String)>,
}

/// A component.
#[derive(Clone, Debug, Serialize)]
pub struct Component {
    /// `transport`, `kernel set` or `topology`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// The config names it.
    pub chosen: bool,
    /// The reason why it cannot run here, in the probe's words.
    pub why_not: Option<String>,
}

/// A choice of the config that is the name of no component.
#[derive(Clone, Debug, Serialize)]
pub struct MissingComponent {
    /// `transport`, `kernel set` or `topology`.
    pub kind: String,
    /// The name in the config.
    pub name: String,
    /// The components that are there, and the places where its plugin was looked for.
    pub found: String,
    /// How to get it.
    pub fix: String,
}

/// The finding on components whose probes did not answer in time: nothing else is known of them.
pub fn unanswered(milliseconds: u128) -> Vec<Finding> {
    let (machine, job) = (Machine::default(), Job::default());
    let mut report = DoctorReport::new(&machine, &job);
    let found = format!("a probe did not answer in {milliseconds} ms");
    report
        .note(&COMPONENT, Facility::Node, "parts of the program", Verdict::Unknown.on(found))
        .impact("nothing is known of them; where a driver hangs, ranks hang as well")
        .fix(
            "`nvidia-smi` and `ibv_devinfo` by hand show which driver hangs, dmesg its messages; restart \
             the node if it does not recover",
        );
    report.finish()
}

/// The state that is expected of a component that the config chooses.
const CHOSEN: &str = "works here: the config chooses it";

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    let Some(components) = report.components else { return };
    for component in &components.components {
        let (verdict, found) = match &component.why_not {
            None => (Verdict::Ok, "it works here"),
            // A component that no config chooses may fail its probe.
            Some(why) if component.chosen => (Verdict::Broken, why.as_str()),
            Some(why) => (Verdict::Ok, why.as_str()),
        };
        let subject = format!("{} {}", component.kind, component.name);
        let finding = report.note(&COMPONENT, Facility::Node, subject, verdict.on(found));
        finding.expected(if component.chosen {
            CHOSEN
        } else {
            "nothing: the config does not choose it"
        });
        finding.needed = component.chosen || component.why_not.is_none();
    }
    for MissingComponent { kind, name, found, fix } in &components.missing {
        let judgement = Verdict::Broken.on(found);
        report
            .note(&COMPONENT, Facility::Node, format!("{kind} {name}"), judgement)
            .expected(CHOSEN)
            .fix(fix.as_str());
    }
    for (path, error) in &components.broken_files {
        let judgement = Verdict::Broken.on(error);
        report.note(&PLUGIN, Facility::Node, format!("plugin {path}"), judgement);
    }
}
