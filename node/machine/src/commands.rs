//! Facts that only commands report, as they printed them.

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

/// The output of a command, or the reason why there is none.
pub type Answer = Result<String, Silence>;

/// Outputs of commands, in a recorded tree the files of its folder `tokenyard`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outputs {
    /// `nvidia-smi -q`: file `nvidia-smi-q.txt`.
    pub nvidia_smi: Answer,
    /// `nvidia-smi nvlink -s`: file `nvidia-smi-nvlink.txt`.
    pub nvlink: Answer,
    /// `ibv_devinfo`: file `ibv_devinfo.txt`.
    pub ibv_devinfo: Answer,
    /// `fi_info`: file `fi_info.txt`.
    pub fi_info: Answer,
}

/// The reason why a command gave no output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum Silence {
    /// The node is read below a root, where no command is run, and no output is recorded there.
    NotRun,
    /// It is in no folder of `PATH`, nor in the other folders where its packages install it.
    NotFound {
        /// The folders that were searched besides `PATH`.
        besides: Vec<String>,
    },
    /// It is there, and the system refuses to run it.
    Refused {
        /// The system's error.
        error: String,
    },
    /// It did not answer within its deadline.
    Late {
        /// The deadline.
        milliseconds: u64,
    },
    /// It failed, or ended with 0 and printed nothing.
    Failed {
        /// Exit code; a signal counts as 128 and its number, as in a shell.
        code: i32,
        /// Last line of its standard error, else the first of its output; may be empty.
        #[serde(rename = "said")]
        last_line: String,
    },
}

/// One entry of the list that `fi_info` prints: a domain of a provider of libfabric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FabricDomain {
    /// Provider: `efa`, `verbs;ofi_rxm`, `tcp`.
    pub provider: String,
    /// Domain: `rdmap85s0-rdm`.
    pub domain: String,
    /// Version of the provider: `122.0`.
    pub version: Option<String>,
}

/// Most bytes of a command's output that are stored.
const MOST_BYTES: u64 = 1 << 20;
/// Bytes of the end of its standard error that are stored.
const LAST_BYTES: usize = 4096;
/// Most characters of a line of a command's output.
const MOST_SHOWN: usize = 200;

/// A command that is run.
struct Tool {
    /// File of a recorded tree, without its ending.
    file: &'static str,
    words: &'static [&'static str],
    /// Folders outside `PATH` that its packages use: the `PATH` of a service, or of a shell without
    /// the installer's profile, lacks them.
    besides: &'static [&'static str],
    /// An exit code that is only a warning: the output is complete.
    warning: Option<i32>,
}

/// The folders where the driver's installer puts it, and where Google's device plugin puts it in a
/// container.
const NVIDIA: &[&str] = &["/usr/bin", "/usr/local/nvidia/bin"];
/// nvidia-smi(1): the InfoROM of a board is corrupted, which does not affect access to memory.
const INFOROM: Option<i32> = Some(14);
const NVIDIA_SMI: Tool =
    Tool { file: "nvidia-smi-q", words: &["nvidia-smi", "-q"], besides: NVIDIA, warning: INFOROM };
const NVLINK: Tool = Tool {
    file: "nvidia-smi-nvlink",
    words: &["nvidia-smi", "nvlink", "-s"],
    besides: NVIDIA,
    warning: INFOROM,
};
const TOPOLOGY: Tool = Tool {
    file: "nvidia-smi-topo",
    words: &["nvidia-smi", "topo", "-m"],
    besides: NVIDIA,
    warning: INFOROM,
};
const CLOCKS: Tool = Tool {
    file: "nvidia-smi-clocks",
    words: &[
        "nvidia-smi",
        "--query-gpu=name,clocks.sm,clocks.max.sm,clocks.mem,power.limit",
        "--format=csv,noheader",
    ],
    besides: NVIDIA,
    warning: INFOROM,
};
const IBV_DEVINFO: Tool = Tool {
    file: "ibv_devinfo",
    words: &["ibv_devinfo"],
    besides: &["/usr/bin", "/usr/sbin"],
    warning: None,
};
/// AWS' EFA installer installs its own libfabric.
const FI_INFO: Tool = Tool {
    file: "fi_info",
    words: &["fi_info"],
    besides: &["/opt/amazon/efa/bin", "/usr/bin"],
    warning: None,
};

/// A GPU, as `nvidia-smi -q` reports it.
pub(crate) struct SmiGpu {
    pub(crate) pci: PciAddress,
    pub(crate) mig: Fact<bool>,
    pub(crate) fabric: Fact<GpuFabric>,
}

impl Outputs {
    /// The outputs that a recorded tree holds.
    pub fn recorded(tree: &Tree) -> Self {
        Self::each(|tool| recorded(tree, tool))
    }

    fn each(ask: impl Fn(&Tool) -> Answer) -> Self {
        Self {
            nvidia_smi: ask(&NVIDIA_SMI),
            nvlink: ask(&NVLINK),
            ibv_devinfo: ask(&IBV_DEVINFO),
            fi_info: ask(&FI_INFO),
        }
    }

