//! Calls without synchronisation, eager and captured in a graph. A graph works on memory at fixed
//! addresses. Before each launch the stream writes other rows, another routing and another T there, and
//! poisons the memory that the launch writes. After the launch the stream copies the received and the
//! combined rows, and the test compares the copies.

mod dropped;
mod fixed_memory;

use anyhow::{Context, Result};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{
    Communicator, Dispatch, Handle, Received, Replay, Sizes, ToolGraph,
};
use tokenyard_core::moe::DType;

use self::fixed_memory::{FixedMemory, GraphRoom, Variant, most_rows, spoil, variants};
use super::streams::{Delay, Plan, Track, WRONG, plain};
use super::{LAYOUTS, close, expect_error, l2, lacked_by, open_with};
use crate::moe::exchange::{self, dtype};
use crate::moe::oracle::{self, Case, Layout};
use crate::moe::round::Round;
use crate::suite::{Outcome, Rank, Test};

/// The body that every rank of a test runs on a communicator that skips synchronisation. It returns false
/// if an error has closed the communicator, and the world with it.
type OnCommunicator = fn(&Case, &mut Communicator) -> Result<bool>;

pub(super) fn tests() -> Vec<Test> {
    let every: [(&str, &str, OnCommunicator); 9] = [
        ("without_sync", "eager calls that no call waits for, on a stream that is behind", eager),
        (
            "thousand",
            "a graph launched 1,000 times with other rows, routing and T each time",
            thousand,
        ),
        ("two_handles", "two handles alive in a graph, all halves apart", two_handles),
        ("between", "a whole dispatch between the halves of another, in a graph", between),
        (
            "replay",
            "a graph that replays a handle and combines, with other rows each time",
            replays,
        ),
        ("refused", "a later call reports a bad routing inside a graph, by name", refused),
        (
            "dropped",
            "outputs and handles that are dropped in the capture: launches harm no other operation",
            dropped::dropped,
        ),
        (
            "full",
            "an arena that is full in a capture is an error there, and the graph is whole",
            full,
        ),
        ("with_sync", "a capture of a call that waits is refused, and no other is", with_sync),
    ];
    every
        .into_iter()
        .flat_map(|(name, about, body)| {
            LAYOUTS
                .map(|(word, layout)| with_graphs(&format!("{name}/{word}"), about, layout, body))
        })
        .collect()
}

fn with_graphs(name: &str, about: &str, layout: Layout, body: OnCommunicator) -> Test {
    l2(&format!("graphs/{name}"), about, 2, move |rank| run(rank, layout, body))
}

fn run(rank: &Rank<'_>, layout: Layout, body: OnCommunicator) -> Result<Outcome> {
    let case = Case { worst_case: true, ..plain(rank, layout) };
    let mut comm = open_with(rank, exchange::options(&case))?;
    if !comm.has_graphs() {
        let why =
            format!("kernel set `{}` has no calls without sync", comm.report().choices.kernels);
        close(vec![comm])?;
        return Ok(Outcome::NotSupported(why));
    }
    if let Some(form) = lacked_by(&comm, layout) {
        close(vec![comm])?;
        return Ok(Outcome::NotSupported(form.to_string()));
    }
    if !body(&case, &mut comm)? {
        return Ok(Outcome::PassAndOver);
    }
    Round::new(&case, comm.rank()).run(&mut comm).context("with the host, at the end")?;
    close(vec![comm])
}

fn eager(case: &Case, comm: &mut Communicator) -> Result<bool> {
    let me = comm.rank() as usize;
    let mut all = variants(comm, case, 9)?;
    let rows = most_rows(comm, case)?;
    let (mut place, mut delay) = (FixedMemory::new(comm, case)?, Delay::new(comm)?);
    place.make_room(comm, rows)?;
    let track = Track::new(comm)?;
    for (n, one) in all.iter_mut().enumerate() {
        delay.pass(&track.stream)?;
        place.bring(&track, one, me)?;
        let sent = place.send(comm, &track)?;
        let (received, handle) = comm.dispatch_recv(sent)?;
        // A call that waits may combine a dispatch that no call has waited for.
        delay.pass(&track.stream)?;
        if n % 3 == 2 {
            comm.flush()?;
        }
        place.combine(comm, &track, &handle)?;
        place.keep(&track, one, &received, me)?;
    }
    comm.flush()?;
    all.iter().enumerate().try_for_each(|(n, one)| one.check().with_context(|| at(n)))?;
    Ok(true)
}

