//! The facts of a config about two levels: stand-ins, rates, and what cannot be measured over them. All functions are
//! pure.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
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
    /// D by the config, with a level inside; 0 where the config does not say.
    pub(super) domains: u32,
    /// The rate that the transport between domains is set to, in GB/s.
    pub(super) out: Option<f64>,
    /// Whether the transport between domains is the stand-in that says how late it was.
    pub(super) is_paced: bool,
    /// The devices that the kernels' table names, for ranks in turn; none where each rank has one of its own.
    pub(super) devices: Vec<u32>,
    /// The stand-in inside, in words.
    pub(super) inside_stand_in: Option<String>,
    /// The same between domains.
    pub(super) out_stand_in: Option<String>,
}

/// The most ranks of a domain that kernels take.
const MOST_RANKS: u32 = 72;

/// The key of the table of `twin` that counts; its default as there.
#[derive(Deserialize)]
struct TwinKeys {
    #[serde(default = "two")]
    gpus: u32,
}

/// The same of `paced`.
#[derive(Deserialize)]
struct PacedKeys {
    twin: Option<u32>,
}

/// The same of a kernel set.
#[derive(Deserialize)]
struct KernelKeys {
    device: Option<OneOrMore>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(u32),
    More(Vec<u32>),
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
        let domains = config.domains.filter(|_| config.scale_up.is_some()).unwrap_or(0);
        let mut setup = Self { domains, ..Self::default() };
        setup.devices = match keys::<KernelKeys>(&config.kernels)?.device {
            Some(OneOrMore::One(device)) => vec![device],
            Some(OneOrMore::More(devices)) => devices,
            None => Vec::new(),
        };
        if let Some(choice) = config.scale_up.as_ref().filter(|choice| is_twin(choice)) {
            let TwinKeys { gpus } = keys(choice)?;
            setup.twin = Some(gpus);
            setup.inside_stand_in = Some(format!("twin: {gpus} GPUs stand for all ranks"));
        }
        let stand_in =
            config.scale_out.iter().find(|choice| [PACED, DEVICE_PUT].contains(&&*choice.name));
        let mut rails = None;
        if let Some(choice) = stand_in {
            // The first that works on all ranks carries the rows, and the report names it by this config.
            ensure!(
                config.scale_out.len() == 1,
                "read config: found the stand-in `{}` in a list of {} transports; expected it alone in \
                 transport.scale_out. Fix: name the one that is to be measured",
                choice.name,
                config.scale_out.len()
            );
            setup.is_paced = choice.name == PACED;
            setup.out_stand_in = Some("device-put: its times say nothing about any NIC".to_owned());
        }
        if let Some(choice) = stand_in.filter(|_| setup.is_paced) {
            let Pace { rate, latency_us, .. } = keys(choice)?;
            rails = keys::<PacedKeys>(choice)?.twin;
            setup.out = Some(rate).filter(|rate| *rate > 0.0);
            let pace = format!("{rate} GB/s, {latency_us} us");
            setup.out_stand_in = Some(format!("paced: a kernel stands in for the NIC, {pace}"));
        }
        // Both stand for the same ranks.
        let in_words = |gpus: Option<u32>| gpus.map_or("none".to_owned(), |gpus| gpus.to_string());
        ensure!(
            !setup.has_domains() || rails == setup.twin,
            "read config: found {} GPUs of twin, and {} of paced; expected the same number. Fix: set `gpus` of twin \
             and `twin` of paced both to 2, or both to 4",
            in_words(setup.twin),
            in_words(rails)
        );
        Ok(setup)
    }

    fn has_domains(&self) -> bool {
        self.domains > 1
    }

    /// The transports that are no hardware, in words, of a run over one level or several.
    pub fn stand_ins(&self, has_levels: bool) -> Vec<String> {
        let out = self.out_stand_in.iter().filter(|_| has_levels);
        self.inside_stand_in.iter().chain(out).cloned().collect()
    }

    /// Whether a rank runs nothing, because a GPU of the twin stands for it.
    pub fn is_idle(&self, rank: u32) -> bool {
        self.twin.is_some_and(|gpus| rank >= gpus)
    }

    /// The ranks that run operations, of so many.
    pub fn working(&self, ranks: u32) -> u32 {
        self.twin.map_or(ranks, |gpus| gpus.min(ranks))
    }

    /// The GPUs of so many ranks that work, all on one machine.
    pub fn gpus(&self, working: u32) -> u32 {
        if self.devices.is_empty() {
            return working;
        }
        let named: BTreeSet<u32> =
            self.devices.iter().cycle().take(working as usize).copied().collect();
        named.len() as u32
    }

    /// Refuses a number of ranks that kernels or a twin cannot have.
    ///
    /// # Errors
    /// A domain has too many ranks, or fewer than a twin has GPUs.
    pub fn check_ranks(&self, ranks: u32) -> Result<()> {
        let domains = self.domains.max(1);
        let least = self.twin.unwrap_or(1);
        ensure!(
            (least..=MOST_RANKS).contains(&(ranks / domains)),
            "read options: found {ranks} ranks in {domains} domains; expected {least} to {MOST_RANKS} ranks of each. \
             Fix: give another --ranks, or other domains"
        );
        Ok(())
    }

    /// Refuses ranks that share a GPU where that has no meaning: over one level, or where their link would be measured.
    ///
    /// # Errors
    /// These `working` ranks have fewer GPUs.
    pub fn check_sharing(&self, working: u32, gpus: u32, given: GivenRates) -> Result<()> {
        ensure!(
            gpus >= working || (self.has_domains() && given.inside.is_some()),
            "read options: found fewer GPUs ({gpus}) than ranks ({working}); expected a GPU for each, or several \
             domains and --inside-rate. Fix: name a device for each rank; or set topology.domains, and give the rate \
             inside"
        );
        Ok(())
    }

    /// Refuses, before a rank starts, what could not be measured.
    ///
    /// # Errors
    /// The rates are not known; a twin does not do the operation.
    pub fn check(&self, given: GivenRates, task: &GpuExchangeTask) -> Result<()> {
        if self.twin.is_some() {
            // Over one level, ranks that work take part in barriers which those that run nothing do not enter, and
            // bytes are those of all ranks.
            ensure!(
                self.has_domains(),
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
        ensure!(
            given.out.is_none() || self.out.is_none(),
            "read options: found --out-rate over paced, which has a rate; expected one of them. Fix: leave out \
             --out-rate, or set `rate` of paced"
        );
        if self.has_domains() { self.check_out(given) } else { Ok(()) }
    }

    /// Refuses operations between domains whose floor would not be known.
    ///
    /// # Errors
    /// No rate is known between domains.
    pub(super) fn check_out(&self, given: GivenRates) -> Result<()> {
        ensure!(
            self.out.or(given.out).is_some(),
            "read options: found no rate between domains; expected one. Fix: give --out-rate in GB/s, or `rate` of \
             paced"
        );
        Ok(())
    }

    /// Refuses the link of a twin: there is none between most of its ranks.
    ///
    /// # Errors
    /// The config names a twin.
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
        [self.out.or(given.out).unwrap_or(0.0), given.inside.unwrap_or(measured)]
    }
}

