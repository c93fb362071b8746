//! Dispatch and combine on GPUs, against the rate of the link between them in the same run.
//!
//! [`ceiling`] measures the link: copies by SM count, barriers, exchanges of counts. [`exchange`] times
//! operations by events around calls that follow each other on a stream, everything included: counting,
//! exchange, rows, scales, ids, weights, drain. [`figures`] turns both into lines: bytes and floors come
//! from [`bytes`]. [`mod@plot`] draws them. Only the first two need a GPU.
//!
//! Watched by the tests in these files: figures, bytes and texts. `docs/testing-gpus.md` has the runs on GPUs.

pub mod auto_sms;
mod backend;
pub mod bytes;
pub mod case;
pub mod ceiling;
pub mod exchange;
pub mod figures;
pub mod machine;
pub mod nic;
mod peer;
pub mod plot;
pub mod ring;
mod sends;
pub mod setup;
mod show;
pub mod two_levels;
mod workload;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::{ComponentTable, Config};
use tokenyard_core::files;
use tokenyard_core::host::Registry;
use tokenyard_core::report::utc;
use tokenyard_gpu::{GpuConfig, PeersConfig, RowCopy};

use crate::ranks::Speaker;
use crate::spread::median;
use backend::Backend;
use machine::Machine;

/// The largest report that is read, in bytes.
const MAX_REPORT: u64 = 256 << 20;

pub use show::tables;

/// The task of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GpuTask {
    /// SM counts of the link's copies; counts above that of the GPU are left out, and that of the
    /// GPU is added.
    pub link_sms: Vec<u32>,
    /// The operations; without them, only the link is measured.
    pub exchange: Option<exchange::GpuExchangeTask>,
    /// Rates that are given. With that inside, the link is not measured.
    pub rates: setup::GivenRates,
}

/// The figures of one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GpuFigures {
    /// Its GPU; rank 0 adds the clocks.
    pub machine: Machine,
    /// GPUs that the ranks that work have, all together.
    pub gpus: u32,
    /// Figures of the link.
    pub ceiling: ceiling::CeilingFigures,
    /// Samples of operations.
    pub exchange: Vec<exchange::GpuSamples>,
}

/// All figures of a run on GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuReport {
    /// The day of the run in UTC, as `2026-11-28`; none in reports of earlier versions.
    #[serde(default)]
    pub date: Option<String>,
    /// The machine of rank 0.
    pub machine: Machine,
    /// R, the number of ranks.
    pub ranks: u32,
    /// The link's figures.
    pub link: figures::Link,
    /// Sizes of the operations; none where only the link was measured.
    pub sizes: Option<case::Fixed>,
    /// One for each operation and SM count.
    pub rows: Vec<figures::GpuRow>,
    /// The choice of `sms = "auto"` for each operation that its formula decides.
    #[serde(default)]
    pub auto_sms: Vec<auto_sms::AutoSms>,
    /// The same of the formula for two levels.
    #[serde(default)]
    pub level_sms: Vec<auto_sms::AutoSms>,
    /// Stand-ins, where there are some: each figure is one over them.
    #[serde(default)]
    pub stand_ins: Vec<String>,
    /// The GPUs, where there are fewer than ranks.
    #[serde(default)]
    pub gpus: Option<u32>,
    /// The ranks that run operations, where others run none.
    #[serde(default)]
    pub working: Option<u32>,
}

/// The components that a config must name for this measurement.
#[derive(Clone, Debug)]
pub(crate) struct Components {
    pub(crate) backend: Backend,
    pub(crate) kernels: GpuConfig,
    pub(crate) link: PeersConfig,
}

/// Whether a config names GPUs for its kernels.
pub fn is_gpu(config: &Config) -> bool {
    Backend::of(config).is_some()
}