    /// The commands without output, as people write them, and the reason of each.
    pub(crate) fn silent(&self) -> BTreeMap<String, Silence> {
        let all = [
            (&NVIDIA_SMI, &self.nvidia_smi),
            (&NVLINK, &self.nvlink),
            (&IBV_DEVINFO, &self.ibv_devinfo),
            (&FI_INFO, &self.fi_info),
        ];
        let silence = |(tool, answer): (&Tool, &Answer)| {
            Some((tool.words.join(" "), answer.as_ref().err()?.clone()))
        };
        all.into_iter().filter_map(silence).collect()
    }
}

impl Default for Outputs {
    fn default() -> Self {
        Self::each(|_| Err(Silence::NotRun))
    }
}

impl Silence {
    /// The reason in words for people, for the command of this name.
    pub fn in_words(&self, command: &str) -> String {
        match self {
            Self::NotRun => format!("{command} was not run, and its output is not recorded"),
            Self::NotFound { besides } => {
                format!("{command} is not installed: not in PATH, nor in {}", besides.join(", "))
            }
            Self::Refused { error } => format!("{command} cannot be run: {error}"),
            Self::Late { milliseconds } => {
                format!("{command} did not answer in {milliseconds} ms")
            }
            Self::Failed { code: 0, last_line } if last_line.is_empty() => {
                format!("{command} ended with exit code 0 and printed nothing")
            }
            Self::Failed { code, last_line } if last_line.is_empty() => {
                format!("{command} failed with exit code {code} and printed nothing")
            }
            Self::Failed { code, last_line } => {
                format!("{command} failed with exit code {code}: {last_line}")
            }
        }
    }

    /// From the file of a recorded tree: an exit code and the last line of output, `late` and
    /// milliseconds, or `missing`.
    fn recorded(text: &str, besides: &[&str]) -> Option<Self> {
        let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
        Some(match word {
            "missing" => {
                Self::NotFound { besides: besides.iter().map(|f| (*f).to_owned()).collect() }
            }
            "late" => Self::Late { milliseconds: rest.parse().ok()? },
            code => Self::Failed { code: code.parse().ok()?, last_line: rest.to_owned() },
        })
    }
}

fn recorded(tree: &Tree, tool: &Tool) -> Answer {
    let exit = tree.text(&format!("tokenyard/{}.exit", tool.file));
    match exit.known().and_then(|text| Silence::recorded(text, tool.besides)) {
        Some(silence) => Err(silence),
        None => tree.text(&format!("tokenyard/{}.txt", tool.file)).get().ok_or(Silence::NotRun),
    }
}

/// Runs the commands, all at once, and waits for them until `patience` has passed. A command that
/// still runs then is killed. No wait is longer than that, even if a command is in a system call
/// that no signal ends.
pub fn capture(patience: Duration) -> Outputs {
    let deadline = Deadline { start: Instant::now(), patience };
    let runs = [&NVIDIA_SMI, &NVLINK, &IBV_DEVINFO, &FI_INFO].map(Run::start);
    let [nvidia_smi, nvlink, ibv_devinfo, fi_info] = runs.map(|run| run?.output(&deadline));
    Outputs { nvidia_smi, nvlink, ibv_devinfo, fi_info }
}

/// Runs `nvidia-smi topo -m`, which asks the driver about each pair of GPUs: it takes longer than the others, so
/// it is run only where its matrix is wanted.
pub fn capture_topology(patience: Duration) -> Answer {
    capture_one(&TOPOLOGY, patience)
}

/// Asks `nvidia-smi` for a line of each GPU: its name, clocks of its multiprocessors, the highest that they may have,
/// the clock of its memory, and its power limit.
pub fn capture_clocks(patience: Duration) -> Answer {
    capture_one(&CLOCKS, patience)
}

fn capture_one(tool: &Tool, patience: Duration) -> Answer {
    let deadline = Deadline { start: Instant::now(), patience };
    Run::start(tool)?.output(&deadline)
}

/// The output of `nvidia-smi topo -m` on a recorded node: file `nvidia-smi-topo.txt`.
pub fn recorded_topology(tree: &Tree) -> Answer {
    recorded(tree, &TOPOLOGY)
}

/// The end of the wait for all commands together.
struct Deadline {
    start: Instant,
    patience: Duration,
}

impl Deadline {
    fn left(&self) -> Duration {
        self.patience.saturating_sub(self.start.elapsed())
    }

    fn late(&self) -> Silence {
        Silence::Late { milliseconds: u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX) }
    }
}

/// A command that runs; killed when dropped, and reaped once it has ended.
struct Run {
    child: Option<Child>,
    warning: Option<i32>,
    stdout: mpsc::Receiver<Vec<u8>>,
    stderr: mpsc::Receiver<Vec<u8>>,
}

impl Run {
    fn start(tool: &Tool) -> Result<Self, Silence> {
        let mut child = spawn(tool)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        Ok(Self {
            child: Some(child),
            warning: tool.warning,
            stdout: in_thread(stdout, |pipe, bytes| pipe.take(MOST_BYTES).read_to_end(bytes)),
            stderr: in_thread(stderr, read_last),
        })
    }

