//! The launcher's side of L3.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::repeat;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokenyard_launch::{Event, Hosts, Net, interrupt};

use super::Program;
use super::load::LoadWatch;
use super::order::{Answer, Work};
use super::watch::{Finished, RunEvent, Verdict, Watched, with_tail};
use crate::faults::{self, CutLink, Fault, Kind};
use crate::names::{LeftNames, Watch};
use crate::pace::Pace;

/// The longest that a fault is watched, on a machine that is not busy.
const FAULT_LIMIT: Duration = Duration::from_secs(30);
/// Faults that run at the same time, on a machine of the usual pace.
const FAULTS_AT_ONCE: usize = 4;
/// Faults that run at the same time, on a slow machine.
const SLOW_FAULTS_AT_ONCE: usize = 2;
/// Jobs that must all leave new names that may be another program's, before these count.
const LOOKS: u32 = 3;
/// The time that the system has to clean up after a process, on a machine that is not busy.
const CLEAN_UP: Duration = Duration::from_secs(3);

/// Runs faults, a few at the same time because their ranks mostly wait, and passes each result to `each` at
/// once. On a slow machine ranks mostly compute, so fewer faults run at the same time.
///
/// # Errors
/// The ranks of a fault cannot be started at all; as [`run_in_processes`](super::run_in_processes).
pub fn run_faults(
    program: &Program,
    config: &Path,
    faults: &[Fault],
    each: &mut dyn FnMut(RunEvent<'_>),
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let (results_in, results) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..if program.pace == Pace::USUAL { FAULTS_AT_ONCE } else { SLOW_FAULTS_AT_ONCE } {
            let (next, results_in) = (&next, results_in.clone());
            scope.spawn(move || {
                while let Some(fault) = faults.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if results_in.send(Ok((fault, None))).is_err() {
                        return;
                    }
                    let ended = run_fault(program, config, fault);
                    if results_in.send(ended.map(|ended| (fault, Some(ended)))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(results_in);
        results.into_iter().try_for_each(|news| {
            let (fault, ended) = news?;
            each(ended.map_or(RunEvent::Starts(&fault.name), RunEvent::Ended));
            Ok(())
        })
    })
}

/// Runs one fault and judges it.
///
/// # Errors
/// The ranks cannot be started at all; as [`run_in_processes`](super::run_in_processes).
pub fn run_fault(program: &Program, config: &Path, fault: &Fault) -> Result<Finished> {
    let fault = &fault.clone().at(program.pace);
    let start = Instant::now();
    let (mut failures, mut others, mut lacks) = (Vec::new(), Vec::new(), None);
    for _ in 0..LOOKS {
        let Played { failures: failed, left, lacks: why } = play(program, config, fault)?;
        failures.extend(failed);
        failures.extend(left.own);
        lacks = lacks.or(why);
        // A job that leaves nothing once has not left the others: another program has, such as another run.
        if left.others.is_empty() {
            others.clear();
            break;
        }
        others.extend(left.others);
    }
    failures.extend(others);
    let verdict = match (failures.is_empty(), lacks) {
        (false, _) => Verdict::Fail(failures.join("\n")),
        (true, Some(why)) => Verdict::NotSupported(why),
        (true, None) => Verdict::Pass,
    };
    Ok(Finished { name: fault.name.clone(), verdict, took: start.elapsed() })
}

/// One run of a fault.
struct Played {
    failures: Vec<String>,
    left: LeftNames,
    /// Why the components do not have the operation of the fault, if they do not.
    lacks: Option<String>,
}

/// Runs one fault once.
fn play(program: &Program, config: &Path, fault: &Fault) -> Result<Played> {
    let start = Instant::now();
    let names = Watch::start();
    let work = Work::Fault { name: fault.name.clone(), ranks: fault.ranks };
    let hosts = fault.hosts.map(|hosts| Hosts::new(hosts as usize)).transpose()?;
    let world = Watched::start(program, config, work, fault.ranks, hosts.as_ref())?;
    let mut play = Play::new(fault, world, hosts, names);
    play.watch(start)?;
    let limit = play.load.stretch(fault.deadline() + fault.grace());
    // Where some ranks alone lack the operation, they show as ranks without an error.
    let (mut failures, lacks) = match play.lack() {
        Some(why) => (Vec::new(), Some(why)),
        None => (faults::judge(fault, &play.seen(), limit), None),
    };
    let (processes, left) = play.clean_up();
    failures.extend(processes);
    Ok(Played { failures, left, lacks })
}

/// A fault while it runs.
struct Play<'a> {
    fault: &'a Fault,
    world: Watched,
    load: LoadWatch,
    hosts: Option<Hosts>,
    link: Option<CutLink>,
    began: Option<Instant>,
    /// Per rank: error, the rank it is about, and when.
    ended: BTreeMap<u32, (String, Option<u32>, Instant)>,
    /// Of each rank that lacks the operation of the fault, the reason.
    lacks: BTreeMap<u32, String>,
    meeting: BTreeSet<PathBuf>,
    names: Watch,
}

impl<'a> Play<'a> {
    fn new(fault: &'a Fault, world: Watched, hosts: Option<Hosts>, names: Watch) -> Self {
        let (ended, meeting) = (BTreeMap::new(), BTreeSet::new());
        let load = LoadWatch::start();
        Self {
            fault,
            world,
            load,
            hosts,
            link: None,
            began: None,
            ended,
            lacks: BTreeMap::new(),
            meeting,
            names,
        }
    }

    /// The longest that the fault is watched, given how busy the machine is.
    fn limit(&self) -> Duration {
        self.load.stretch(self.fault.pace.stretch(FAULT_LIMIT))
    }

    /// Watches until every rank but the victim has exited, and the victim as well where it can.
    fn watch(&mut self, start: Instant) -> Result<()> {
        while !self.is_over() && start.elapsed() < self.limit() {
            let left = self.limit().saturating_sub(start.elapsed());
            let Some(event) = self.world.running.wait_event(left)? else { continue };
            let now = Instant::now();
            match event {
                Event::Exited { rank, status } => {
                    self.world.exits.insert(rank, status);
                }
                Event::Line { rank, line } => match Answer::read(&line) {
                    Some(Answer::Uses { names }) => self.names.note_names(names),
                    Some(Answer::Faulty) => {
                        self.befall()?;
                        self.began = self.began.or(Some(Instant::now()));
                    }
                    Some(Answer::Ended { error, rank: about }) => {
                        self.ended.insert(rank, (error, about, now));
                    }
                    Some(Answer::Meeting { path }) => {
                        self.meeting.insert(path);
                    }
                    Some(Answer::Lacks { why }) => {
                        self.lacks.insert(rank, why);
                    }
                    Some(Answer::Stuck { slot }) => self.world.note_stuck(rank, slot),
                    Some(Answer::Test { .. }) | None => {}
                },
            }
        }
        Ok(interrupt::check()?)
    }

    /// Applies the fault to the victim's host or link, if it is such a fault. The victim stops itself
    /// first, so that it does not go on before the fault has happened.
    fn befall(&mut self) -> Result<()> {
        let (hosts, host) = (self.hosts.as_ref(), self.fault.host() as usize);
        let (victim, limit) = (self.fault.victim, self.limit());
        self.names.note((0..self.fault.ranks).filter_map(|rank| self.world.running.pid(rank)));
        match (self.fault.kind, hosts) {
            (Kind::Frozen, Some(hosts)) => return hosts.freeze(host),
            (Kind::Cut, Some(hosts)) => {
                self.world.running.await_stop(victim, limit)?;
                hosts.cut(host, &Net::BOTH)?;
            }
            (Kind::DataCut, Some(hosts)) => {
                self.world.running.await_stop(victim, limit)?;
                hosts.swallow(host, &[Net::Data])?;
            }
            (Kind::AllKilled, _) => {
                // Stopped first, so that none notices the loss of another one.
                let (running, ranks) = (&self.world.running, 0..self.fault.ranks);
                ranks.clone().try_for_each(|rank| running.stop(rank))?;
                return ranks.clone().try_for_each(|rank| running.kill(rank));
            }
            (Kind::LinkDown, _) => {
                self.world.running.await_stop(victim, limit)?;
                self.link = Some(CutLink::of(victim)?);
            }
            _ => return Ok(()),
        }
        self.world.running.resume(victim)
    }

    /// Why all ranks lack the operation, if they do.
    fn lack(&mut self) -> Option<String> {
        let all = (0..self.fault.ranks).all(|rank| self.lacks.contains_key(&rank));
        self.lacks.pop_first().map(|(_, why)| why).filter(|_| all)
    }

    fn is_over(&self) -> bool {
        let stands_still = |rank: &u32| {
            matches!(self.fault.kind, Kind::Stopped | Kind::Frozen)
                && self.fault.victims().contains(rank)
        };
        (0..self.fault.ranks)
            .filter(|rank| !stands_still(rank))
            .all(|rank| self.world.exits.contains_key(&rank))
    }

    fn seen(&self) -> Vec<faults::Seen> {
        (0..self.fault.ranks)
            .map(|rank| {
                let ended = self.ended.get(&rank);
                let ending = match self.world.exits.get(&rank) {
                    Some(exit) => exit.to_string(),
                    None => match self.world.hangs_in(rank) {
                        Some(hangs) => format!("not at all, it {hangs}"),
                        None => "not at all".to_owned(),
                    },
                };
                faults::Seen {
                    rank,
                    error: ended.map(|(error, ..)| error.clone()),
                    about: ended.and_then(|(_, about, _)| *about),
                    took: ended
                        .zip(self.began)
                        .map(|((.., at), began)| at.saturating_duration_since(began)),
                    exited: self.world.exits.contains_key(&rank),
                    ending: with_tail(ending, &self.world.running.stderr_tail(rank)),
                }
            })
            .collect()
    }

    /// Ends the processes that still run, and lists the processes, files and names that are left behind.
    fn clean_up(self) -> (Vec<String>, LeftNames) {
        let Self { world, load, hosts, meeting, link, names, .. } = self;
        drop(link);
        let Watched { running, ranks, pace, folder, .. } = world;
        let pids: Vec<u32> = (0..ranks).filter_map(|rank| running.pid(rank)).collect();
        drop(running);
        let mut left = Vec::new();
        for (host, hosts) in hosts.iter().flat_map(|hosts| (0..hosts.count()).zip(repeat(hosts))) {
            match hosts.processes(host) {
                Ok(pids) if pids.is_empty() => {}
                found => left.push(format!("on host {host} processes are left behind: {found:?}")),
            }
        }
        for pid in pids {
            if Path::new(&format!("/proc/{pid}")).exists() {
                left.push(format!("process {pid} is left behind"));
            }
        }
        left.extend(
            meeting
                .iter()
                .filter(|path| path.exists())
                .map(|path| format!("the folder {} is left behind", path.display())),
        );
        left.extend(
            file_names(folder.path())
                .into_iter()
                // Reports remain, to be read afterwards.
                .filter(|name| name != "order.json" && !name.starts_with("tokenyard-reports-"))
                .map(|name| format!("the temporary file {name} is left behind")),
        );
        let limit = || load.stretch(pace.stretch(CLEAN_UP));
        let found = names.left(limit);
        // The folder of the ranks was looked at above.
        let elsewhere = |file: &Path| !file.starts_with(folder.path());
        left.extend(names.left_files(elsewhere));
        (left, found)
    }
}

fn file_names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
