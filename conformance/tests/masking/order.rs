//! What a rank is told to do.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use tokenyard_conformance::oracle::{Case, Input, Layout, RowType, Scales, Tokens};
use tokenyard_conformance::pace::Pace;
use tokenyard_core::config::Config;

use crate::domains::Spread;
use crate::losing;
use crate::mortal::Step;

/// The one that is lost, or the first of two. Not rank 0, where all meet.
pub(crate) const VICTIM: usize = 1;

/// Where the victim does its worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// While the communicator is brought up: all links are made, and the kernels not planned.
    Planning,
    DispatchSend,
    /// Inside the send of a dispatch: it has entered, and has not written the rows that the others
    /// give it places for.
    Entered,
    DispatchReceive,
    CombineSend,
    CombineReceive,
    /// The same, and the others receive the combine only when they know of the loss.
    LateReceive,
    /// Between the sends of two dispatches and their receives; or, among several domains, between the sends.
    Overlap,
    /// After one exchange and before the next.
    Between,
    /// While it says that it has no room: rank 2 has heard it, and rank 0 has not.
    Refusing,
    /// So many microseconds after the start of the last round but some.
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
    /// Its host is cut off the network.
    Cut,
}

impl Phase {
    /// Those that are certain.
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

/// How rows get from rank to rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Path {
    /// `shm`, by loads and stores.
    Stores,
    /// `shm`, by puts.
    Puts,
    /// `libfabric` over a network interface.
    Tcp,
    /// The same, posted by a thread of its own.
    TcpProxied,
    /// `shm` in which a rank dies at a step of a bring-up.
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

    /// Whether it is a part of this project's that runs everywhere.
    pub(crate) fn is_own(self) -> bool {
        matches!(self, Self::Stores | Self::Puts)
    }

    /// Whether a phase is played over it: a few where commands are under way, over what differs from
    /// another in who posts them.
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
    pub(crate) layout: u8,
    pub(crate) path: Path,
    /// Several domains, and who is lost there.
    pub(crate) spread: Option<Spread>,
    pub(crate) rank: usize,
    /// Whether this process comes back as the lost rank.
    pub(crate) back: bool,
    /// What becomes of the victim's processes, one after the other, where they die in a bring-up.
    pub(crate) lives: Vec<Option<Step>>,
    /// Which of them this process is.
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
        // A killed rank is found by its connection, which takes no time on any machine, and a link that
        // is down by its device. One that is stopped, or cut off by a switch, is found by the deadline
        // alone.
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
        // So long do the others wait for one that comes late.
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

    pub(crate) fn case(&self, round: u64) -> Case {
        let layout = match self.layout {
            0 => Layout::Flat,
            1 => Layout::ExpertMajor { alignment: 4, zero_padding: true },
            _ => Layout::Packed,
        };
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
            layout,
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

    /// Ends or stops this process, once: one that goes on after a stop is not stopped again.
    pub(crate) fn do_worst(&self) -> Result<()> {
        static DONE: AtomicBool = AtomicBool::new(false);
        if DONE.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.mark("worst")?;
        // A host is cut off while its rank stands still.
        let signal = if self.worst.kills() { Signal::KILL } else { Signal::STOP };
        kill_process(getpid(), signal).context("signal this process")
    }
}
