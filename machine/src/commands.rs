//! What only commands tell, as they printed it.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::tree::Tree;
use crate::{Fact, GpuFabric, NvLink, PciAddress};

/// Outputs of commands, in a recorded tree the files of its folder `tokenyard`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Outputs {
    /// `nvidia-smi -q`: file `nvidia-smi-q.txt`.
    pub nvidia_smi: Fact<String>,
    /// `nvidia-smi nvlink -s`: file `nvidia-smi-nvlink.txt`.
    pub nvlink: Fact<String>,
    /// `ibv_devinfo`: file `ibv_devinfo.txt`.
    pub ibv_devinfo: Fact<String>,
    /// `fi_info`: file `fi_info.txt`.
    pub fi_info: Fact<String>,
}

/// One thing that libfabric offers, as `fi_info` lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FabricDomain {
    /// Provider: `efa`, `verbs;ofi_rxm`, `tcp`.
    pub provider: String,
    /// Domain: `rdmap85s0-rdm`.
    pub domain: String,
    /// Version of the provider: `122.0`.
    pub version: Option<String>,
}

/// Most bytes that are kept of a command's output.
const MOST_BYTES: u64 = 1 << 20;

/// A GPU, as `nvidia-smi -q` tells it.
pub(crate) struct SmiGpu {
    pub(crate) pci: PciAddress,
    pub(crate) mig: Fact<bool>,
    pub(crate) fabric: Fact<GpuFabric>,
}

impl Outputs {
    /// The outputs that a recorded tree holds.
    pub fn recorded(tree: &Tree) -> Self {
        let file = |name: &str| match tree.text(&format!("tokenyard/{name}.exit")).known() {
            Some(word) if word.trim() == "late" => Fact::Late,
            Some(code) => code.trim().parse().map_or(Fact::Garbled, Fact::Failed),
            None => tree.text(&format!("tokenyard/{name}.txt")),
        };
        Self {
            nvidia_smi: file("nvidia-smi-q"),
            nvlink: file("nvidia-smi-nvlink"),
            ibv_devinfo: file("ibv_devinfo"),
            fi_info: file("fi_info"),
        }
    }
}

/// Runs the commands, all at once, and waits for them until `deadline` has passed. A command that
/// is not installed is missing, and one that is not done is killed and late. No command is waited for
/// longer than that, be it in a system call that no signal ends.
pub fn capture(deadline: Duration) -> Outputs {
    let end = Instant::now() + deadline;
    let runs = [
        &["nvidia-smi", "-q"][..],
        &["nvidia-smi", "nvlink", "-s"],
        &["ibv_devinfo"],
        &["fi_info"],
    ]
    .map(Run::start);
    let [nvidia_smi, nvlink, ibv_devinfo, fi_info] = runs.map(|run| run.output(end));
    Outputs { nvidia_smi, nvlink, ibv_devinfo, fi_info }
}

/// A command that runs, or why it does not; killed when dropped, and reaped once it has ended.
struct Run(Result<(Child, mpsc::Receiver<Vec<u8>>), Fact<String>>);

impl Run {
    fn start(words: &[&str]) -> Self {
        let start = || {
            let (program, rest) = words.split_first().ok_or(Fact::Missing)?;
            let mut child = Command::new(program)
                .args(rest)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .map_err(|error| match error.kind() {
                    ErrorKind::NotFound => Fact::Missing,
                    _ => Fact::Denied,
                })?;
            let stdout = child.stdout.take().ok_or(Fact::Missing)?;
            let (send, receive) = mpsc::channel();
            // Not joined: a process that the command left behind could hold the pipe open.
            thread::spawn(move || {
                let mut bytes = Vec::new();
                if stdout.take(MOST_BYTES).read_to_end(&mut bytes).is_ok() {
                    let _ = send.send(bytes);
                }
            });
            Ok((child, receive))
        };
        Self(start())
    }

