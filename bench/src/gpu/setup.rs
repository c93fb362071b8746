//! The facts of a config about two levels: stand-ins, rates, and what cannot be measured over them. All functions are
//! pure.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_core::config::{ComponentChoice, Config};

use super::case::{Calls, Layout};
use super::exchange::GpuExchangeTask;
use super::nic::{PACED, Pace};

/// The stand-in inside a domain.
const TWIN: &str = "twin";
/// A stand-in between domains that keeps no pace.
const DEVICE_PUT: &str = "device-put";

/// Rates of links that are given and not measured, in GB/s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GivenRates {
    /// Of a rank to the other ranks of its domain.
    pub inside: Option<f64>,
    /// Of a rank to other domains.
    pub out: Option<f64>,
}

/// The facts of a config about two levels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Setup {
    /// GPUs of a twin: the first ranks have one each, other ranks run nothing.
    pub twin: Option<u32>,
    /// Whether the config splits the world into domains, with a level inside.
    pub(super) has_domains: bool,
    /// The rate that the transport between domains is set to, in GB/s.
    pub(super) out: Option<f64>,
    /// The transports that are no hardware, in words.
    pub stand_ins: Vec<String>,
}

/// Of an operation between domains whose floor would not be known.
const NO_RATE: &str = "read options: found no rate between domains; expected one. Fix: give --out-rate in GB/s, or \
                       `rate` of paced";

/// The key of the table of `twin` that counts; its default as there.
#[derive(Deserialize)]
struct TwinKeys {
    #[serde(default = "two")]
    gpus: u32,
}

fn two() -> u32 {
    2
}

fn keys<T: serde::de::DeserializeOwned>(choice: &ComponentChoice) -> Result<T> {
    toml::from_str(choice.table.text())
        .with_context(|| format!("read the table of {}", choice.name))
}

/// Whether the transport inside is the stand-in.
pub(super) fn is_twin(choice: &ComponentChoice) -> bool {
    choice.name == TWIN
}

impl Setup {
    /// Reads them out of a config.
    ///
    /// # Errors
    /// A table of a stand-in that cannot be read.
    pub fn of(config: &Config) -> Result<Self> {
        let has_domains = config.domains.is_some_and(|domains| domains > 1);
        let mut setup =
            Self { has_domains: has_domains && config.scale_up.is_some(), ..Self::default() };
        if let Some(choice) = config.scale_up.as_ref().filter(|choice| is_twin(choice)) {
            let TwinKeys { gpus } = keys(choice)?;
            setup.twin = Some(gpus);
            setup.stand_ins.push(format!("twin: {gpus} GPUs stand for all ranks"));
        }
        if let Some(choice) = config.scale_out.first().filter(|choice| choice.name == PACED) {
            let Pace { rate, latency_us, .. } = keys(choice)?;
            setup.out = Some(rate).filter(|rate| *rate > 0.0);
            let pace = format!("{rate} GB/s, {latency_us} us");
            setup.stand_ins.push(format!("paced: a kernel stands in for the NIC, {pace}"));
        }
        if config.scale_out.first().is_some_and(|choice| choice.name == DEVICE_PUT) {
            setup.stand_ins.push("device-put: its times say nothing about any NIC".to_owned());
        }
        Ok(setup)
    }

    /// Whether a rank runs nothing, because a GPU of the twin stands for it.
    pub fn is_idle(&self, rank: u32) -> bool {
        self.twin.is_some_and(|gpus| rank >= gpus)
    }

    /// The ranks that run operations, of so many.
    pub fn working(&self, ranks: u32) -> u32 {
        self.twin.map_or(ranks, |gpus| gpus.min(ranks))
    }

    /// Refuses, before a rank starts, what could not be measured.
    ///
    /// # Errors
    /// The rates are not known; a twin does not do the operation.
    pub fn check(&self, given: GivenRates, task: &GpuExchangeTask) -> Result<()> {
        if self.twin.is_some() {
            // Over one level, ranks take part in barriers that those that run nothing know nothing of, and the rows of
            // the ranks that are there are not those of all.
            ensure!(
                self.has_domains,
                "read options: found `twin` with one domain; expected several. Fix: set topology.domains, or measure \
                 one domain by python/tests/gpu_twin.py"
            );
            ensure!(
                given.inside.is_some(),
                "read options: found no --inside-rate; expected one: a twin does not measure its links. Fix: give what \
                 `tokenyard bench link` finds on these GPUs over `nvlink`"
            );
            ensure!(
                task.layouts == [Layout::Flat]
                    && matches!(task.calls, Calls::Waiting | Calls::NoSync),
                "read options: found another --layout than flat, or --calls graph or sends; expected neither over \
                 `twin`. Fix: leave them out"
            );
        }
        ensure!(!self.has_domains || given.out.or(self.out).is_some(), "{NO_RATE}");
        Ok(())
    }