    fn output(mut self, deadline: &Deadline) -> Answer {
        let child = self.child.as_mut().ok_or_else(|| deadline.late())?;
        let bytes = self.stdout.recv_timeout(deadline.left()).map_err(|_| deadline.late())?;
        // The pipe is closed, but the command may still be about to end.
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if deadline.left().is_zero() => return Err(deadline.late()),
                Ok(None) => thread::sleep(Duration::from_millis(1)),
                Err(error) => return Err(Silence::Refused { error: error.to_string() }),
            }
        };
        let text = String::from_utf8_lossy(&bytes).into_owned();
        // A command that succeeds without output was ended from outside, or is another command of
        // that name.
        let is_silent = text.trim().is_empty();
        if !is_silent && status.success()
            || (self.warning.is_some() && status.code() == self.warning)
        {
            return Ok(text);
        }
        let errors = self.stderr.recv_timeout(deadline.left()).unwrap_or_default();
        let last_line = last_line(&String::from_utf8_lossy(&errors), &text);
        Err(Silence::Failed { code: code(status), last_line })
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // Nothing to do for a command that ended by itself.
        let _ = child.kill();
        if !matches!(child.try_wait(), Ok(Some(_))) {
            // Not joined: in the driver of a GPU that hangs, a process outlives the signal.
            thread::spawn(move || child.wait());
        }
    }
}

/// Starts a command from `PATH`, else from the folders where its packages install it.
fn spawn(tool: &Tool) -> Result<Child, Silence> {
    let (program, rest) = tool.words.split_first().unwrap_or((&"", &[]));
    let besides = tool.besides.iter().map(|folder| format!("{folder}/{program}"));
    let mut refused = None;
    for path in std::iter::once((*program).to_owned()).chain(besides) {
        let mut command = Command::new(path);
        // A tool must not see the secret of a job.
        command.env_remove("TOKENYARD_SECRET");
        command.args(rest).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        match command.spawn() {
            Ok(child) => return Ok(child),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => refused = Some(Silence::Refused { error: error.to_string() }),
        }
    }
    let besides = || tool.besides.iter().map(|folder| (*folder).to_owned()).collect();
    Err(refused.unwrap_or_else(|| Silence::NotFound { besides: besides() }))
}

/// The bytes of a pipe, read until it is closed.
fn in_thread<P: Read + Send + 'static>(
    pipe: Option<P>,
    read: impl FnOnce(P, &mut Vec<u8>) -> std::io::Result<usize> + Send + 'static,
) -> mpsc::Receiver<Vec<u8>> {
    let (send, receive) = mpsc::channel();
    // Not joined: a process that the command left behind could hold the pipe open.
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if pipe.is_some_and(|pipe| read(pipe, &mut bytes).is_ok()) {
            let _ = send.send(bytes);
        }
    });
    receive
}

/// Reads everything, so that the command does not block, and stores the end.
fn read_last(mut pipe: impl Read, last: &mut Vec<u8>) -> std::io::Result<usize> {
    let mut part = [0; LAST_BYTES];
    loop {
        match pipe.read(&mut part)? {
            0 => return Ok(last.len()),
            count => last.extend_from_slice(&part[..count]),
        }
        last.drain(..last.len().saturating_sub(LAST_BYTES));
    }
}

/// The last line of a command's standard error. nvidia-smi writes the reason of a failure to its
/// output instead, as the first line.
fn last_line(errors: &str, output: &str) -> String {
    let has_text = |line: &&str| !line.trim().is_empty();
    let line = errors.lines().rfind(has_text).or(output.lines().find(has_text)).unwrap_or_default();
    line.trim().chars().filter(|c| !c.is_control()).take(MOST_SHOWN).collect()
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// The answer, parsed by `parse`. [`crate::Machine::silent`] has the reason where there is no
/// answer.
pub(crate) fn parsed<T>(answer: &Answer, parse: impl FnOnce(&str) -> T) -> Fact<T> {
    answer.as_deref().map_or(Fact::Missing, |text| Fact::Known(parse(text)))
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
            Some((key, value)) if depth == 8 => smi_line(gpu, section, key.trim(), value.trim()),
            Some(_) if depth == 4 => section = "",
            _ => {}
        }
    }
    gpus
}

fn smi_line(gpu: &mut SmiGpu, section: &str, key: &str, value: &str) {
    let known = || match value {
        "N/A" => Fact::Missing,
        _ => Fact::Known(value.to_owned()),
    };
    match (section, key) {
        ("MIG Mode", "Current") => gpu.mig = known().and_then(|mode| Some(mode == "Enabled")),
        ("Fabric", _) => {
            let mut fabric = gpu.fabric.clone().get().unwrap_or(GpuFabric {
                state: Fact::Missing,
                status: Fact::Missing,
                clique: Fact::Missing,
                cluster: Fact::Missing,
            });
            match key {
                "State" => fabric.state = known(),
                "Status" => fabric.status = known(),
                "CliqueId" => fabric.clique = known().and_then(|id| id.parse().ok()),
                "ClusterUUID" => fabric.cluster = known(),
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

/// The entries that `fi_info` lists, without repetitions.
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
