//! What a config and a shape ask of the node.

use anyhow::Result;
use serde::Deserialize;
use tokenyard_core::abi;
use tokenyard_core::config::{Config, PartChoice};
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES};
use tokenyard_cpu::kernels::{CpuConfig, Spread, WindowSizes};
use tokenyard_doctor::{Job, Part, Parts as PartFacts};

use crate::parts::Parts;

/// Keys of transports' tables that say which NICs they take. The rest of a table is its part's.
#[derive(Deserialize)]
struct NicKeys {
    provider: Option<String>,
    device: Option<Names>,
    rails: Option<Names>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Names {
    One(String),
    Many(Vec<String>),
    /// A count of rails, or what its part will refuse.
    Other(serde::de::IgnoredAny),
}

impl Names {
    fn named(self) -> Vec<String> {
        match self {
            Self::One(name) if name != "auto" => vec![name],
            Self::Many(names) => names,
            Self::One(_) | Self::Other(_) => Vec::new(),
        }
    }
}

/// What is to run.
pub(super) fn job(shape: &Shape, config: Option<&Config>) -> Result<Job> {
    let table = config.map(|c| &c.kernels).filter(|k| k.name == "cpu").map(|k| &k.table);
    // A table that is wrong is a finding of its own: the part's probe names it.
    let kernels: Result<CpuConfig, _> =
        table.map_or_else(|| Ok(CpuConfig::default()), |t| t.parse("cpu"));
    let kernels = kernels.unwrap_or_default();
    // A split that the ranks do not allow is found when they open the yard.
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
        job.add_part("kernel set", &config.kernels.name, None);
        for choice in config.scale_up.iter().chain(&config.scale_out) {
            add_transport(&mut job, choice);
        }
    }
    Ok(job)
}

fn add_transport(job: &mut Job, choice: &PartChoice) {
    // A table that is wrong is a finding of its own, as above.
    let keys: Option<NicKeys> = choice.table.parse(&choice.name).ok();
    let (provider, named) = keys.map_or((None, Vec::new()), |keys| {
        let named = [keys.device, keys.rails].into_iter().flatten().flat_map(Names::named);
        // libfabric's domains are the NICs' names with what kind of endpoint they are for.
        let named = named.map(|name| name.trim_end_matches("-rdm").to_owned());
        (keys.provider, named.collect())
    });
    job.add_part("transport", &choice.name, provider.as_deref());
    job.nics.extend(named);
}

/// The program's parts, as the rules see them.
pub(super) fn parts(parts: &Parts, config: Option<&Config>) -> PartFacts {
    let own = |name: &str| name.to_owned();
    let part = |part: &crate::parts::Part| Part {
        kind: own(part.kind),
        name: own(part.name),
        chosen: part.chosen,
        why_not: part.why_not.clone(),
    };
    let missing = config.map(|config| parts.missing(config)).unwrap_or_default();
    let path = |path: &Option<std::path::PathBuf>| {
        path.as_ref().map_or(String::new(), |path| path.display().to_string())
    };
    PartFacts {
        parts: parts.parts.iter().map(part).collect(),
        missing: missing.into_iter().map(|(kind, name)| (own(kind), name)).collect(),
        broken_files: parts.broken.iter().map(|f| (path(&f.path), f.error.clone())).collect(),
    }
}
