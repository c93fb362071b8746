//! Losses among several domains. A row that goes from one domain to another passes the rank there that is on
//! its source's rail. Its combined row passes the same rank on the way back. Without that rank, neither
//! arrives.

use anyhow::{Result, bail, ensure};
use libtest_mimic::{Failed, Trial};
use serde::{Deserialize, Serialize};
use tokenyard_conformance::moe::exchange::{self, Aligned, InputTensors};
use tokenyard_conformance::moe::oracle::{Case, Inputs, Layout};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{
    Combine, CombineInput, Communicator, Handle, Replay, TensorMut, TensorRef,
};
use tokenyard_core::moe::DType;

use crate::Loss;
use crate::order::{LAYOUT_COUNT, LAYOUTS, Order, Path, Phase, Worst};

/// Domains of equal size, and the ranks that are lost.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) domains: usize,
    size: usize,
    pub(crate) victims: Vec<usize>,
}

impl Spread {
    pub(crate) fn of(domains: usize, size: usize, victims: &[usize]) -> Self {
        Self { domains, size, victims: victims.to_vec() }
    }

    /// Whether any two domains with a surviving rank have a rail on which both ranks survive.
    fn has_rails(&self) -> bool {
        let lives =
            |domain: usize, rail: usize| !self.victims.contains(&(domain * self.size + rail));
        let rails = || 0..self.size;
        let is_there = |domain: &usize| rails().any(|rail| lives(*domain, rail));
        let domains = || (0..self.domains).filter(is_there);
        domains().all(|a| domains().all(|b| rails().any(|rail| lives(a, rail) && lives(b, rail))))
    }

    /// Whether some rank may receive no entry that reports another rank's refusal. With a third domain,
    /// entries arrive by way of it.
    fn may_component(&self) -> bool {
        self.domains == 2 && !self.has_rails()
    }

    /// Whether a rank is in the domain of a victim.
    pub(crate) fn is_beside_victim(&self, rank: usize) -> bool {
        self.victims.iter().any(|victim| victim / self.size == rank / self.size)
    }

    pub(crate) fn ranks(&self) -> usize {
        self.domains * self.size
    }

    /// The config's sections: `path` at both levels; a fabric is between domains only.
    pub(crate) fn transport(&self, path: Path) -> String {
        const FAULTY: (&str, &str) = ("faulty", "inner = \"shm\"\nseed = 5");
        let (up, out) = match path {
            Path::Stores => (("shm", "load_store = true"), ("shm", "")),
            Path::Puts => (("shm", "load_store = false"), ("shm", "")),
            Path::Reordered => (FAULTY, FAULTY),
            Path::Mortal => (("mortal", ""), ("mortal", "")),
            Path::Tcp => (("shm", ""), ("libfabric", "provider = \"tcp\"")),
            Path::TcpProxied => {
                (("shm", ""), ("libfabric", "provider = \"tcp\"\nproxy_threads = 1"))
            }
            Path::Verbs => (("shm", ""), ("verbs", "")),
        };
        let level = |level: &str, (name, table): (&str, &str)| {
            format!("[transport.{level}]\nuse = \"{name}\"\n[transport.{level}.{name}]\n{table}\n")
        };
        let levels = level("scale_up", up) + &level("scale_out", out);
        format!("{levels}[topology]\ndomains = {}\n", self.domains)
    }
}

/// Sources whose rows do not reach a rank once the victims are lost.
pub(crate) fn absent_sources(order: &Order, rank: usize) -> Vec<usize> {
    exchange::absent_sources(&order.case(0), rank, order.victims())
}

