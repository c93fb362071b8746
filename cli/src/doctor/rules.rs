//! Judges a node. Pure: the same facts give the same findings.

use anyhow::Result;
use serde::Serialize;
use tokenyard_core::abi;
use tokenyard_core::config::Config;
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES};
use tokenyard_cpu::kernels::{CpuConfig, Spread, WindowSizes};

use super::facts::{Facts, Meeting, Port, SecretFact};
use crate::output::bytes;
use crate::parts::Parts;

/// The launcher needs pidfd_open.
const OLDEST_KERNEL: (u32, u32) = (5, 3);
/// Windows of the cpu kernel set.
const WINDOWS: u64 = 2;
/// Descriptors that a process has open for itself.
const OWN_FILES: u64 = 32;
/// Clocks whose reading is a system call or a slow device.
const SLOW_CLOCKS: [&str; 3] = ["hpet", "acpi_pm", "jiffies"];

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    Ok = 0,
    Warn = 1,
    Broken = 2,
}

impl Verdict {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Broken => "broken",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) what: String,
    pub(crate) verdict: Verdict,
    pub(crate) found: String,
    pub(crate) wanted: String,
    pub(crate) fix: Option<String>,
}

impl Finding {
    /// `fix` is kept only where something is wrong.
    fn new(what: &str, verdict: Verdict, found: String, wanted: String, fix: &str) -> Self {
        let fix = (verdict != Verdict::Ok).then(|| fix.to_owned());
        Self { what: what.to_owned(), verdict, found, wanted, fix }
    }
}

/// What is to run on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) ranks: u64,
    pub(crate) threads: u64,
    /// Windows of one rank, if all of them is touched.
    pub(crate) window_bytes: u64,
    /// Whether a chosen transport is a plugin, which may use /dev/shm.
    pub(crate) plugin_transport: bool,
}

impl Wanted {
    pub(crate) fn new(
        shape: &Shape,
        domains: u32,
        kernels: &CpuConfig,
        plugin_transport: bool,
    ) -> Result<Self> {
        let limits = Capabilities {
            largest_put: u64::MAX,
            flags: abi::TY_CAP_LOAD_STORE,
            ..NO_CAPABILITIES
        };
        let sizes =
            WindowSizes::new(shape, Spread { in_flight: 2, domains }, [&limits; 2], kernels)?;
        Ok(Self {
            ranks: shape.ranks.into(),
            threads: kernels.threads.into(),
            window_bytes: sizes.control_bytes + sizes.arena_bytes,
            plugin_transport,
        })
    }

    /// Peers' windows and signals on their way, and the bootstrap's connections at rank 0.
    fn open_files(&self) -> u64 {
        self.ranks * (WINDOWS + 2) + OWN_FILES
    }
}

/// Judges the parts and the plugin files.
pub(crate) fn parts(parts: &Parts, config: Option<&Config>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = parts
        .parts
        .iter()
        .map(|part| {
            let (verdict, found) = match &part.why_not {
                None => (Verdict::Ok, "it works here".to_owned()),
                // Nothing is lost where the config chooses something else.
                Some(why) if part.chosen => (Verdict::Broken, why.clone()),
                Some(why) => (Verdict::Warn, why.clone()),
            };
            let what = format!("{} {}", part.kind, part.name);
            let wanted = if part.chosen { "chosen" } else { "not chosen" };
            let fix = "mend what the part names, or choose another part in the config";
            Finding::new(&what, verdict, found, wanted.to_owned(), fix)
        })
        .collect();
    for (kind, name) in config.map(|config| parts.missing(config)).unwrap_or_default() {
        findings.push(Finding::new(
            &format!("{kind} {name}"),
            Verdict::Broken,
            "no part of this name".to_owned(),
            "chosen".to_owned(),
            "correct `use`, or add the plugin that provides it to [plugins] paths",
        ));
    }
    findings.extend(parts.broken.iter().map(|file| {
        let path = file.path.as_ref().map_or(String::new(), |path| path.display().to_string());
        let fix = "remove it from [plugins] paths, or build it again for this version";
        let wanted = "a plugin".to_owned();
        Finding::new(&format!("plugin {path}"), Verdict::Broken, file.error.clone(), wanted, fix)
    }));
    findings
}