fn at(n: usize) -> String {
    format!("variant {n}")
}

/// A graph with everything that must live as long as it is launched.
struct Captured {
    graph: ToolGraph,
    given: Vec<(Received, Handle)>,
    /// Poison for the received rows.
    wrong: GraphRoom,
}

impl Captured {
    /// Captures dispatches to these places, and their combines.
    fn new(
        comm: &mut Communicator,
        track: &Track,
        record: Record,
        places: &mut [FixedMemory],
    ) -> Result<Self> {
        let case = places.first().context("a place")?.case.clone();
        let rows = most_rows(comm, &case)?;
        places.iter_mut().try_for_each(|place| place.make_room(comm, rows))?;
        let wrong = GraphRoom::new(comm, dtype(case.received_elem()), [rows, case.hidden])?;
        track.stream.begin_capture()?;
        let recorded = record(comm, track, places);
        let graph = track.stream.end_capture();
        Ok(Self { given: recorded?, graph: graph?, wrong })
    }

    /// One launch: each place takes the inputs of one variant, and stores its results there.
    fn launch(
        &mut self,
        track: &Track,
        places: &mut [FixedMemory],
        variants: &mut [Variant],
        me: usize,
    ) -> Result<()> {
        for ((place, (received, _)), one) in places.iter_mut().zip(&mut self.given).zip(&*variants)
        {
            place.bring(track, one, me)?;
            spoil(track, received, &self.wrong)?;
        }
        // SAFETY: the memory that was recorded lives in `self` and in the places; the communicator's other
        // operations are on this stream or wait for it.
        unsafe { track.stream.launch(&self.graph)? }
        for ((place, (received, _)), one) in places.iter().zip(&self.given).zip(variants) {
            place.keep(track, one, received, me)?;
        }
        Ok(())
    }
}

/// Records dispatches to places, and their combines, on the stream.
type Record = fn(&mut Communicator, &Track, &mut [FixedMemory]) -> Result<Vec<(Received, Handle)>>;

fn record(
    comm: &mut Communicator,
    track: &Track,
    places: &mut [FixedMemory],
) -> Result<Vec<(Received, Handle)>> {
    let sent: Vec<_> = places.iter().map(|place| place.send(comm, track)).collect::<Result<_>>()?;
    let given: Vec<_> =
        sent.into_iter().map(|sent| comm.dispatch_recv(sent)).collect::<Result<_, _>>()?;
    for (place, (_, handle)) in places.iter_mut().zip(&given).rev() {
        place.combine(comm, track, handle)?;
    }
    Ok(given)
}

fn record_between(
    comm: &mut Communicator,
    track: &Track,
    places: &mut [FixedMemory],
) -> Result<Vec<(Received, Handle)>> {
    let [apart, whole] = &*places else { anyhow::bail!("found {} places", places.len()) };
    let sent = apart.send(comm, track)?;
    let second = whole.dispatch(comm, track)?;
    let given = vec![comm.dispatch_recv(sent)?, second];
    for (place, (_, handle)) in places.iter_mut().zip(&given) {
        place.combine(comm, track, handle)?;
    }
    Ok(given)
}

fn check_all(all: &[Variant], launch: usize) -> Result<()> {
    let check = |(n, one): (usize, &Variant)| one.check().with_context(|| at(n));
    all.iter().enumerate().try_for_each(check).with_context(|| format!("until launch {launch}"))
}