/// A case for several domains, in another layout than the order's: there, a forwarder may learn of a loss
/// in the later of two operations before the earlier one is received.
pub(crate) fn other_layout(order: &Order, round: u64) -> Case {
    match order.spread {
        Some(_) => Order { layout: (order.layout + 1) % LAYOUT_COUNT, ..order.clone() }.case(round),
        None => order.case(round),
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    let mut add = |spread: Spread, loss: Loss| trials.push(trial(spread, loss));
    let anytime = [100, 600, 1700].map(Phase::Anytime);
    for (number, phase) in (0u8..).zip(Phase::ALL.into_iter().chain(anytime)) {
        let certain = number < Phase::ALL.len() as u8;
        for path in [Path::Stores, Path::Puts] {
            // The victim is the forwarder of rank 0's domain, in each layout; or a rank of the other
            // domain.
            let paired = number % LAYOUT_COUNT;
            for layout in (0..LAYOUT_COUNT).filter(|layout| certain || *layout == paired) {
                add(Spread::of(2, 2, &[1]), Loss::new(Worst::Killed, phase, layout, path));
            }
            add(Spread::of(2, 2, &[3]), Loss::new(Worst::Killed, phase, paired, path));
        }
        let path = [Path::Stores, Path::Puts][usize::from(number % 2)];
        let loss =
            |layout: u8| Loss::new(Worst::Killed, phase, (number + layout) % LAYOUT_COUNT, path);
        let reordered =
            Loss::new(Worst::Killed, phase, (number + 1) % LAYOUT_COUNT, Path::Reordered);
        add(Spread::of(2, 2, &[[1, 3][usize::from(number / 3 % 2)]]), reordered);
        add(Spread::of(3, 2, &[2]), loss(0));
        add(Spread::of(2, 3, &[4]), loss(1));
        // Both victims are on one rail, both in one domain, or neither.
        add(Spread::of(2, 2, &[1, 3]), loss(0));
        add(Spread::of(2, 2, &[2, 3]), loss(1));
        add(Spread::of(2, 3, &[1, 5]), loss(2));
        add(Spread::of(3, 2, &[2, 5]), loss(0));
    }
    for (number, phase) in (0u8..).zip([
        Phase::Entered,
        Phase::DispatchReceive,
        Phase::CombineReceive,
        Phase::Between,
        Phase::Anytime(600),
    ]) {
        add(
            Spread::of(2, 2, &[1]),
            Loss::new(Worst::Stopped, phase, number % LAYOUT_COUNT, Path::Stores),
        );
        add(
            Spread::of(2, 2, &[3]),
            Loss::new(Worst::Stopped, phase, (number + 1) % LAYOUT_COUNT, Path::Puts),
        );
        add(
            Spread::of(2, 2, &[1]),
            Loss::new(Worst::Stopped, phase, (number + 2) % LAYOUT_COUNT, Path::Reordered),
        );
        add(
            Spread::of(2, 2, &[1]),
            Loss::new(Worst::Killed, phase, (number + 2) % LAYOUT_COUNT, Path::Tcp),
        );
        add(
            Spread::of(2, 2, &[3]),
            Loss::new(Worst::Killed, phase, number % LAYOUT_COUNT, Path::TcpProxied),
        );
    }
    trials
}

fn trial(spread: Spread, loss: Loss) -> Trial {
    let Loss { worst, phase, layout, path } = loss;
    let (layout, _) = LAYOUTS[usize::from(layout)];
    let victims: Vec<_> = spread.victims.iter().map(ToString::to_string).collect();
    let name = format!(
        "domains/{}x{}_without_{}/{}/{}/{layout}/{}",
        spread.domains,
        spread.size,
        victims.join("_"),
        worst.name(),
        phase.name(),
        path.name()
    );
    let run = move || -> Result<(), Failed> {
        let folder = tempfile::tempdir()?;
        let order = Order { spread: Some(spread), ..crate::order(&folder, loss) };
        crate::watch(&order).map_err(|error| Failed::from(format!("{error:#}")))
    };
    Trial::test(name, run)
}

/// Each survivor in turn refuses a dispatch, a replay and a combine, and has no room for a dispatch. All
/// ranks learn of it, even where the path of its rows is cut, and go on.
pub(crate) fn refuse_in_turn(
    order: &Order,
    comm: &mut Communicator,
    tensors: &InputTensors,
    handle: &Handle,
) -> Result<()> {
    let case = order.case(0);
    let Some(spread) = order.spread.as_ref().filter(|spread| !spread.may_component()) else {
        return Ok(());
    };
    for refuser in order.survivors() {
        let bad = refuser == order.rank;
        let expected = if bad { ErrorKind::InvalidInput } else { ErrorKind::Refused };
        let found = [
            refuse_dispatch(order, comm, bad)?,
            refuse_replay(&case, comm, tensors, handle, bad)?,
            refuse_combine(&case, comm, tensors, handle, bad)?,
        ];
        ensure!(found == [expected; 3], "rank {refuser} refused: found {found:?}");
        if spread.has_rails() {
            let found = lack_room(order, comm, bad)?;
            ensure!(found == ErrorKind::Full, "rank {refuser} had no room: found {found:?}");
        }
    }
    Ok(())
}

fn refuse_dispatch(order: &Order, comm: &mut Communicator, bad: bool) -> Result<ErrorKind> {
    let case = order.case(5000);
    let mut inputs = Inputs::for_rank(&case, order.rank);
    if bad {
        inputs.topk_idx[0] = case.experts as i64;
    }
    let tensors = InputTensors::new(&case, order.rank, inputs);
    match comm.dispatch(&tensors.dispatch()?) {
        Err(error) => Ok(error.kind()),
        Ok(_) => bail!("found an output of a refused dispatch"),
    }
}

/// Takes all of this rank's arena, except for less room than the rows of a handle need.
fn take_room(comm: &mut Communicator, handle: &Handle) -> Result<Vec<CombineInput>> {
    let mut taken = Vec::new();
    loop {
        match comm.combine_input(handle, DType::Bf16) {
            Ok(input) => taken.push(input),
            Err(error) if error.kind() == ErrorKind::Full => return Ok(taken),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A dispatch with counting, whose output is larger than the room that is left.
fn lack_room(order: &Order, comm: &mut Communicator, full: bool) -> Result<ErrorKind> {
    let flat = Case { layout: Layout::Flat, ..order.case(6000) };
    let tensors = InputTensors::new(&flat, order.rank, Inputs::for_rank(&flat, order.rank));
    let (_, handle) = comm.dispatch(&tensors.dispatch()?)?;
    // The room is taken until the dispatch is over.
    let _taken = if full { take_room(comm, &handle)? } else { Vec::new() };
    let layout = match order.layout {
        1 => order.case(0).layout,
        _ => Layout::Flat,
    };
    let case = Case { layout, worst_case: true, ..flat };
    let tensors = InputTensors::new(&case, order.rank, Inputs::for_rank(&case, order.rank));
    match comm.dispatch(&tensors.dispatch()?) {
        Err(error) => Ok(error.kind()),
        Ok(_) => bail!("found an output where a rank had no room"),
    }
}

fn refuse_replay(
    case: &Case,
    comm: &mut Communicator,
    tensors: &InputTensors,
    handle: &Handle,
    bad: bool,
) -> Result<ErrorKind> {
    let replay = tensors.replay()?;
    let nothing = TensorRef::from_bytes(&[], DType::Bf16, 0, case.hidden)?;
    let replay = if bad { Replay { x: nothing, ..replay } } else { replay };
    match comm.replay(handle, &replay) {
        Err(error) => Ok(error.kind()),
        Ok(_) => bail!("found an output of a refused replay"),
    }
}

fn refuse_combine(
    case: &Case,
    comm: &mut Communicator,
    tensors: &InputTensors,
    handle: &Handle,
    bad: bool,
) -> Result<ErrorKind> {
    let rows = handle.rows() + usize::from(bad);
    let x = Aligned::filled(rows * case.hidden * 2, 0);
    let mut out = Aligned::filled(tensors.tokens() * case.hidden * 2, 0);
    let combine = Combine::new(
        TensorRef::from_bytes(x.bytes(), DType::Bf16, rows, case.hidden)?,
        TensorMut::from_bytes(out.bytes_mut(), DType::Bf16, tensors.tokens(), case.hidden)?,
    );
    match comm.combine(handle, combine) {
        Err(error) => Ok(error.kind()),
        Ok(()) => bail!("found a sum of a refused combine"),
    }
}