/// Judges the node.
pub(crate) fn node(facts: &Facts, wanted: &Wanted) -> Vec<Finding> {
    vec![
        kernel(facts),
        tried(
            "shared memory (memfd)",
            &facts.memfd_error,
            "allow memfd_create and sealing in the container's seccomp profile",
        ),
        tried(
            "abstract Unix sockets",
            &facts.socket_error,
            "allow Unix sockets in the container's profile (Docker's and Podman's defaults do)",
        ),
        open_files(facts, wanted),
        processors(facts, wanted),
        memory(facts, wanted),
        locked_memory(facts),
        posix_shm(facts, wanted),
        clock(facts),
        rendezvous(facts),
        secret(facts),
    ]
}

fn kernel(facts: &Facts) -> Finding {
    let (major, minor) = OLDEST_KERNEL;
    let (verdict, found) = match facts.kernel {
        None => (Verdict::Warn, "an unknown release".to_owned()),
        Some(found) if found < OLDEST_KERNEL => {
            (Verdict::Broken, format!("Linux {}.{}", found.0, found.1))
        }
        Some(found) => (Verdict::Ok, format!("Linux {}.{}", found.0, found.1)),
    };
    let wanted = format!("Linux {major}.{minor} or later");
    Finding::new("kernel", verdict, found, wanted, "run on a newer kernel")
}

fn tried(what: &str, error: &Option<String>, fix: &str) -> Finding {
    let (verdict, found) = match error {
        None => (Verdict::Ok, "tried, it works".to_owned()),
        Some(error) => (Verdict::Broken, error.clone()),
    };
    Finding::new(what, verdict, found, "needed by shm".to_owned(), fix)
}

fn open_files(facts: &Facts, wanted: &Wanted) -> Finding {
    let need = wanted.open_files();
    let (verdict, found) = match facts.open_files {
        None => (Verdict::Ok, "no limit".to_owned()),
        Some(limit) if limit < need => (Verdict::Broken, format!("at most {limit}")),
        Some(limit) => (Verdict::Ok, format!("at most {limit}")),
    };
    let wanted = format!("{need} for {} ranks", wanted.ranks);
    Finding::new("open files", verdict, found, wanted, &format!("ulimit -n {}", need.max(1024)))
}

fn processors(facts: &Facts, wanted: &Wanted) -> Finding {
    let quota = facts.processor_quota.unwrap_or(f64::INFINITY);
    let usable = (facts.processors as f64).min(quota);
    let need = wanted.ranks * wanted.threads;
    let verdict = if (need as f64) > usable { Verdict::Warn } else { Verdict::Ok };
    let found = match facts.processor_quota {
        Some(quota) => format!("{} processors, {quota:.1} allowed", facts.processors),
        None => format!("{} processors", facts.processors),
    };
    let wanted = format!("{} ranks * {} threads", wanted.ranks, wanted.threads);
    let fix = "ranks take turns on a processor, so times say little: run fewer ranks or threads";
    Finding::new("processors", verdict, found, wanted, fix)
}

fn memory(facts: &Facts, wanted: &Wanted) -> Finding {
    let need = wanted.window_bytes.saturating_mul(wanted.ranks);
    let available = [facts.memory_available, facts.container_available].into_iter().flatten().min();
    let found = match (available, facts.container_available) {
        (None, _) => "unknown".to_owned(),
        (Some(free), Some(container)) if container == free => {
            format!("{} left to the container", bytes(free))
        }
        (Some(free), _) => format!("{} available", bytes(free)),
    };
    // Windows take memory only where they are touched, so this is no sentence.
    let enough = available.is_none_or(|free| need <= free);
    let verdict = if enough { Verdict::Ok } else { Verdict::Warn };
    let wanted = format!("{} in the worst case", bytes(need));
    let fix = "choose a smaller max_tokens, or set [kernels.cpu] arena_mib: a process that touches \
               memory that is not there is killed";
    Finding::new("memory", verdict, found, wanted, fix)
}

fn locked_memory(facts: &Facts) -> Finding {
    let found = facts.locked_memory.map_or("no limit".to_owned(), bytes);
    let wanted = "not needed by shm".to_owned();
    Finding::new("locked memory", Verdict::Ok, found, wanted, "")
}

