//! Masked losses, with ranks as processes: the others finish, go on without the lost rank, and let it in
//! again. This program is also the ranks.

#![allow(clippy::expect_used, reason = "a test may end where its own setup is wrong")]

mod components;
mod domains;
mod hosts;
mod losing;
mod mortal;
mod opening;
mod order;
mod rank;
mod refused;
mod two_minds;
mod verbs;

use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::order::{LAYOUT_COUNT, LAYOUTS, Order, Path, Phase, Worst};

/// The argument before the order of a rank.
pub(crate) const RANK: &str = "--as-rank";
/// The longest that one test may take on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_faulty::link();
    let args: Vec<_> = std::env::args().collect();
    let [_, mode, order] = &args[..] else { return launch() };
    if mode != RANK {
        return launch();
    }
    let mut order: Order = serde_json::from_str(order).expect("an order");
    if let Some(rank) = std::env::var("TOKENYARD_RANK").ok().and_then(|rank| rank.parse().ok()) {
        order.rank = rank;
    }
    losing::ORDER.get_or_init(|| order.clone());
    let play = match order.phase {
        Phase::Refusing => two_minds::play,
        _ if !order.lives.is_empty() => opening::play,
        _ => rank::play,
    };
    match play(&order) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn launch() -> ExitCode {
    let over_verbs = std::env::args().any(|arg| arg == verbs::ARGUMENT);
    let words = std::env::args().filter(|arg| arg != verbs::ARGUMENT);
    let mut arguments = Arguments::from_iter(words);
    if over_verbs {
        // The tests run one after the other: they share links, and the machine is slow.
        arguments.test_threads = Some(1);
        return libtest_mimic::run(&arguments, verbs::trials()).exit_code();
    }
    // Each test has three ranks, which mostly wait.
    arguments.test_threads = arguments.test_threads.or(Some(8));
    let killed = Phase::ALL.into_iter().chain([100, 600, 1700].map(Phase::Anytime));
    let stopped = Phase::ALL.into_iter().chain([Phase::Anytime(600)]);
    let mut trials = Vec::new();
    // A default run has each pair of a phase, a path and a layout.
    let whole = std::env::var_os("TOKENYARD_TEST_ALL").is_some();
    for (number, phase) in (0u8..).zip(killed) {
        for (path_number, path) in (0u8..).zip(Path::ALL).filter(|(_, path)| path.has(phase)) {
            let all = whole && path.is_own() && !matches!(phase, Phase::Anytime(_));
            let paired = (number + path_number) % LAYOUT_COUNT;
            for layout in (0..LAYOUT_COUNT).filter(|layout| all || *layout == paired) {
                trials.push(trial(Loss::new(Worst::Killed, phase, layout, path)));
            }
        }
    }
    for (number, phase) in (0u8..).zip(stopped) {
        // Each loss takes two deadlines.
        let has = |path: &Path| path.has(phase) && (path.is_own() || number % 2 == 1);
        for path in Path::ALL.into_iter().filter(has) {
            let all = phase == Phase::Entered && path != Path::Puts;
            for layout in (0..LAYOUT_COUNT).filter(|layout| all || *layout == number % LAYOUT_COUNT)
            {
                trials.push(trial(Loss::new(Worst::Stopped, phase, layout, path)));
            }
        }
    }
    for (layout, phase) in (0u8..).zip(Phase::ALL) {
        trials.push(trial(Loss::new(
            Worst::BothKilled,
            phase,
            layout % LAYOUT_COUNT,
            Path::Stores,
        )));
        for path in [Path::Tcp, Path::TcpProxied].into_iter().filter(|path| path.has(phase)) {
            trials.push(trial(Loss::new(
                Worst::BothKilled,
                phase,
                (layout + 1) % LAYOUT_COUNT,
                path,
            )));
        }
    }
    trials.extend(domains::trials());
    trials.extend(two_minds::trials());
    trials.extend(opening::trials());
    trials.extend(refused::trials());
    trials.extend(hosts::trials());
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The fault of the victims, its phase, and the layout and path of the exchange.
#[derive(Clone, Copy)]
pub(crate) struct Loss {
    worst: Worst,
    phase: Phase,
    /// An index into [`LAYOUTS`].
    layout: u8,
    path: Path,
}

impl Loss {
    pub(crate) fn new(worst: Worst, phase: Phase, layout: u8, path: Path) -> Self {
        Self { worst, phase, layout, path }
    }
}

fn trial(loss: Loss) -> Trial {
    let Loss { worst, phase, layout, path } = loss;
    let (layout, _) = LAYOUTS[usize::from(layout)];
    let name = format!("{}/{}/{layout}/{}", worst.name(), phase.name(), path.name());
    Trial::test(name, move || run(loss))
}

fn run(loss: Loss) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    watch(&order(&folder, loss)).map_err(|error| Failed::from(format!("{error:#}")))
}