fn thousand(case: &Case, comm: &mut Communicator) -> Result<bool> {
    let me = comm.rank() as usize;
    let mut all = variants(comm, case, 20)?;
    let mut places = [FixedMemory::new(comm, case)?];
    let mut beside = FixedMemory::new(comm, case)?;
    let track = Track::new(comm)?;
    let mut captured = Captured::new(comm, &track, record, &mut places)?;
    beside.make_room(comm, captured.wrong.shape[0])?;
    for launch in 0..1000 {
        let n = launch % all.len();
        captured.launch(&track, &mut places, &mut all[n..=n], me)?;
        if launch % 100 == 37 {
            // Another dispatch without synchronisation, in the order of the same stream.
            beside.bring(&track, &all[n], me)?;
            let sent = beside.send(comm, &track)?;
            let (received, handle) = comm.dispatch_recv(sent)?;
            beside.combine(comm, &track, &handle)?;
            beside.keep(&track, &mut all[n], &received, me)?;
        }
        if n + 1 == all.len() {
            // Comparing waits for the stream; then calls without a stream may follow.
            check_all(&all, launch)?;
            if launch % 200 == 199 {
                Round::new(case, comm.rank()).run(comm).context("with the host, between")?;
            }
        }
    }
    comm.flush()?;
    Ok(true)
}

fn two_handles(case: &Case, comm: &mut Communicator) -> Result<bool> {
    pairs(case, comm, record)
}

fn between(case: &Case, comm: &mut Communicator) -> Result<bool> {
    pairs(case, comm, record_between)
}

fn pairs(case: &Case, comm: &mut Communicator, record: Record) -> Result<bool> {
    let me = comm.rank() as usize;
    let mut all = variants(comm, case, 8)?;
    let mut places = [FixedMemory::new(comm, case)?, FixedMemory::new(comm, case)?];
    let track = Track::new(comm)?;
    let mut captured = Captured::new(comm, &track, record, &mut places)?;
    for launch in 0..40 {
        let first = launch * 2 % all.len();
        captured.launch(&track, &mut places, &mut all[first..first + 2], me)?;
        if first + 2 == all.len() {
            check_all(&all, launch)?;
        }
    }
    comm.flush()?;
    Ok(true)
}

fn replays(case: &Case, comm: &mut Communicator) -> Result<bool> {
    let me = comm.rank() as usize;
    let tokens = oracle::Tokens::Exactly((0..case.ranks).map(|rank| [4, 0, 3][rank % 3]).collect());
    // Uses the handle of a call that waits, with exact sizes too: they are known then.
    for worst_case in [true, false] {
        let base = Case { worst_case, tokens: tokens.clone(), ..case.clone() };
        let first = Round::new(&base, comm.rank());
        let live = first.dispatch(comm)?;
        let most = live.handle.rows();
        let again = |n: u64| first.replayed(&Case { seed: 50 + n, ..base.clone() });
        let mut all: Vec<Variant> = (0..6)
            .map(|n| Variant::new(comm, Plan::of(&again(n), me)?, most))
            .collect::<Result<_>>()?;
        let mut place = FixedMemory::new(comm, &base)?;
        place.make_room(comm, live.handle.rows())?;
        let own = live.handle.tokens();
        (place.x.shape[0], place.out.shape[0]) = (own, own);
        let track = Track::new(comm)?;
        track.stream.begin_capture()?;
        let recorded = record_replay(comm, &track, &mut place, &live.handle);
        let graph = track.stream.end_capture();
        let (received, graph) = (recorded?, graph?);
        for launch in 0..30 {
            let n = launch % all.len();
            place.bring(&track, &all[n], me)?;
            // SAFETY: as in `Captured::launch`.
            unsafe { track.stream.launch(&graph)? }
            place.keep(&track, &mut all[n], &received, me)?;
            if n + 1 == all.len() {
                check_all(&all, launch)?;
            }
        }
        comm.flush()?;
        first.finish(comm, &live).context("the output of the handle's own dispatch")?;
    }
    Ok(true)
}