fn posix_shm(facts: &Facts, wanted: &Wanted) -> Finding {
    let need = wanted.window_bytes.saturating_mul(wanted.ranks);
    let found = facts.posix_shm_free.map_or("none".to_owned(), |free| bytes(free) + " free");
    let enough = facts.posix_shm_free.is_some_and(|free| free >= need);
    let verdict = if wanted.plugin_transport && !enough { Verdict::Warn } else { Verdict::Ok };
    let text = match wanted.plugin_transport {
        true => format!("{} in the worst case, if the plugin uses it", bytes(need)),
        false => "not needed by shm".to_owned(),
    };
    let fix = "give the container more of it (docker run --shm-size), or mount a larger tmpfs";
    Finding::new("/dev/shm", verdict, found, text, fix)
}

fn clock(facts: &Facts) -> Finding {
    let found = facts.clock_source.clone().unwrap_or_else(|| "unknown".to_owned());
    let slow = SLOW_CLOCKS.contains(&found.as_str());
    let verdict = if slow { Verdict::Warn } else { Verdict::Ok };
    let fix = "waits read the clock often; boot with clocksource=tsc where the machine allows it";
    Finding::new("clock source", verdict, found, "one that is read fast".to_owned(), fix)
}

fn rendezvous(facts: &Facts) -> Finding {
    let (verdict, found, fix) = match &facts.meeting {
        Meeting::NoLauncher => {
            (Verdict::Ok, "no launcher's variables here".to_owned(), String::new())
        }
        Meeting::Wrong(error) => (
            Verdict::Broken,
            error.clone(),
            "correct [world] bootstrap or the variables".to_owned(),
        ),
        Meeting::File { path, folder_error: None } => (Verdict::Ok, path.clone(), String::new()),
        Meeting::File { path, folder_error: Some(error) } => {
            (Verdict::Broken, format!("{path}: {error}"), "make the folder on all nodes".to_owned())
        }
        Meeting::Tcp { address, port: Port::Free, .. } => {
            (Verdict::Ok, format!("{address}, free"), String::new())
        }
        Meeting::Tcp { address, port: Port::Elsewhere, .. } => {
            (Verdict::Ok, format!("{address}, on another node"), String::new())
        }
        Meeting::Tcp { address, port: Port::Refused(error), .. } => (
            Verdict::Broken,
            format!("{address}: {error}"),
            "choose another port (TOKENYARD_PORT under torchrun), or end what holds it".to_owned(),
        ),
    };
    let wanted = "a place to meet; `tokenyard run` makes its own".to_owned();
    Finding::new("rendezvous", verdict, found, wanted, &fix)
}