    fn output(mut self, end: Instant) -> Fact<String> {
        let (child, receive) = match &mut self.0 {
            Ok(run) => run,
            Err(why) => return why.clone(),
        };
        let left = end.saturating_duration_since(Instant::now());
        let Ok(bytes) = receive.recv_timeout(left) else { return Fact::Late };
        // The pipe is closed, but the command may still be about to end.
        while Instant::now() < end {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => {
                    return Fact::Known(String::from_utf8_lossy(&bytes).into_owned());
                }
                Ok(Some(status)) => return Fact::Failed(code(status)),
                Ok(None) => thread::sleep(Duration::from_millis(1)),
                Err(_) => return Fact::Garbled,
            }
        }
        Fact::Late
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let Ok((mut child, _)) = std::mem::replace(&mut self.0, Err(Fact::Missing)) else { return };
        // Nothing to do for a command that ended by itself.
        let _ = child.kill();
        if !matches!(child.try_wait(), Ok(Some(_))) {
            // Not joined: in the driver of a GPU that hangs, a process outlives the signal.
            thread::spawn(move || child.wait());
        }
    }
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Sections `GPU 00000000:1B:00.0` of `nvidia-smi -q`.
pub(crate) fn smi(text: &str) -> Vec<SmiGpu> {
    let mut gpus: Vec<SmiGpu> = Vec::new();
    let mut section = "";
    for line in text.lines() {
        if let Some(address) = line.strip_prefix("GPU ") {
            section = "";
            if let Ok(pci) = address.trim().parse() {
                gpus.push(SmiGpu { pci, mig: Fact::Missing, fabric: Fact::Missing });
            }
            continue;
        }
        let Some(gpu) = gpus.last_mut() else { continue };
        let depth = line.len() - line.trim_start().len();
        match line.split_once(" : ") {
            None if depth == 4 => section = line.trim(),
            Some((key, value)) if depth == 8 => smi_line(gpu, section, (key.trim(), value.trim())),
            Some(_) if depth == 4 => section = "",
            _ => {}
        }
    }
    gpus
}

fn smi_line(gpu: &mut SmiGpu, section: &str, (key, value): (&str, &str)) {
    let told = || match value {
        "N/A" => Fact::Missing,
        _ => Fact::Known(value.to_owned()),
    };
    match (section, key) {
        ("MIG Mode", "Current") => gpu.mig = told().and_then(|mode| Some(mode == "Enabled")),
        ("Fabric", _) => {
            let mut fabric = gpu.fabric.clone().get().unwrap_or(GpuFabric {
                state: Fact::Missing,
                status: Fact::Missing,
                clique: Fact::Missing,
                cluster: Fact::Missing,
            });
            match key {
                "State" => fabric.state = told(),
                "Status" => fabric.status = told(),
                "CliqueId" => fabric.clique = told().and_then(|id| id.parse().ok()),
                "ClusterUUID" => fabric.cluster = told(),
                _ => {}
            }
            gpu.fabric = Fact::Known(fabric);
        }
        _ => {}
    }
}

/// `nvidia-smi nvlink -s`: a line `GPU 0: name (UUID: GPU-...)`, then `Link 0: 26.562 GB/s` or
/// `Link 0: <inactive>`.
pub(crate) fn nvlinks(text: &str) -> BTreeMap<String, Vec<NvLink>> {
    let mut all: BTreeMap<String, Vec<NvLink>> = BTreeMap::new();
    let mut uuid = None;
    for line in text.lines() {
        if line.starts_with("GPU ") {
            uuid = line
                .split_once("(UUID: ")
                .map(|(_, rest)| rest.trim_end().trim_end_matches(')').to_owned());
            if let Some(uuid) = &uuid {
                all.entry(uuid.clone()).or_default();
            }
        } else if let Some(link) = line.trim().strip_prefix("Link ").and_then(nvlink)
            && let Some(links) = uuid.as_ref().and_then(|uuid| all.get_mut(uuid))
        {
            links.push(link);
        }
    }
    all
}

fn nvlink(text: &str) -> Option<NvLink> {
    let (link, rate) = text.split_once(':')?;
    let rate = rate.trim().strip_suffix(" GB/s").and_then(|rate| rate.parse::<f64>().ok());
    let megabytes =
        rate.filter(|rate| (0.0..1e6).contains(rate)).map(|r| (r * 1000.0).round() as u64);
    Some(NvLink { link: link.trim().parse().ok()?, megabytes })
}

/// Active message units of `ibv_devinfo` by device and port.
pub(crate) fn active_mtus(text: &str) -> BTreeMap<(String, u32), u32> {
    let mut mtus = BTreeMap::new();
    let (mut device, mut port) = (String::new(), 0);
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.split_whitespace().next().unwrap_or_default();
        match key.trim() {
            "hca_id" => device = value.to_owned(),
            "port" => port = value.parse().unwrap_or(0),
            "active_mtu" => {
                if let Ok(mtu) = value.parse() {
                    mtus.insert((device.clone(), port), mtu);
                }
            }
            _ => {}
        }
    }
    mtus
}

/// What `fi_info` lists, without repetitions.
pub(crate) fn fabrics(text: &str) -> Vec<FabricDomain> {
    let mut all: Vec<FabricDomain> = Vec::new();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.trim().to_owned();
        match (key.trim(), all.last_mut()) {
            ("provider", _) => {
                all.push(FabricDomain { provider: value, domain: String::new(), version: None });
            }
            ("domain", Some(last)) => last.domain = value,
            ("version", Some(last)) => last.version = Some(value),
            _ => {}
        }
    }
    all.sort_by(|a, b| (&a.provider, &a.domain).cmp(&(&b.provider, &b.domain)));
    all.dedup();
    all
}

#[cfg(test)]
#[path = "commands_tests.rs"]
mod tests;