impl Components {
    pub(crate) fn of(config: &Config) -> Result<Self> {
        let backend = Backend::named(config)?;
        let names = &backend.platform().names;
        let kernels = config.kernels.table.parse(names.kernels)?;
        // These times are compared to the ceiling of this transport's links.
        let link = match &config.scale_up {
            Some(choice) if choice.name == names.link => choice.table.parse(names.link)?,
            // Its links are not measured.
            Some(choice) if setup::is_twin(choice) => PeersConfig::default(),
            other => {
                let found = other.as_ref().map(|choice| &choice.name);
                bail!("found transport.scale_up.use = {found:?}; expected {:?}", names.link);
            }
        };
        Ok(Self { backend, kernels, link })
    }
}

/// The ranks that a config's machine has GPUs for.
///
/// # Errors
/// A component cannot run here: no driver, no GPU, no compiler, no link between GPUs.
pub fn ranks_here(config: &Config) -> Result<u32> {
    let components = Components::of(config)?;
    let registry = Registry::for_config(config)?;
    registry.kernels(&config.kernels.name)?.probe(&config.kernels.table)?;
    if let Some(link) = &config.scale_up {
        registry.transport(&link.name)?.probe(&link.table)?;
    }
    Ok(tokenyard_gpu::probe::devices(components.backend.platform())?)
}

/// Whether a config says which GPU each rank drives: there may be more ranks than GPUs then.
///
/// # Errors
/// As [`ranks_here`], of the config.
pub fn names_gpus(config: &Config) -> Result<bool> {
    Ok(Components::of(config)?.kernels.device.is_some())
}

/// The config with another number of multiprocessors.
fn with_sms(config: &Config, sms: u32) -> Result<Config> {
    let mut config = config.clone();
    let mut table: toml::Table = toml::from_str(config.kernels.table.text())
        .with_context(|| format!("read [kernels.{}]", config.kernels.name))?;
    table.insert("sms".to_owned(), toml::Value::Integer(sms.into()));
    let text = toml::to_string(&table)
        .with_context(|| format!("write [kernels.{}]", config.kernels.name))?;
    config.kernels.table = ComponentTable::from_text(&text, &config.name);
    Ok(config)
}

/// The work of one rank.
pub(crate) fn measure(
    world: &Arc<World>,
    config: &Config,
    task: &GpuTask,
    say: &Speaker,
) -> Result<GpuFigures> {
    let components = Components::of(config)?;
    say.progress(0, 1)?;
    let backend = components.backend;
    let setup = setup::Setup::of(config)?;
    setup.check_ranks(world.ranks())?;
    let about = tokenyard_gpu::probe::about(backend.platform(), &components.kernels)?;
    let gpus = gpus_of(world, setup.working(world.ranks()), backend, about.ordinal)?;
    setup.check_sharing(setup.working(world.ranks()), gpus, task.rates)?;
    let (about, ceiling) = match task.rates.inside {
        // Ranks of several hosts, or of a twin, have no link to all others.
        Some(_) => (about, ceiling::CeilingFigures::default()),
        None => {
            backend.ceiling(world, &components, &task.link_sms, say).context("measure the link")?
        }
    };
    let facts = exchange::Facts { processors: about.processors, given: task.rates, setup };
    let exchange = match &task.exchange {
        Some(exchange) => exchange::measure(world, config, exchange, &facts, say)?,
        None => Vec::new(),
    };
    let machine = Machine::new(backend, &about, world.rank() == 0);
    Ok(GpuFigures { machine, gpus, ceiling, exchange })
}

/// The rate of copy engines between GPUs, for operations that use them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Engines {
    /// This rank's GPU; rank 0 adds the clocks.
    pub machine: Machine,
    /// GPUs that the ranks have, all together.
    pub gpus: u32,
    /// Bytes per second out of this rank to all others at once, by the median of launches.
    pub bytes_per_s: f64,
}

/// The rate that copy engines had, before anything else is measured.
pub(crate) struct EngineRate {
    backend: Backend,
    about: tokenyard_gpu::probe::About,
    gpus: u32,
    pub(crate) bytes_per_s: f64,
}