    /// Refuses the link of a twin: there is none between most of its ranks.
    ///
    /// # Errors
    /// As said.
    pub fn check_link(&self) -> Result<()> {
        ensure!(
            self.twin.is_none(),
            "measure the link: found `twin`; expected GPUs for all ranks. Fix: name a config with `nvlink`, such as \
             configs/nvlink.toml"
        );
        Ok(())
    }

    /// The rates of both links in GB/s, out and inside; 0 where it is not known.
    pub(super) fn rates(&self, given: GivenRates, measured: f64) -> [f64; 2] {
        [given.out.or(self.out).unwrap_or(0.0), given.inside.unwrap_or(measured)]
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::{Fixed, Manner, Phase, Routing, Rows};
    use super::*;

    const FIXED: Fixed = Fixed { hidden: 7168, topk: 8, experts: 256 };

    fn config(text: &str) -> Config {
        let kernels = "[kernels]\nuse = \"cuda\"\n";
        Config::parse(&format!("{kernels}{text}"), "a.toml").unwrap()
    }

    const TWIN_CONFIG: &str = "[transport.scale_up]\nuse = \"twin\"\n[transport.scale_out]\nuse = \"paced\"\n\
                               [transport.scale_out.paced]\nrate = 92.0\ntwin = 2\n\
                               [topology]\ndomains = 2\n";

    fn task(calls: Calls) -> GpuExchangeTask {
        GpuExchangeTask {
            phase: Phase::Dispatch,
            fixed: FIXED,
            tokens: vec![4096],
            rows: vec![Rows::Fp8],
            layouts: vec![Layout::Flat],
            routing: Routing::Uniform,
            manner: Manner::Plain,
            calls,
            sms: vec![16],
            samples: 3,
        }
    }

    #[test]
    fn a_setup_names_its_stand_ins_and_the_rate_that_one_is_set_to() {
        let setup = Setup::of(&config(TWIN_CONFIG)).unwrap();
        assert_eq!((setup.twin, setup.out, setup.stand_ins.len()), (Some(2), Some(92.0), 2));
        assert!(setup.stand_ins[1].contains("92 GB/s, 4 us"), "{:?}", setup.stand_ins);
        assert_eq!(setup.rates(GivenRates::default(), 340.0), [92.0, 340.0]);
        let given = GivenRates { inside: Some(365.0), out: Some(46.0) };
        assert_eq!(setup.rates(given, 340.0), [46.0, 365.0]);
        assert!(setup.is_idle(2) && !setup.is_idle(1) && setup.working(16) == 2);
        let plain = Setup::of(&config("[transport.scale_up]\nuse = \"nvlink\"\n")).unwrap();
        assert_eq!((plain.clone(), plain.working(4)), (Setup::default(), 4));
        let other = TWIN_CONFIG.replace("use = \"paced\"", "use = \"device-put\"");
        let other = other.split("[transport.scale_out.paced]").next().unwrap();
        assert!(Setup::of(&config(other)).unwrap().stand_ins[1].contains("say nothing"));
        let free = TWIN_CONFIG.replace("92.0", "0.0");
        let unknown = Setup::of(&config(&free)).unwrap();
        assert_eq!(unknown.rates(GivenRates::default(), 340.0), [0.0, 340.0]);
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_the_option_that_is_missing() {
        let twin = Setup::of(&config(TWIN_CONFIG)).unwrap();
        let inside = GivenRates { inside: Some(365.0), out: None };
        let refused =
            |setup: &Setup, given, calls| setup.check(given, &task(calls)).unwrap_err().to_string();
        assert!(twin.check(inside, &task(Calls::Waiting)).is_ok());
        let text = refused(&twin, GivenRates::default(), Calls::Waiting);
        assert!(text.contains("found no --inside-rate"), "{text}");
        let text = refused(&twin, inside, Calls::Graph);
        assert!(text.contains("--calls graph or sends"), "{text}");
        let domains = Setup { has_domains: true, ..Setup::default() };
        let text = refused(&domains, inside, Calls::Waiting);
        assert!(text.contains("give --out-rate"), "{text}");
        let pair = GpuExchangeTask { phase: Phase::Pair, ..task(Calls::Waiting) };
        assert!(twin.check(inside, &pair).is_ok());
        assert!(Setup::default().check(inside, &task(Calls::Graph)).is_ok());
    }

    #[test]
    fn a_twin_of_one_domain_is_refused_and_so_is_the_link_of_any_twin() {
        let one = TWIN_CONFIG.split("[transport.scale_out]").next().unwrap();
        let one = Setup::of(&config(one)).unwrap();
        let inside = GivenRates { inside: Some(365.0), out: None };
        let text = one.check(inside, &task(Calls::Waiting)).unwrap_err().to_string();
        assert!(text.contains("found `twin` with one domain"), "{text}");
        for setup in [one, Setup::of(&config(TWIN_CONFIG)).unwrap()] {
            let text = setup.check_link().unwrap_err().to_string();
            assert!(text.contains("configs/nvlink.toml"), "{text}");
        }
        assert!(Setup::default().check_link().is_ok());
    }
}
