//! The demands of a config and a shape on the node.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::Deserialize;
use tokenyard_core::abi;
use tokenyard_core::config::{ComponentChoice, Config};
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES};
use tokenyard_cpu::kernels::{CpuConfig, Spread, WindowSizes};
use tokenyard_doctor::{
    Alternative, Asks, Component, Components as ComponentFacts, Job, MissingComponent,
};

use crate::components::{BrokenFile, Components, Missing};

/// Keys of `verbs` and `ibgda` that say how their NICs are addressed, and how signals are raised.
#[derive(Default, Deserialize)]
struct VerbsKeys {
    gid_index: Option<u8>,
    port: Option<u32>,
    signals: Option<String>,
}

/// Keys of components' tables that say which NICs they take. The rest of a table is its component's.
#[derive(Deserialize)]
struct NicKeys {
    provider: Option<String>,
    device: Option<Names>,
    rails: Option<Names>,
    nics: Option<Names>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Names {
    One(String),
    Many(Vec<String>),
    /// Names for each local rank.
    ByRank(BTreeMap<String, Vec<String>>),
    /// A number: the component takes as many of the NICs that it finds, from the first on.
    Count(u32),
    /// A value of another type. The component refuses it.
    Other(serde::de::IgnoredAny),
}

impl Names {
    fn named(self) -> Vec<String> {
        match self {
            Self::One(name) if name != "auto" => vec![name],
            Self::Many(names) => names,
            Self::ByRank(names) => names.into_values().flatten().collect(),
            Self::One(_) | Self::Count(_) | Self::Other(_) => Vec::new(),
        }
    }
}

/// The key of a GPU kernel set that says which GPU a rank drives.
#[derive(Default, Deserialize)]
struct DeviceKey {
    device: Option<serde::de::IgnoredAny>,
}

/// The job that is to run.
pub(super) fn job(shape: &Shape, config: Option<&Config>) -> Result<Job> {
    let table = config.map(|c| &c.kernels).filter(|k| k.name == "cpu").map(|k| &k.table);
    // A table that is wrong is a finding of its own: the component's probe names it.
    let kernels: Result<CpuConfig, _> =
        table.map_or_else(|| Ok(CpuConfig::default()), |t| t.parse("cpu"));
    let kernels = kernels.unwrap_or_default();
    // A split that the ranks do not allow is found when they open the communicator.
    let domains = config.and_then(|c| c.domains).filter(|d| shape.ranks.is_multiple_of(*d));
    let limits =
        Capabilities { largest_put: u64::MAX, flags: abi::TY_CAP_LOAD_STORE, ..NO_CAPABILITIES };
    let spread = Spread { in_flight: 2, domains: domains.unwrap_or(1) };
    let sizes = WindowSizes::new(shape, spread, [&limits; 2], &kernels)?;
    let mut job = Job {
        ranks: shape.ranks.into(),
        threads: kernels.threads.into(),
        window_bytes: sizes.control_bytes + sizes.arena_bytes,
        ..Job::default()
    };
    if let Some(config) = config {
        add_config(&mut job, config);
    }
    Ok(job)
}

/// Adds what the parts of a config ask. Of several transports the ranks take one.
fn add_config(job: &mut Job, config: &Config) {
    job.asks.add_component("kernel set", &config.kernels.name, None);
    let key: DeviceKey = config.kernels.table.parse(&config.kernels.name).unwrap_or_default();
    job.asks.names_device = key.device.is_some();
    config.scale_up.iter().for_each(|choice| add_transport(&mut job.asks, choice));
    match config.scale_out.as_slice() {
        [one] => add_transport(&mut job.asks, one),
        several => {
            job.alternatives = several
                .iter()
                .map(|choice| {
                    let name = choice.name.clone();
                    let mut alternative = Alternative { name, ..Alternative::default() };
                    add_transport(&mut alternative.asks, choice);
                    alternative
                })
                .collect();
        }
    }
    add_topology(&mut job.asks, &config.topology);
    job.asks.nics.sort();
    job.asks.nics.dedup();
}

fn add_transport(asks: &mut Asks, choice: &ComponentChoice) {
    let provider = add_nics(asks, choice);
    if matches!(choice.name.as_str(), "verbs" | "ibgda") {
        let keys: VerbsKeys = choice.table.parse(&choice.name).unwrap_or_default();
        asks.gid_indices.extend(keys.gid_index);
        asks.ports.extend(keys.port);
        asks.writes_totals |= choice.name == "ibgda" && keys.signals.as_deref() == Some("write");
    }
    asks.add_component("transport", &choice.name, provider.as_deref());
}

/// The key `rails` of a topology is a rule, not a list of NICs: it says which NICs reach each other.
fn add_topology(asks: &mut Asks, choice: &ComponentChoice) {
    // A table that is wrong is a finding of its own, as above.
    let Ok(keys) = choice.table.parse::<NicKeys>(&choice.name) else { return };
    asks.nics.extend(keys.nics.into_iter().flat_map(Names::named));
    asks.any_rails = matches!(keys.rails, Some(Names::One(rails)) if rails == "any");
}

/// Adds the NICs that a component's table names; returns libfabric's provider, where it names one.
fn add_nics(asks: &mut Asks, choice: &ComponentChoice) -> Option<String> {
    // A table that is wrong is a finding of its own, as above.
    let keys: NicKeys = choice.table.parse(&choice.name).ok()?;
    asks.counted_rails |= matches!(keys.rails, Some(Names::Count(1..)));
    let named = [keys.device, keys.rails, keys.nics].into_iter().flatten().flat_map(Names::named);
    // The name of a libfabric domain is the NIC's name and the kind of its endpoint.
    asks.nics.extend(named.map(|name| name.trim_end_matches("-rdm").to_owned()));
    keys.provider
}

/// The program's components, as the rules see them.
pub(super) fn components(components: &Components) -> ComponentFacts {
    let own = |name: &str| name.to_owned();
    let component = |component: &crate::components::Component| Component {
        kind: own(component.kind),
        name: own(component.name),
        chosen: component.chosen,
        why_not: component.why_not.clone(),
    };
    let missing = |missing: &Missing| MissingComponent {
        kind: own(missing.kind),
        name: missing.name.clone(),
        found: missing.found.clone(),
        fix: missing.fix.clone(),
    };
    let broken = |file: &BrokenFile| (file.path.display().to_string(), file.error.clone());
    ComponentFacts {
        components: components.components.iter().map(component).collect(),
        missing: components.missing.iter().map(missing).collect(),
        broken_files: components.broken.iter().map(broken).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nics_are_found_wherever_a_config_names_them() {
        let text = "[kernels]\nuse = \"cpu\"\n[transport.scale_out]\nuse = \"libfabric\"\n\
                    [transport.scale_out.libfabric]\nprovider = \"efa\"\n\
                    rails = [\"rdmap85s0-rdm\"]\n[topology]\nuse = \"auto\"\n\
                    [topology.auto]\nrails = \"any\"\nnics = { 0 = [\"mlx5_1\"], 1 = [\"mlx5_0\", \"mlx5_1\"] }\n";
        let config = Config::parse(text, "config.toml").unwrap();
        let shape = Shape { ranks: 2, experts: 8, topk: 2, hidden: 256, max_tokens: 16 };
        let job = job(&shape.new().unwrap(), Some(&config)).unwrap();
        assert_eq!(job.asks.nics, ["mlx5_0", "mlx5_1", "rdmap85s0"]);
        assert!(job.asks.any_rails);
        assert!(job.needs(tokenyard_doctor::Facility::Efa));
        assert!(!job.needs(tokenyard_doctor::Facility::Verbs));
    }

    #[test]
    fn a_count_of_rails_goes_by_no_topology() {
        let counted = |rails: &str| {
            let text = format!(
                "[kernels]\nuse = \"cpu\"\n[transport.scale_out]\nuse = \"libfabric\"\n\
                 [transport.scale_out.libfabric]\nprovider = \"verbs\"\nrails = {rails}\n"
            );
            let config = Config::parse(&text, "config.toml").unwrap();
            let shape = Shape { ranks: 2, experts: 8, topk: 2, hidden: 256, max_tokens: 16 };
            job(&shape.new().unwrap(), Some(&config)).unwrap().asks.counted_rails
        };
        assert!(counted("2"));
        assert!(!counted("\"auto\"") && !counted("[\"mlx5_0\"]"));
    }

    #[test]
    fn signals_of_ibgda_that_are_written_are_noticed() {
        let written = |name: &str, signals: &str| {
            let text = format!(
                "[kernels]\nuse = \"cpu\"\n[transport.scale_out]\nuse = \"{name}\"\n\
                 {name} = {{ signals = \"{signals}\", port = 2 }}\n"
            );
            let config = Config::parse(&text, "config.toml").unwrap();
            let shape = Shape { ranks: 2, experts: 8, topk: 2, hidden: 256, max_tokens: 16 };
            let job = job(&shape.new().unwrap(), Some(&config)).unwrap();
            assert!(job.asks.ports.contains(&2));
            job.asks.writes_totals
        };
        assert!(written("ibgda", "write"));
        assert!(!written("ibgda", "atomic") && !written("verbs", "write"));
    }

    #[test]
    fn of_several_transports_each_asks_for_itself() {
        let text = "[kernels]\nuse = \"cpu\"\n[transport.scale_out]\nuse = [\"efa\", \"verbs\"]\n\
                    verbs = { device = \"mlx5_2\", gid_index = 3 }\n";
        let config = Config::parse(text, "config.toml").unwrap();
        let shape = Shape { ranks: 2, experts: 8, topk: 2, hidden: 256, max_tokens: 16 };
        let job = job(&shape.new().unwrap(), Some(&config)).unwrap();
        assert!(!job.needs(tokenyard_doctor::Facility::Efa));
        assert!(job.asks.nics.is_empty() && job.asks.gid_indices.is_empty());
        let [efa, verbs] = job.alternatives.as_slice() else { panic!("{:?}", job.alternatives) };
        assert_eq!((efa.name.as_str(), verbs.name.as_str()), ("efa", "verbs"));
        assert!(efa.asks.uses.as_ref().unwrap().contains(&tokenyard_doctor::Facility::Efa));
        assert_eq!(verbs.asks.nics, ["mlx5_2"]);
        assert_eq!(verbs.asks.gid_indices.iter().copied().collect::<Vec<_>>(), [3]);
    }
}