pub(crate) fn order(folder: &TempDir, loss: Loss) -> Order {
    let Loss { worst, phase, layout, path } = loss;
    let folder = folder.path().into();
    let (lives, life) = (Vec::new(), 0);
    let (spread, rank, back) = (None, 0, false);
    Order { folder, worst, phase, layout, path, spread, rank, back, lives, life }
}

/// A rank's process; it does not outlive the test.
pub(crate) struct Process {
    child: Child,
    stderr: PathBuf,
}

impl Process {
    pub(crate) fn start(order: &Order, rank: usize, back: bool) -> Result<Self> {
        let order = Order { rank, back, ..order.clone() };
        let stderr = order.marker(if back { "stderr_back" } else { "stderr" }, rank);
        let child = Command::new(std::env::current_exe()?)
            .args([RANK, &serde_json::to_string(&order)?])
            .env("TOKENYARD_RANK", rank.to_string())
            .env("TOKENYARD_RANKS", order.ranks().to_string())
            .env("TOKENYARD_LOCAL_RANK", rank.to_string())
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(&stderr)?)
            .spawn()?;
        Ok(Self { child, stderr })
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn output(&self) -> String {
        std::fs::read_to_string(&self.stderr).unwrap_or_default()
    }

    pub(crate) fn ended(&mut self) -> Result<Option<bool>> {
        Ok(self.child.try_wait()?.map(|status| status.success()))
    }

    pub(crate) fn wait(&mut self) -> Result<bool> {
        let start = Instant::now();
        loop {
            if let Some(success) = self.ended()? {
                return Ok(success);
            }
            ensure!(start.elapsed() < LIMIT, "it hangs; it printed: {}", self.output());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls fail only if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs one loss.
pub(crate) fn watch(order: &Order) -> Result<()> {
    let mut ranks: Vec<Process> =
        (0..order.ranks()).map(|rank| Process::start(order, rank, false)).collect::<Result<_>>()?;
    let start = Instant::now();
    while !order.survivors().all(|rank| order.marker("without", rank).exists()) {
        for rank in order.survivors() {
            if ranks[rank].ended()?.is_some() {
                bail!("rank {rank} ended too early: {}", ranks[rank].output());
            }
        }
        ensure!(start.elapsed() < LIMIT, "{}", hang(&ranks));
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut back = Vec::new();
    if order.worst.kills() {
        for victim in order.victims() {
            back.push(Process::start(order, *victim, true)?);
        }
    } else {
        let victim = order.victims()[0];
        kill_process(ranks[victim].pid(), Signal::CONT)?;
        ensure!(!ranks[victim].wait()?, "the victim did not notice");
        let output = ranks[victim].output();
        ensure!(output.contains("the others go on without it"), "the victim printed: {output}");
        std::fs::write(order.marker("victim_ended", victim), "")?;
    }
    for rank in order.survivors() {
        let success = ranks[rank].wait().with_context(|| format!("rank {rank}"))?;
        ensure!(success, "rank {rank}: {}", ranks[rank].output());
    }
    if order.phase == Phase::Entered && !order.layout().has_fixed_places() {
        let torn = order.survivors().filter(|rank| order.marker("torn", *rank).exists());
        // The outputs of a survivor lack rows where the victim was to write them itself. Rows that went to
        // another domain were there before the victim granted places.
        let beside = |rank: &usize| order.spread.as_ref().is_none_or(|s| s.is_beside_victim(*rank));
        let among_domains = order.spread.is_some();
        let expected = if among_domains { order.survivors().filter(beside).count() } else { 1 };
        let torn = torn.count();
        ensure!(torn >= expected, "{torn} outputs lack rows; expected {expected}");
    }
    for mut back in back {
        ensure!(back.wait().context("a rank that came back")?, "it printed: {}", back.output());
    }
    Ok(())
}

pub(crate) fn hang(ranks: &[Process]) -> String {
    let output =
        ranks.iter().enumerate().map(|(rank, p)| format!("rank {rank} printed: {}", p.output()));
    format!("the others did not go on; {}", output.collect::<Vec<_>>().join("; "))
}