impl EngineRate {
    /// With the clocks of now, on rank 0.
    pub(crate) fn into_facts(self, rank: u32) -> Engines {
        let Self { backend, about, gpus, bytes_per_s } = self;
        Engines { machine: Machine::new(backend, &about, rank == 0), gpus, bytes_per_s }
    }
}

/// Measures the copy engines of a rank. Collective.
pub(crate) fn engines(world: &Arc<World>, config: &Config, say: &Speaker) -> Result<EngineRate> {
    setup::Setup::of(config)?.check_link()?;
    let components = Components::of(config)?;
    let backend = components.backend;
    let about = tokenyard_gpu::probe::about(backend.platform(), &components.kernels)?;
    let gpus = gpus_of(world, world.ranks(), backend, about.ordinal)?;
    let (about, figures) =
        backend.ceiling(world, &components, &[], say).context("measure the link")?;
    let launches = figures.launches.iter().find(|all| all.copy == ceiling::Copy::PushEngines);
    let us = launches.and_then(|all| median(all.us.iter().copied()));
    let us = us.context("measure the link: found no launch of copy engines")?;
    Ok(EngineRate { backend, about, gpus, bytes_per_s: figures.bytes as f64 / us * 1e6 })
}

/// The GPUs that the first `working` ranks have, of which this one has that with an ordinal. Collective.
fn gpus_of(world: &World, working: u32, backend: Backend, ordinal: i32) -> Result<u32> {
    let host = tokenyard_core::bootstrap::machine::identity()
        .map_err(|(file, error)| tokenyard_core::Error::system("read", file.to_owned(), error))?;
    let mine = machine::gpu_name(&host, backend.visible().as_deref(), ordinal);
    let all = world.all_gather("GPUs", mine.as_bytes())?;
    let distinct: BTreeSet<_> = all.into_iter().take(working as usize).collect();
    Ok(distinct.len() as u32)
}

fn today() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut date = utc(since.as_millis() as u64);
    date.truncate("2026-11-28".len());
    date
}

/// The report from the figures of all ranks.
pub(crate) fn report(config: &Config, task: &GpuTask, all: &[GpuFigures]) -> Result<GpuReport> {
    let ranks = all.len() as u32;
    let setup = setup::Setup::of(config)?;
    let working = setup.working(ranks);
    let all = &all[..working as usize];
    let first = all.first().context("found figures of no rank; expected those of all")?;
    let gpus = first.gpus;
    let ceilings: Vec<_> = all.iter().map(|figures| &figures.ceiling).collect();
    let mut link = figures::link(&ceilings)?;
    link.ceiling_gb_s = task.rates.inside.unwrap_or(link.ceiling_gb_s);
    let samples: Vec<_> = all.iter().map(|figures| figures.exchange.as_slice()).collect();
    let has_levels = samples.iter().any(|all| all.iter().any(|one| one.levels.is_some()));
    let mut stand_ins = setup.stand_ins(has_levels);
    if gpus < working {
        stand_ins.push(format!("ranks share a GPU: {working} ranks on {gpus} GPUs"));
    }
    let rows = match &task.exchange {
        Some(exchange) => {
            let context = two_levels::LevelContext {
                setup,
                given: task.rates,
                fixed: exchange.fixed,
                measured_gb_s: link.ceiling_gb_s,
            };
            figures::rows(exchange, &samples, &context)?
        }
        None => Vec::new(),
    };
    let sizes = task.exchange.as_ref().map(|exchange| exchange.fixed);
    // For rows that move by bulk copies.
    let by_vectors = Components::of(config)?.kernels.rows == RowCopy::Vector;
    let has_formula = !by_vectors && first.machine.has_bulk_copies();
    let auto_sms = match sizes {
        Some(fixed) if has_formula => auto_sms::lines(&rows, &fixed, ranks),
        _ => Vec::new(),
    };
    let level_sms = auto_sms::level_lines(&rows);
    Ok(GpuReport {
        date: Some(today()),
        machine: first.machine.clone(),
        ranks,
        link,
        sizes,
        rows,
        auto_sms,
        level_sms,
        stand_ins,
        gpus: (gpus < ranks).then_some(gpus),
        working: (working < ranks).then_some(working),
    })
}

