//! L3: a rank is lost while others wait for what it sends, or until it has received, and a rank that passes something
//! else than the others.

use std::sync::Arc;

use anyhow::Result;
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_core::moe::DType;
use tokenyard_core::ops::gather::GatherOptions;
use tokenyard_core::ops::gather::reduce::{Precision, Spread};
use tokenyard_core::ops::pipe::PipeOptions;
use tokenyard_core::ops::table::TableOptions;

use super::end::{self, OperationEnd};
use super::gather::GatherEnd;
use super::pipe::PipeEnd;
use super::reduce::{Form, ReduceEnd};
use super::table::TableEnd;
use crate::faults::{Fault, Kind, Lie, Phase};
use crate::pace::Pace;

/// The length of what ranks send, and the one that a misled rank sends.
pub(crate) const LENGTH: usize = 64;
pub(crate) const OTHER_LENGTH: usize = 65;

/// The sum of all ranks: both halves of the call need each of them.
const SUMMED: Form = Form {
    spread: Spread::All,
    precision: Precision::Fp32,
    scale: 1.0,
    tensors: &[(DType::F32, LENGTH / 4)],
};

/// An operation in the script of L3.
pub(crate) trait FaultyEnd: OperationEnd {
    /// Before it sends, and before it receives.
    const PHASES: [Phase; 2];
    /// The lie, with its word, and whether all ranks of several domains notice it.
    const LIE: (&'static str, Lie, bool);

    /// Options and lengths. With one in flight, each send waits until what came before it is taken.
    fn small() -> (Self::Options, &'static [Self::Length]);

    /// Sends what no other rank expects.
    fn send_lie(&mut self) -> Result<()>;
}

impl FaultyEnd for PipeEnd {
    const PHASES: [Phase; 2] = [Phase::Message, Phase::Credit];
    // Among domains no message goes from the victim to each rank.
    const LIE: (&'static str, Lie, bool) = ("length", Lie::Length, false);

    fn small() -> (PipeOptions, &'static [usize]) {
        (PipeOptions { max_bytes: 2 * LENGTH as u64, in_flight: 1 }, &[LENGTH])
    }

    fn send_lie(&mut self) -> Result<()> {
        self.send_length(OTHER_LENGTH)
    }
}

impl FaultyEnd for GatherEnd {
    const PHASES: [Phase; 2] = [Phase::GatherSend, Phase::GatherReceive];
    const LIE: (&'static str, Lie, bool) = ("shards", Lie::Shards, true);

    fn small() -> (GatherOptions, &'static [&'static [usize]]) {
        (GatherOptions { in_flight: 1, ..GatherOptions::new(2 * LENGTH as u64) }, &[&[LENGTH]])
    }

    fn send_lie(&mut self) -> Result<()> {
        self.send_lengths(&[OTHER_LENGTH])
    }
}

impl FaultyEnd for ReduceEnd {
    const PHASES: [Phase; 2] = [Phase::ReduceSend, Phase::ReduceReceive];
    const LIE: (&'static str, Lie, bool) = ("sums", Lie::Sums, true);

    fn small() -> (GatherOptions, &'static [Form]) {
        let options = GatherOptions::new(2 * LENGTH as u64);
        (GatherOptions { in_flight: 1, reduces: true, ..options }, &[SUMMED])
    }

    fn send_lie(&mut self) -> Result<()> {
        self.send_form(Form { scale: 0.5, ..SUMMED })
    }
}

impl FaultyEnd for TableEnd {
    const PHASES: [Phase; 2] = [Phase::Write, Phase::Fetch];
    const LIE: (&'static str, Lie, bool) = ("entries", Lie::Entries, true);

    fn small() -> (TableOptions, &'static [usize]) {
        (TableOptions { in_flight: 1, ..TableOptions::new(LENGTH as u64, 4, 8) }, &[8])
    }

    fn send_lie(&mut self) -> Result<()> {
        self.write_too_many()
    }
}

/// The faults of an operation on one machine, in a world of `domains` domains.
pub(crate) fn list<E: FaultyEnd>(domains: u32) -> Vec<Fault> {
    let suffix = if domains > 1 { format!("/d{domains}") } else { String::new() };
    let fault = |name: String, about: &str, phase, kind| Fault {
        name: format!("l3/{}/{name}{suffix}", E::WORD),
        about: about.to_owned(),
        ranks: if domains > 1 { 2 * domains } else { 3 },
        victim: 1,
        phase,
        kind,
        hosts: None,
        domains,
        pace: Pace::USUAL,
    };
    let mut list = Vec::new();
    for (word, kind, about) in [
        (
            "killed",
            Kind::Killed,
            "a rank is killed: those that wait for it end in time and name it",
        ),
        (
            "stopped",
            Kind::Stopped,
            "a rank is stopped: those that wait for it end in time and name it",
        ),
    ] {
        for phase in E::PHASES {
            list.push(fault(format!("{word}/{}", phase.name()), about, phase, kind));
        }
    }
    let (word, lie, reaches_all) = E::LIE;
    if domains == 1 || reaches_all {
        let about = "a rank sends another length: it and the receivers say which";
        list.push(fault(format!("misled/{word}"), about, E::PHASES[0], Kind::Lies(lie)));
    }
    list
}

/// Opens the operation of the script, or says why the components have none.
///
/// # Errors
/// As [`end::open`].
pub(crate) fn open<E: FaultyEnd>(
    world: &Arc<World>,
    config: &Config,
) -> Result<std::result::Result<E, String>> {
    let (options, lengths) = E::small();
    let opened = end::open(world, config, options, lengths, Vec::new())?;
    Ok(opened.map(|(end, _)| end))
}

/// Sends once, and receives once. `at` may end this rank.
///
/// # Errors
/// Those of the operation.
pub(crate) fn round<E: FaultyEnd>(
    end: &mut E,
    at: &dyn Fn(Phase) -> Result<()>,
    lies: bool,
) -> Result<()> {
    at(E::PHASES[0])?;
    match lies {
        true => end.send_lie()?,
        false => end.send_next()?,
    }
    at(E::PHASES[1])?;
    end.recv_next()
}

/// Ends an operation that an error has left open, together with the other ranks: none of them waits in vain.
///
/// # Errors
/// Those of [`close`](OperationEnd::close).
pub(crate) fn settle<E: FaultyEnd>(mut end: E) -> Result<()> {
    if end.is_closed() {
        return Ok(());
    }
    end.settle()?;
    end.close()
}
