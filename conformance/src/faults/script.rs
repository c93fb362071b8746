//! The script that every rank of a fault runs.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Signal, getpid, kill_process};
use tokenyard_core::bootstrap::{Identity, Secret, World, WorldOptions, environment};
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::{Config, OnFailure};
use tokenyard_launch::{Hosts, Net};

use super::{Fault, Kind, Lie, Phase};
use crate::moe::exchange;
use crate::moe::oracle::{Case, Tokens};
use crate::moe::round::{Live, Round};
use crate::ops::faults::{self as of_operation, FaultyEnd};
use crate::ops::gather::GatherEnd;
use crate::ops::pipe::PipeEnd;
use crate::ops::reduce::ReduceEnd;
use crate::ops::table::TableEnd;

/// The time in which ranks may start, where no rank is missing: a busy machine starts slowly.
const LATE: Duration = Duration::from_secs(10);
/// The time for which exchanges may go on without an error; after it, the absence is an error.
const PATIENCE: Duration = Duration::from_secs(10);

/// The port of rank 0 on the control network.
const CONTROL_PORT: u16 = 29_700;

/// The victim left; this is not an error on it.
#[derive(Debug, thiserror::Error)]
#[error("the victim leaves")]
struct Left;

/// A message of a rank to the launcher, which measures the time.
#[derive(Debug)]
pub enum Word<'a> {
    /// The fault happens now, on this rank.
    Faulty,
    /// A call of this rank has just ended with this error.
    Ended(&'a anyhow::Error),
    /// The components do not have the operation of the fault, for this reason.
    Lacks(&'a str),
}

struct Player<'a> {
    fault: &'a Fault,
    tell: &'a dyn Fn(Word<'_>) -> Result<()>,
    is_victim: bool,
}

impl Fault {
    /// The address where ranks meet. By default the launcher sets it, on the network of the rows; where a
    /// fault cuts that network, it is on the control network.
    fn meeting_place(&self) -> String {
        match self.kind {
            Kind::DataCut => format!("tcp://{}:{CONTROL_PORT}", Hosts::address(0, Net::Control)),
            _ => "env".to_owned(),
        }
    }

    /// Runs the script on this rank and reports how it ended. Every rank must get an error, except a victim
    /// that leaves or is lost.
    ///
    /// A rank reports an error before it closes the communicator. A victim that leaves reports this after its
    /// communicator is closed and before its goodbye. To close takes up to a second on a busy device, which
    /// frees its memory. No rank waits for an error in that time, and a rank that has not sent its goodbye is
    /// still present.
    ///
    /// # Errors
    /// This rank cannot find its place in the world, or cannot report.
    pub fn play(&self, config: &Path, tell: &dyn Fn(Word<'_>) -> Result<()>) -> Result<()> {
        let meet = self.meeting_place();
        let identity = Identity::resolve(&meet, &|name| std::env::var(name).ok())?;
        let is_victim = identity.place.rank == self.victim;
        let player = Player { fault: self, tell, is_victim };
        // The world sends its goodbye when it is dropped.
        let mut world = None;
        match player.play(config, identity, &mut world) {
            Err(error) if error.is::<Left>() => tell(Word::Faulty),
            Err(error) => tell(Word::Ended(&error)),
            Ok(()) => Ok(()),
        }
    }
}

impl Player<'_> {
    /// Returns an error that is not yet reported.
    fn play(
        &self,
        config: &Path,
        identity: Identity,
        world: &mut Option<Arc<World>>,
    ) -> Result<()> {
        let config = self.config(config)?;
        self.at(Phase::Bootstrap)?;
        let world = world.insert(self.join(&config, identity)?);
        self.at(Phase::Connect)?;
        match self.fault.phase {
            Phase::Message | Phase::Credit => return self.operation::<PipeEnd>(world, &config),
            Phase::GatherSend | Phase::GatherReceive => {
                return self.operation::<GatherEnd>(world, &config);
            }
            Phase::ReduceSend | Phase::ReduceReceive => {
                return self.operation::<ReduceEnd>(world, &config);
            }
            Phase::Write | Phase::Fetch => return self.operation::<TableEnd>(world, &config),
            _ => {}
        }
        let case = self.case(world);
        let mut options = exchange::options(&case);
        if let Some(lie) = self.lie() {
            lie.spoil_options(&mut options);
        }
        let mut comm = Communicator::open(world, &config, options)?;
        let case = Case { domains: exchange::domains(&comm), ..case };
        match self.exchanges(&mut comm, case) {
            Err(error) if !error.is::<Left>() => (self.tell)(Word::Ended(&error)),
            left => left,
        }
    }

    /// The script of an operation beside MoE.
    fn operation<E: FaultyEnd>(&self, world: &Arc<World>, config: &Config) -> Result<()> {
        let mut end = match of_operation::open::<E>(world, config)? {
            Ok(end) => end,
            Err(why) => return (self.tell)(Word::Lacks(&why)),
        };
        match self.rounds(&mut end) {
            Err(error) if !error.is::<Left>() => {
                (self.tell)(Word::Ended(&error))?;
                of_operation::settle(end)
            }
            left => left,
        }
    }

