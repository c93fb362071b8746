//! The order of a rank: its part in a test.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use tokenyard_conformance::moe::exchange;
use tokenyard_conformance::moe::oracle::{Case, Input, Layout, RowType, Scales, Tokens};
use tokenyard_conformance::pace::Pace;
use tokenyard_core::communicator::CommunicatorOptions;
use tokenyard_core::config::Config;

use crate::domains::Spread;
use crate::losing;
use crate::mortal::Step;

/// The lost rank, or the first of two. Not rank 0, where all ranks meet.
pub(crate) const VICTIM: usize = 1;

/// The layouts of exchanges, and their names.
pub(crate) const LAYOUTS: [(&str, Layout); 4] = [
    ("flat", Layout::Flat),
    ("expert_major", Layout::ExpertMajor { alignment: 4, zero_padding: true }),
    ("packed", Layout::Packed),
    // Rows of a lost source are zero without a request.
    ("rank_major", Layout::RankMajor { zero_padding: false }),
];
pub(crate) const LAYOUT_COUNT: u8 = LAYOUTS.len() as u8;

/// The phase in which the victim is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// During bring-up: all links are made, and the kernels are not planned.
    Planning,
    DispatchSend,
    /// Inside the send of a dispatch: the victim has sent its entry, and has not written the rows that the
    /// others give it places for.
    Entered,
    DispatchReceive,
    CombineSend,
    CombineReceive,
    /// As `CombineReceive`, and the others receive the combine only after they know of the loss.
    LateReceive,
    /// Between the sends of two dispatches and their receives; or, among several domains, between the sends.
    Overlap,
    /// After one exchange and before the next.
    Between,
    /// While it reports that it has no room: rank 2 has received the report, and rank 0 has not.
    Refusing,
    /// This many microseconds after the first round.
    Anytime(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Worst {
    /// SIGKILL.
    Killed,
    /// SIGKILL for two ranks, at the same phase.
    BothKilled,
    /// SIGSTOP; the launcher lets it run again once the others have gone on.
    Stopped,
    /// Its host is cut off from the network.
    Cut,
}

impl Phase {
    /// The phases that always occur.
    pub(crate) const ALL: [Self; 9] = [
        Self::Planning,
        Self::DispatchSend,
        Self::Entered,
        Self::DispatchReceive,
        Self::CombineSend,
        Self::CombineReceive,
        Self::LateReceive,
        Self::Overlap,
        Self::Between,
    ];

    pub(crate) fn name(self) -> String {
        match self {
            Self::Planning => "planning".to_owned(),
            Self::DispatchSend => "dispatch_send".to_owned(),
            Self::Entered => "entered".to_owned(),
            Self::DispatchReceive => "dispatch_receive".to_owned(),
            Self::CombineSend => "combine_send".to_owned(),
            Self::CombineReceive => "combine_receive".to_owned(),
            Self::LateReceive => "late_receive".to_owned(),
            Self::Refusing => "refusing".to_owned(),
            Self::Overlap => "overlap".to_owned(),
            Self::Between => "between".to_owned(),
            Self::Anytime(after) => format!("after_{after}_us"),
        }
    }
}

impl Worst {
    pub(crate) fn kills(self) -> bool {
        matches!(self, Self::Killed | Self::BothKilled)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::BothKilled => "both_killed",
            Self::Stopped => "stopped",
            Self::Cut => "cut",
        }
    }
}

/// The path of rows between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Path {
    /// `shm`, by loads and stores.
    Stores,
    /// `shm`, by puts.
    Puts,
    /// `libfabric` over a network interface.
    Tcp,
    /// As `Tcp`, posted by a proxy thread.
    TcpProxied,
    /// `shm` in which a rank is killed at a step of a bring-up.
    Mortal,
    /// `verbs`, in the test machine.
    Verbs,
    /// `shm` by puts that overtake each other.
    Reordered,
}