impl GpuReport {
    /// Reads the figures of GPUs out of a report's file.
    ///
    /// # Errors
    /// The report has another schema, or no such figures.
    pub fn read(file: &Path) -> Result<Self> {
        let named = || format!("read {}", file.display());
        let text = files::read_text(file, MAX_REPORT).context("read report")?;
        Self::parse(&text).with_context(named)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut document: serde_json::Value = serde_json::from_str(text)?;
        let version = document["schema_version"].as_u64();
        ensure!(
            version == Some(crate::SCHEMA_VERSION.into()),
            "found schema_version {version:?}; expected {}",
            crate::SCHEMA_VERSION
        );
        let gpu = document["gpu"].take();
        ensure!(
            !gpu.is_null(),
            "found no figures of GPUs; expected a report of `bench dispatch`, \
             `bench combine` or `bench link` on GPUs"
        );
        Ok(serde_json::from_value(gpu)?)
    }

    /// The ranks and their GPUs, for titles.
    fn hardware(&self) -> String {
        let (ranks, gpu) = (self.ranks, &self.machine.gpu);
        match (self.gpus, self.working) {
            (Some(gpus), Some(_)) => format!("1 of {ranks} ranks on each of {gpus} x {gpu}"),
            (Some(gpus), None) => format!("{ranks} ranks that share {gpus} x {gpu}"),
            (None, _) => format!("{ranks} x {gpu}"),
        }
    }

    /// Every operation that meets the rule with none of its SM counts, in words.
    pub fn missed(&self) -> Vec<String> {
        figures::missed(&self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(text, "a.toml").unwrap()
    }

    const GPU: &str = "[kernels]\nuse = \"cuda\"\n[kernels.cuda]\nsms = 16\narena_mib = 64\n\
                       [transport.scale_up]\nuse = \"nvlink\"\n";

    #[test]
    fn the_number_of_multiprocessors_is_changed_and_nothing_else() {
        let changed = with_sms(&config(GPU), 24).unwrap();
        let components = Components::of(&changed).unwrap();
        assert_eq!(components.kernels.sms, tokenyard_gpu::Sms::Count(24));
        assert_eq!(components.kernels.arena_mib, Some(64));
        let bare = "[kernels]\nuse = \"cuda\"\n[transport.scale_up]\nuse = \"nvlink\"\n";
        let changed = with_sms(&config(bare), 4).unwrap();
        assert_eq!(Components::of(&changed).unwrap().kernels.sms, tokenyard_gpu::Sms::Count(4));
    }

    #[test]
    fn configs_without_gpus_or_their_link_are_refused_with_what_was_found() {
        let cpu = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
        let text = Components::of(&config(cpu)).unwrap_err().to_string();
        assert!(
            text.contains("found kernels.use = \"cpu\"; expected \"cuda\" or \"rocm\""),
            "{text}"
        );
        let text = Components::of(&config(&GPU.replace("nvlink", "shm"))).unwrap_err().to_string();
        assert!(text.contains("Some(\"shm\"); expected \"nvlink\""), "{text}");
        let text = Components::of(&config(&GPU.replace("cuda", "rocm"))).unwrap_err().to_string();
        assert!(text.contains("Some(\"nvlink\"); expected \"xgmi\""), "{text}");
    }

    #[test]
    fn reports_of_another_schema_or_without_gpus_are_refused() {
        let text = GpuReport::parse("{\"schema_version\": 99}").unwrap_err().to_string();
        assert!(text.contains("found schema_version Some(99); expected 3"), "{text}");
        let text =
            GpuReport::parse("{\"schema_version\": 3, \"gpu\": null}").unwrap_err().to_string();
        assert!(text.contains("found no figures of GPUs"), "{text}");
    }
}