/// The domains of so many ranks, of which a level inside has `inside`; 1 where nothing goes between domains.
pub(super) fn domains_of(ranks: u32, inside: Option<u32>, has_out: bool) -> u32 {
    match inside {
        Some(inside) if has_out => ranks / inside.max(1),
        // Each rank is a domain: rows go direct, and all of them between domains.
        None if has_out => ranks,
        _ => 1,
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
        assert_eq!((setup.twin, setup.out, setup.is_paced), (Some(2), Some(92.0), true));
        let stand_ins = setup.stand_ins(true);
        assert!(stand_ins.len() == 2 && stand_ins[1].contains("92 GB/s, 4 us"), "{stand_ins:?}");
        assert_eq!(setup.rates(GivenRates::default(), 340.0), [92.0, 340.0]);
        let given = GivenRates { inside: Some(365.0), out: Some(46.0) };
        assert_eq!(setup.rates(given, 340.0), [92.0, 365.0]);
        assert_eq!(Setup::default().rates(given, 340.0), [46.0, 365.0]);
        assert!(setup.is_idle(2) && !setup.is_idle(1) && setup.working(16) == 2);
        let plain = Setup::of(&config("[transport.scale_up]\nuse = \"nvlink\"\n")).unwrap();
        assert_eq!((plain.clone(), plain.working(4)), (Setup::default(), 4));
        let other =
            "[transport.scale_up]\nuse = \"nvlink\"\n[transport.scale_out]\nuse = \"device-put\"\n";
        let other = Setup::of(&config(other)).unwrap();
        assert!(other.stand_ins(true)[0].contains("say nothing"));
        assert!(other.stand_ins(false).is_empty(), "nothing goes over it");
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
        let domains = Setup { domains: 2, ..Setup::default() };
        let text = refused(&domains, inside, Calls::Waiting);
        assert!(text.contains("give --out-rate"), "{text}");
        let both = GivenRates { out: Some(46.0), ..inside };
        let text = refused(&twin, both, Calls::Waiting);
        assert!(text.contains("found --out-rate over paced"), "{text}");
        assert!(domains.check(both, &task(Calls::Graph)).is_ok());
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

    #[test]
    fn a_stand_in_in_a_list_is_refused_because_another_choice_may_run() {
        let list = "[transport.scale_up]\nuse = \"nvlink\"\n[transport.scale_out]\nuse = [\"gin\", \"paced\"]\n";
        let text = Setup::of(&config(list)).unwrap_err().to_string();
        assert!(text.contains("found the stand-in `paced` in a list of 2"), "{text}");
    }

    #[test]
    fn both_stand_ins_of_a_twin_have_the_same_gpus_and_domains_have_as_many_ranks() {
        let of = |text: &str| Setup::of(&config(text));
        let (lacking, other) =
            (TWIN_CONFIG.replace("twin = 2\n", ""), TWIN_CONFIG.replace("twin = 2", "twin = 4"));
        let nvlink = TWIN_CONFIG.replace("\"twin\"", "\"nvlink\"");
        for (text, found) in [
            (lacking, "2 GPUs of twin, and none of paced"),
            (other, "2 GPUs of twin, and 4 of paced"),
            (nvlink, "none GPUs of twin, and 2 of paced"),
        ] {
            let error = of(&text).unwrap_err().to_string();
            assert!(error.contains(found), "{error}");
        }
        let twin = of(TWIN_CONFIG).unwrap();
        assert!(twin.check_ranks(4).is_ok() && twin.check_ranks(144).is_ok());
        let text = twin.check_ranks(2).unwrap_err().to_string();
        assert!(text.contains("found 2 ranks in 2 domains; expected 2 to 72"), "{text}");
        assert!(twin.check_ranks(146).is_err() && Setup::default().check_ranks(73).is_err());
    }

    #[test]
    fn ranks_share_a_gpu_with_domains_and_a_given_rate_alone() {
        let of = |device: &str, domains: u32| {
            let kernels = format!("[kernels]\nuse = \"cuda\"\n[kernels.cuda]\n{device}\n");
            let rest =
                "[transport.scale_up]\nuse = \"nvlink\"\n[transport.scale_out]\nuse = \"gin\"\n";
            let text = format!("{kernels}{rest}[topology]\ndomains = {domains}\n");
            Setup::of(&Config::parse(&text, "a.toml").unwrap()).unwrap()
        };
        assert_eq!(of("", 2).gpus(4), 4);
        assert_eq!(
            ["device = 0", "device = [0, 1]", "device = [0, 1, 2, 3, 4]"].map(|d| of(d, 2).gpus(4)),
            [1, 2, 4]
        );
        let (none, inside) = (GivenRates::default(), GivenRates { inside: Some(365.0), out: None });
        let shared = of("device = [0, 1]", 2);
        assert!(shared.check_sharing(4, 2, inside).is_ok());
        assert!(shared.check_sharing(2, 2, none).is_ok());
        for (setup, given) in [(shared, none), (of("device = [0, 1]", 1), inside)] {
            let text = setup.check_sharing(4, 2, given).unwrap_err().to_string();
            assert!(text.contains("found fewer GPUs (2) than ranks (4)"), "{text}");
        }
    }

    #[test]
    fn each_rank_may_be_a_domain_and_one_level_inside_is_one_domain() {
        assert_eq!(domains_of(16, Some(8), true), 2);
        assert_eq!(domains_of(4, None, true), 4);
        assert_eq!(domains_of(4, Some(4), false), 1);
    }
}