impl Path {
    pub(crate) const ALL: [Self; 4] = [Self::Stores, Self::Puts, Self::Tcp, Self::TcpProxied];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stores => "stores",
            Self::Puts => "puts",
            Self::Tcp => "libfabric_tcp",
            Self::TcpProxied => "libfabric_tcp_proxied",
            Self::Mortal => "mortal",
            Self::Verbs => "verbs",
            Self::Reordered => "reordered",
        }
    }

    /// The test machine is emulated.
    fn pace(self) -> Pace {
        let slow = if self == Self::Verbs { 2 } else { 1 };
        Pace::new(slow).expect("a factor in the range")
    }

    /// Whether it is a transport of this project that runs on every machine.
    pub(crate) fn is_own(self) -> bool {
        matches!(self, Self::Stores | Self::Puts)
    }

    /// Whether a phase is tested over it. A path that differs from another one only in the thread that
    /// posts runs a few phases, in which commands are in flight.
    pub(crate) fn has(self, phase: Phase) -> bool {
        use Phase::{Anytime, CombineReceive, DispatchSend, Entered, LateReceive};
        let few = [DispatchSend, Entered, CombineReceive, LateReceive, Anytime(600)];
        self != Self::TcpProxied || few.contains(&phase)
    }

    /// The transport sections of a config.
    fn transport(self) -> String {
        let shm = |load_store: bool| {
            format!(
                "[transport.scale_up]\nuse = \"shm\"\n\
                 [transport.scale_up.shm]\nload_store = {load_store}\n"
            )
        };
        match self {
            Self::Stores => shm(true),
            Self::Puts => shm(false),
            Self::Mortal => "[transport.scale_up]\nuse = \"mortal\"\n".to_owned(),
            Self::Tcp | Self::TcpProxied => format!(
                "[transport.scale_up]\nuse = \"none\"\n\
                 [transport.scale_out]\nuse = \"libfabric\"\n\
                 [transport.scale_out.libfabric]\nprovider = \"tcp\"\nproxy_threads = {}\n",
                u8::from(self == Self::TcpProxied)
            ),
            Self::Verbs => "[transport.scale_up]\nuse = \"none\"\n\
                 [transport.scale_out]\nuse = \"verbs\"\n"
                .to_owned(),
            Self::Reordered => "[transport.scale_up]\nuse = \"faulty\"\n\
                 [transport.scale_up.faulty]\ninner = \"shm\"\nseed = 5\n"
                .to_owned(),
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) folder: PathBuf,
    pub(crate) worst: Worst,
    pub(crate) phase: Phase,
    /// An index into [`LAYOUTS`].
    pub(crate) layout: u8,
    pub(crate) path: Path,
    /// Several domains, and the ranks that are lost there.
    pub(crate) spread: Option<Spread>,
    pub(crate) rank: usize,
    /// Whether this process comes back as the lost rank.
    pub(crate) back: bool,
    /// The fates of the victim's processes, in order, where they are killed in a bring-up.
    pub(crate) lives: Vec<Option<Step>>,
    /// The number of this process among them.
    pub(crate) life: usize,
}

impl Order {
    pub(crate) fn ranks(&self) -> usize {
        self.spread.as_ref().map_or(2 + self.victims().len(), Spread::ranks)
    }

    pub(crate) fn victims(&self) -> &[usize] {
        if let Some(spread) = &self.spread {
            return &spread.victims;
        }
        if self.worst == Worst::BothKilled { &[VICTIM, 3] } else { &[VICTIM] }
    }

    pub(crate) fn is_victim(&self) -> bool {
        self.victims().contains(&self.rank)
    }

    pub(crate) fn survivors(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks()).filter(|rank| !self.victims().contains(rank))
    }

    pub(crate) fn config(&self) -> Config {
        // Others find a killed rank by its connection, which takes no time on any machine, and a link that
        // is down by its device. They find a rank that is stopped, or cut off by a switch, by the deadline
        // only.
        let tells = self.worst.kills() || (self.worst, self.path) == (Worst::Cut, Path::Verbs);
        let deadline_ms = if tells { 20_000 } else { 4000 };
        let deadline = self.path.pace().stretch(Duration::from_millis(deadline_ms));
        let deadline_ms = deadline.as_millis();
        let bootstrap = match (self.worst, self.path) {
            (Worst::Cut, Path::Tcp) => "env".to_owned(),
            _ => format!("file://{}", self.folder.join("job").display()),
        };
        let inside = matches!(self.phase, Phase::Planning | Phase::Entered | Phase::Refusing);
        let kernels = if inside { losing::NAME } else { "cpu" };
        // The time for which the others wait for a rank that is late.
        let late_ms = if self.lives.contains(&Some(Step::Late)) { 20_000 } else { 60_000 };
        let text = format!(
            "[world]\nbootstrap = \"{bootstrap}\"\ndeadline_ms = {deadline_ms}\nlate_ms = {late_ms}\n\
             on_failure = \"mask\"\n[kernels]\nuse = \"{kernels}\"\n{}",
            self.spread
                .as_ref()
                .map_or_else(|| self.path.transport(), |spread| spread.transport(self.path),),
        );
        Config::parse(&text, "masking").expect("the config is right")
    }

    pub(crate) fn layout(&self) -> Layout {
        LAYOUTS[usize::from(self.layout)].1
    }

    /// The communicator, whose M is above that of the calls.
    pub(crate) fn options(&self) -> CommunicatorOptions {
        let options = exchange::options(&self.case(0));
        CommunicatorOptions { max_tokens: options.max_tokens + 4, ..options }
    }

    pub(crate) fn case(&self, round: u64) -> Case {
        Case {
            ranks: self.ranks(),
            domains: self.spread.as_ref().map_or(1, |spread| spread.domains),
            experts: 4 * self.ranks(),
            topk: 3,
            hidden: 64,
            max_tokens: 12,
            tokens: Tokens::Exactly([7, 12, 5, 9, 8, 11][..self.ranks()].to_vec()),
            input: Input::Cast(RowType::Bf16, Scales::F32),
            weights: true,
            layout: self.layout(),
            seed: 100 + round,
            ..Case::default()
        }
    }

    pub(crate) fn marker(&self, what: &str, rank: usize) -> PathBuf {
        self.folder.join(format!("{what}.{rank}"))
    }

    pub(crate) fn mark(&self, what: &str) -> Result<()> {
        std::fs::write(self.marker(what, self.rank), "").context("mark")
    }

    /// Kills or stops this process, once: a process that is resumed is not stopped again.
    pub(crate) fn do_worst(&self) -> Result<()> {
        static DONE: AtomicBool = AtomicBool::new(false);
        if DONE.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.mark("worst")?;
        // The launcher cuts a host off while its rank is stopped.
        let signal = if self.worst.kills() { Signal::KILL } else { Signal::STOP };
        kill_process(getpid(), signal).context("signal this process")
    }
}