fn record_replay(
    comm: &mut Communicator,
    track: &Track,
    place: &mut FixedMemory,
    handle: &Handle,
) -> Result<Received> {
    let replay = Replay::new(place.x.tensor()?);
    let received = comm.on(track.name).without_sync().replay(handle, &replay)?;
    place.combine(comm, track, handle)?;
    Ok(received)
}

fn refused(case: &Case, comm: &mut Communicator) -> Result<bool> {
    let me = comm.rank() as usize;
    let tokens = oracle::Tokens::Exactly(vec![3; case.ranks]);
    let case = Case { tokens, ..case.clone() };
    let most = most_rows(comm, &case)?;
    let same = |n| Plan::new(comm, &Case { seed: n, ..case.clone() });
    let mut all: Vec<Variant> =
        (0..2).map(|n| Variant::new(comm, same(n)?, most)).collect::<Result<_>>()?;
    let mut places = [FixedMemory::new(comm, &case)?];
    let track = Track::new(comm)?;
    let mut captured = Captured::new(comm, &track, record, &mut places)?;
    captured.launch(&track, &mut places, &mut all[..1], me)?;
    all[0].check().context("before a refusal")?;
    if me == 0 {
        // An expert that does not exist.
        let wrong = vec![WRONG; all[1].plan.topk_idx.len()];
        all[1].topk_idx = comm.buffer(&wrong)?;
    }
    // Later work on the stream still runs, on any data.
    for n in [1, 0, 0] {
        captured.launch(&track, &mut places, &mut all[n..=n], me)?;
    }
    // Waits for the stream.
    all[0].kept[0].tensor(DType::U8, [1, 1], [1, 1])?.to_vec()?;
    // A rank may learn of the refusal from another rank that found it first.
    let kinds = [ErrorKind::Protocol, ErrorKind::PeerLost];
    let parts = ["no call waited", "rank 0 refused its input", "found expert"];
    expect_error(comm.flush(), &kinds, &parts)?;
    let round = Round::new(&case, comm.rank());
    let call = round.tensors.dispatch_on(comm)?;
    expect_error(comm.dispatch(&call), &kinds, &["was closed", "rank 0 refused its input"])?;
    Ok(false)
}

fn full(case: &Case, comm: &mut Communicator) -> Result<bool> {
    let place = FixedMemory::new(comm, case)?;
    let track = Track::new(comm)?;
    let mut given = Vec::new();
    // Memory for the dispatch at the end: what a capture has had serves no other operation again.
    let round = Round::new(case, comm.rank());
    let room: Vec<_> = (0..2).map(|_| round.dispatch(comm)).collect::<Result<_>>()?;
    track.stream.begin_capture()?;
    let refused = loop {
        let mut calls = comm.on(track.name).without_sync();
        match calls.dispatch(&place.call()?) {
            Ok(one) => given.push(one),
            Err(error) => break error,
        }
    };
    let graph = track.stream.end_capture();
    expect_error::<()>(Err(refused), &[ErrorKind::Full], &[])?;
    drop(graph.context("what was captured before")?);
    anyhow::ensure!(!given.is_empty(), "found no room at all");
    drop((given, room));
    comm.flush()?;
    Ok(true)
}

fn with_sync(case: &Case, comm: &mut Communicator) -> Result<bool> {
    let round = Round::new(case, comm.rank());
    let call = round.tensors.dispatch_on(comm)?;
    let track = Track::new(comm)?;
    track.stream.begin_capture()?;
    let refused = comm.on(track.name).dispatch(&call);
    let graph = track.stream.end_capture();
    let own = [ErrorKind::InvalidInput, ErrorKind::Refused];
    expect_error(refused, &own, &["captures a graph", "without synchronisation"])?;
    drop(graph);
    // An error that only this rank finds in a capture is reported to this rank only.
    track.stream.begin_capture()?;
    let exact = Dispatch { sizes: Sizes::Exact, ..call };
    let refused = comm.on(track.name).without_sync().dispatch(&exact);
    let graph = track.stream.end_capture();
    expect_error(refused, &[ErrorKind::InvalidInput], &["sizes: found exact"])?;
    drop(graph);
    Ok(true)
}