fn secret(facts: &Facts) -> Finding {
    let off_loopback = matches!(facts.meeting, Meeting::Tcp { loopback: false, .. });
    let (verdict, found) = match &facts.secret {
        SecretFact::Set => (Verdict::Ok, "set".to_owned()),
        SecretFact::None if off_loopback => (Verdict::Broken, "none".to_owned()),
        SecretFact::None => (Verdict::Ok, "none".to_owned()),
        SecretFact::Unusable(error) => (Verdict::Broken, error.clone()),
    };
    let wanted = match off_loopback {
        true => "one, because ranks meet off the loopback interface",
        false => "none on one host; `tokenyard run` makes one",
    };
    let fix = "set TOKENYARD_SECRET to the same random text on all ranks (openssl rand -hex 32), or \
               TOKENYARD_SECRET_FILE to a file of mode 0600";
    Finding::new("job secret", verdict, found, wanted.to_owned(), fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Wanted =
        Wanted { ranks: 4, threads: 1, window_bytes: 1 << 20, plugin_transport: false };

    fn good() -> Facts {
        Facts {
            kernel: Some((6, 1)),
            processors: 8,
            processor_quota: None,
            memory_available: Some(1 << 30),
            container_available: None,
            open_files: Some(1024),
            locked_memory: Some(64 << 10),
            posix_shm_free: Some(1 << 20),
            memfd_error: None,
            socket_error: None,
            clock_source: Some("tsc".to_owned()),
            meeting: Meeting::NoLauncher,
            secret: SecretFact::None,
        }
    }

    /// The finding called `what`, after the facts were changed.
    fn find(what: &str, change: impl FnOnce(&mut Facts)) -> Finding {
        let mut facts = good();
        change(&mut facts);
        let found = node(&facts, &WANTED).into_iter().find(|f| f.what.starts_with(what));
        found.unwrap_or_else(|| panic!("no finding {what}"))
    }

    fn tcp(loopback: bool, port: Port) -> Meeting {
        Meeting::Tcp { address: "node-1:29501".to_owned(), loopback, port }
    }

    #[test]
    fn a_good_node_has_nothing_to_fix() {
        for finding in node(&good(), &WANTED) {
            assert_eq!((finding.verdict, &finding.fix), (Verdict::Ok, &None), "{finding:?}");
        }
    }

    #[test]
    fn what_shm_rests_on_is_broken_with_the_system_s_own_words() {
        for (what, finding) in [
            ("memfd", find("shared memory", |f| f.memfd_error = Some("not permitted".to_owned()))),
            ("sockets", find("abstract", |f| f.socket_error = Some("not permitted".to_owned()))),
        ] {
            assert_eq!(finding.verdict, Verdict::Broken, "{what}");
            assert_eq!(finding.found, "not permitted");
            assert!(finding.fix.unwrap().contains("profile"));
        }
        assert_eq!(find("kernel", |f| f.kernel = Some((4, 19))).verdict, Verdict::Broken);
        assert_eq!(find("kernel", |f| f.kernel = None).verdict, Verdict::Warn);
    }

    #[test]
    fn a_limit_on_open_files_is_compared_with_the_ranks() {
        let finding = find("open files", |f| f.open_files = Some(47));
        assert_eq!(finding.verdict, Verdict::Broken);
        assert_eq!(finding.wanted, "48 for 4 ranks");
        assert_eq!(find("open files", |f| f.open_files = Some(48)).verdict, Verdict::Ok);
        assert_eq!(find("open files", |f| f.open_files = None).verdict, Verdict::Ok);
    }

    #[test]
    fn too_few_processors_and_a_small_quota_are_warnings() {
        assert_eq!(find("processors", |f| f.processors = 4).verdict, Verdict::Ok);
        assert_eq!(find("processors", |f| f.processors = 3).verdict, Verdict::Warn);
        let finding = find("processors", |f| f.processor_quota = Some(1.5));
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(finding.found, "8 processors, 1.5 allowed");
    }

    #[test]
    fn the_container_s_memory_counts_where_it_is_less() {
        let finding = find("memory", |f| f.container_available = Some(3 << 20));
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(finding.found, "3.0 MiB left to the container");
        assert_eq!(finding.wanted, "4.0 MiB in the worst case");
        assert_eq!(find("memory", |f| f.memory_available = None).verdict, Verdict::Ok);
    }

    #[test]
    fn dev_shm_matters_to_plugins_only() {
        let full = |f: &mut Facts| f.posix_shm_free = Some(0);
        assert_eq!(find("/dev/shm", full).verdict, Verdict::Ok);
        let mut facts = good();
        full(&mut facts);
        let wanted = Wanted { plugin_transport: true, ..WANTED };
        assert_eq!(posix_shm(&facts, &wanted).verdict, Verdict::Warn);
    }

    #[test]
    fn a_port_that_is_held_is_broken_and_another_node_s_is_not_ours_to_judge() {
        let held = tcp(true, Port::Refused("address in use".to_owned()));
        let finding = find("rendezvous", |f| f.meeting = held);
        assert_eq!(finding.verdict, Verdict::Broken);
        assert!(finding.fix.unwrap().contains("TOKENYARD_PORT"));
        let elsewhere = find("rendezvous", |f| f.meeting = tcp(false, Port::Elsewhere));
        assert_eq!(elsewhere.verdict, Verdict::Ok);
    }

    #[test]
    fn a_secret_is_needed_off_the_loopback_interface() {
        let off = find("job secret", |f| f.meeting = tcp(false, Port::Free));
        assert_eq!(off.verdict, Verdict::Broken);
        assert!(off.fix.unwrap().contains("TOKENYARD_SECRET"));
        assert_eq!(find("job secret", |f| f.meeting = tcp(true, Port::Free)).verdict, Verdict::Ok);
        let set = find("job secret", |f| {
            f.meeting = tcp(false, Port::Free);
            f.secret = SecretFact::Set;
        });
        assert_eq!(set.verdict, Verdict::Ok);
        let bad = find("job secret", |f| f.secret = SecretFact::Unusable("mode 0644".to_owned()));
        assert_eq!(bad.verdict, Verdict::Broken);
    }

    #[test]
    fn a_slow_clock_is_a_warning() {
        assert_eq!(find("clock", |f| f.clock_source = Some("hpet".into())).verdict, Verdict::Warn);
        assert_eq!(
            find("clock", |f| f.clock_source = Some("kvm-clock".into())).verdict,
            Verdict::Ok
        );
    }
}