    fn rounds<E: FaultyEnd>(&self, end: &mut E) -> Result<()> {
        of_operation::round(end, &|_| Ok(()), false)?;
        let (start, patience) = (Instant::now(), self.fault.pace.stretch(PATIENCE));
        while start.elapsed() < patience {
            of_operation::round(end, &|phase| self.at(phase), self.lie().is_some())?;
        }
        bail!(
            "the operation went on for {patience:?}; expected an error about rank {}",
            self.fault.victim
        )
    }

    fn exchanges(&self, comm: &mut Communicator, mut case: Case) -> Result<()> {
        let first = Round::new(&case, comm.rank());
        let live = first.dispatch(comm)?;
        first.finish(comm, &live)?;
        let start = Instant::now();
        if let Some(lie) = self.lie() {
            lie.spoil_case(&mut case);
        }
        let patience = self.fault.pace.stretch(PATIENCE);
        while start.elapsed() < patience {
            self.exchange(comm, &case, &first, &live)?;
            case.seed += 1;
        }
        bail!(
            "exchanges went on for {patience:?}; expected an error about rank {}",
            self.fault.victim
        )
    }

    /// The lie, if this rank is the victim and the fault is one.
    fn lie(&self) -> Option<Lie> {
        match self.fault.kind {
            Kind::Lies(lie) if self.is_victim => Some(lie),
            _ => None,
        }
    }

    fn config(&self, path: &Path) -> Result<Config> {
        let mut config = Config::load(path)?;
        config.world.bootstrap = self.fault.meeting_place();
        if self.fault.kind == Kind::DataCut {
            config.world.interface = Some(Net::Control.interface().to_owned());
        }
        let deadline = self.fault.deadline();
        config.world.deadline = deadline;
        // The fault must end every rank here. Other tests check that ranks go on where losses are masked.
        config.world.on_failure = OnFailure::Stop;
        // An absent rank and a late rank look the same, so lateness is the deadline where a rank does not
        // come.
        let stays_away = self.fault.phase == Phase::Bootstrap;
        config.world.late = if stays_away { deadline } else { self.fault.pace.stretch(LATE) };
        if let Some(lie) = self.lie() {
            if self.fault.phase == Phase::Bootstrap {
                (self.tell)(Word::Faulty)?;
            }
            lie.spoil_config(&mut config)?;
        }
        Ok(config)
    }

    fn join(&self, config: &Config, identity: Identity) -> Result<Arc<World>> {
        let mut options = WorldOptions::configured(&config.world, identity);
        options.secret = Secret::from_env(&environment)?;
        if let Some(lie) = self.lie() {
            lie.spoil_world(&mut options)?;
        }
        Ok(Arc::new(World::join(options)?))
    }

    fn case(&self, world: &World) -> Case {
        let ranks = world.ranks() as usize;
        Case {
            ranks,
            experts: 4 * ranks,
            topk: 3,
            hidden: 64,
            max_tokens: 12,
            tokens: Tokens::Exactly(vec![4; ranks]),
            ..Case::default()
        }
    }

    fn exchange(
        &self,
        comm: &mut Communicator,
        case: &Case,
        first: &Round,
        live: &Live,
    ) -> Result<()> {
        let round = Round::new(case, comm.rank());
        self.at(Phase::Between)?;
        self.at(Phase::DispatchSend)?;
        if self.lie() == Some(Lie::Operation) {
            comm.replay(&live.handle, &first.tensors.replay_on(comm)?)?;
        }
        let dispatch = round.tensors.dispatch_on(comm)?;
        let sent = comm.dispatch_send(&dispatch)?;
        self.at(Phase::DispatchReceive)?;
        let (received, handle) = comm.dispatch_recv(sent)?;
        round.check_received(&received)?;
        let mut buffers = round.experts(&received)?;
        self.at(Phase::CombineSend)?;
        let combine = buffers.arguments(&round.tensors, &handle)?;
        let sent = comm.combine_send(&handle, combine)?;
        self.at(Phase::CombineReceive)?;
        comm.combine_recv(sent)?;
        round.check_combined(&buffers.into_got()?)
    }

    /// The victim fails here, if this is its phase.
    fn at(&self, phase: Phase) -> Result<()> {
        if !self.is_victim || phase != self.fault.phase {
            return Ok(());
        }
        let signal = match self.fault.kind {
            // A lie about the config is reported when the config is read.
            Kind::Lies(_) if phase == Phase::Bootstrap => return Ok(()),
            Kind::Lies(_) => return (self.tell)(Word::Faulty),
            Kind::Killed => Signal::KILL,
            // The launcher does the rest, and resumes a rank that it has cut off.
            Kind::Stopped
            | Kind::Frozen
            | Kind::Cut
            | Kind::DataCut
            | Kind::LinkDown
            | Kind::AllKilled => Signal::STOP,
            Kind::Leaves => return Err(Left.into()),
        };
        (self.tell)(Word::Faulty)?;
        kill_process(getpid(), signal).context("signal this process")
    }
}
