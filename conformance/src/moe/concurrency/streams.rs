//! Operations in the order of a stream: nothing waits on the host, and results do not change. Every input,
//! output and expert output lies in device memory that holds its right content only while the stream may
//! use it, and other bytes before and after. Long copies hold the stream behind the host.

mod none_to_have;

use anyhow::{Context, Result};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{
    Buffer, Combine, Communicator, Dispatch, Handle, PendingDispatch, Received, Stream, TensorRef,
    ToolStream,
};
use tokenyard_core::moe::DType;

use self::none_to_have::none_to_have;
use super::chains::nth;
use super::replay::gradients;
use super::{LAYOUTS, close, expect_error, l2, lacked_by, open_with, small};
use crate::moe::exchange::{self, dtype, row_dtype};
use crate::moe::oracle::{
    self, Case, Combined, ExpertOutput, Input, Layout, RowType, Sums, expected_combine,
};
use crate::moe::round::Round;
use crate::suite::{Outcome, Rank, Test};

/// The body that every rank of a test runs on a communicator with streams.
type OnCommunicator = fn(&Case, &mut Communicator) -> Result<()>;

pub(super) fn tests() -> Vec<Test> {
    let every: [(&str, &str, OnCommunicator); 5] = [
        ("chain", "inputs and outputs change on the stream, before and behind each call", chain),
        ("dropped_early", "an output may be dropped while its stream still reads it", dropped),
        ("several_sms", "each call of each rank may name a number of multiprocessors", numbers),
        ("several_handles", "calls on two streams, handles combined in any order", several),
        ("refused", "what only the device refuses leaves stream and communicator usable", refused),
    ];
    let mut tests: Vec<Test> = every
        .into_iter()
        .flat_map(|(name, about, body)| {
            LAYOUTS
                .map(|(word, layout)| with_streams(&format!("{name}/{word}"), about, layout, body))
        })
        .collect();
    tests.push(l2(
        "streams/none_to_have",
        "a kernel set without streams refuses one on all ranks",
        2,
        none_to_have,
    ));
    tests
}

fn with_streams(name: &str, about: &str, layout: Layout, body: OnCommunicator) -> Test {
    l2(&format!("streams/{name}"), about, 2, move |rank| {
        let case = plain(rank, layout);
        let mut comm = open_with(rank, exchange::options(&case))?;
        if !comm.has_streams() {
            let kernels = comm.report().choices.kernels.clone();
            close(vec![comm])?;
            let why = format!("kernel set `{kernels}` has no streams");
            return Ok(Outcome::NotSupported(why));
        }
        if let Some(form) = lacked_by(&comm, layout) {
            close(vec![comm])?;
            return Ok(Outcome::NotSupported(form.to_string()));
        }
        body(&case, &mut comm)?;
        // Plain calls work after calls on a stream.
        Round::new(&case, comm.rank()).run(&mut comm).context("without a stream")?;
        close(vec![comm])
    })
}

/// A case whose rows travel and come back unchanged.
pub(super) fn plain(rank: &Rank<'_>, layout: Layout) -> Case {
    let input = Input::Plain(RowType::Bf16);
    let combine =
        oracle::Combine { row: RowType::Bf16, biases: 0, weighted: false, sums: Sums::ByRank };
    Case { input, combine, weights: false, ..small(rank, layout) }
}

/// Bytes that no test expects; as a routing they are refused.
pub(super) const WRONG: u8 = 0x7f;

/// Memory of an operation, with the right content and wrong content to copy there in stream order.
struct LiveStream {
    memory: Buffer,
    right: Buffer,
    wrong: Buffer,
    dtype: DType,
    shape: [usize; 2],
}

impl LiveStream {
    fn new(comm: &Communicator, bytes: &[u8], dtype: DType, shape: [usize; 2]) -> Result<Self> {
        let wrong = vec![WRONG; bytes.len()];
        let (memory, right) = (comm.buffer(&wrong)?, comm.buffer(bytes)?);
        Ok(Self { memory, right, wrong: comm.buffer(&wrong)?, dtype, shape })
    }

    fn view<'a>(&self, buffer: &'a Buffer) -> Result<TensorRef<'a>> {
        Ok(buffer.tensor(self.dtype, self.shape, [self.shape[1], 1])?)
    }

    fn tensor(&self) -> Result<TensorRef<'_>> {
        self.view(&self.memory)
    }

    /// Writes the right content, in stream order.
    fn restore(&mut self, stream: &ToolStream) -> Result<()> {
        let from = self.right.tensor(self.dtype, self.shape, [self.shape[1], 1])?;
        copy(stream, &mut self.memory, self.dtype, self.shape, &from)
    }

    /// Writes the wrong content, in stream order.
    fn spoil(&mut self, stream: &ToolStream) -> Result<()> {
        let from = self.wrong.tensor(self.dtype, self.shape, [self.shape[1], 1])?;
        copy(stream, &mut self.memory, self.dtype, self.shape, &from)
    }
}

/// Queues a copy over the front of a buffer.
pub(super) fn copy(
    stream: &ToolStream,
    to: &mut Buffer,
    dtype: DType,
    shape: [usize; 2],
    from: &TensorRef<'_>,
) -> Result<()> {
    let to = to.tensor_mut(dtype, shape)?;
    // SAFETY: a buffer is freed after all work on the streams of tools; so is an output of this stream.
    unsafe { stream.copy(&to, from)? }
    Ok(())
}

/// Makes a stream busy for milliseconds.
pub(super) struct Delay {
    to: Buffer,
    from: Buffer,
}

const DELAY_SHAPE: [usize; 2] = [1 << 15, 1 << 10];

impl Delay {
    pub(super) fn new(comm: &Communicator) -> Result<Self> {
        let bytes = vec![0; DELAY_SHAPE[0] * DELAY_SHAPE[1]];
        Ok(Self { to: comm.buffer(&bytes)?, from: comm.buffer(&bytes)? })
    }

    pub(super) fn pass(&mut self, stream: &ToolStream) -> Result<()> {
        let from = self.from.tensor(DType::U8, DELAY_SHAPE, [DELAY_SHAPE[1], 1])?;
        (0..64).try_for_each(|_| copy(stream, &mut self.to, DType::U8, DELAY_SHAPE, &from))
    }
}

/// A stream and its name.
pub(super) struct Track {
    pub(super) stream: ToolStream,
    pub(super) name: Stream,
}

impl Track {
    pub(super) fn new(comm: &Communicator) -> Result<Self> {
        let stream = comm.tool_stream()?;
        // SAFETY: tests drop their outputs before their tracks and use them on the same track only; their
        // buffers are freed after its work.
        let name = unsafe { stream.stream() };
        Ok(Self { stream, name })
    }
}

/// One dispatch and its combine: the inputs of a rank, and the results that it expects. Expert outputs do
/// not depend on the received rows, so the host need not read those.
pub(super) struct Plan {
    pub(super) case: Case,
    pub(super) x: Vec<u8>,
    pub(super) topk_idx: Vec<u8>,
    /// The outputs of this rank's experts.
    pub(super) rows: Vec<u8>,
    pub(super) arrived: oracle::Received,
    pub(super) combined: Combined,
}

impl Plan {
    pub(super) fn new(comm: &Communicator, case: &Case) -> Result<Self> {
        let me = comm.rank() as usize;
        Self::of(&Round::new(case, comm.rank()), me)
    }

    pub(super) fn of(round: &Round, me: usize) -> Result<Self> {
        let Round { case, inputs, .. } = round;
        let outputs: Vec<ExpertOutput> = gradients(round, case.seed)
            .into_iter()
            .map(|output| ExpertOutput { weights: None, ..output })
            .collect();
        Ok(Self {
            x: inputs.ranks[me].x.clone(),
            topk_idx: inputs.ranks[me].topk_idx.iter().flat_map(|e| e.to_le_bytes()).collect(),
            rows: outputs[me].rows.clone(),
            arrived: oracle::expected_dispatch(case, inputs, me),
            combined: expected_combine(case, inputs, &outputs, me)?,
            case: case.clone(),
        })
    }
}

/// One dispatch and its combine: all memory, and the expected results.
struct Journey {
    case: Case,
    x: LiveStream,
    topk_idx: LiveStream,
    rows: LiveStream,
    out: LiveStream,
    /// The multiprocessors that its next call names, or 0.
    sms: u32,
    /// Copies of the received and of the combined rows.
    kept: [Buffer; 2],
    arrived: oracle::Received,
    combined: Combined,
}

impl Journey {
    fn new(comm: &Communicator, case: &Case) -> Result<Self> {
        let plan = Plan::new(comm, &Case { worst_case: false, ..case.clone() })?;
        let Plan { case, x, topk_idx, rows, arrived, combined } = plan;
        let (tokens, row) = (case.tokens_of(comm.rank() as usize), row_dtype(case.combine.row));
        let row_count = rows.len() / (case.hidden * case.combine.row.bytes());
        let nothing = |array: &oracle::Array| vec![WRONG; array.rows * array.row_bytes()];
        let (here, back) = (nothing(&arrived.x), nothing(&combined.x));
        Ok(Self {
            x: LiveStream::new(comm, &x, dtype(case.sent_elem()), [tokens, case.hidden])?,
            topk_idx: LiveStream::new(comm, &topk_idx, DType::I64, [tokens, case.topk])?,
            rows: LiveStream::new(comm, &rows, row, [row_count, case.hidden])?,
            out: LiveStream::new(comm, &back, row, [tokens, case.hidden])?,
            sms: 0,
            kept: [comm.buffer(&here)?, comm.buffer(&back)?],
            arrived,
            combined,
            case,
        })
    }

    /// Writes the inputs, in stream order.
    fn bring(&mut self, track: &Track) -> Result<()> {
        self.x.restore(&track.stream)?;
        self.topk_idx.restore(&track.stream)
    }

    fn send<'a>(&'a self, comm: &mut Communicator, track: &Track) -> Result<PendingDispatch<'a>> {
        Ok(comm.on(track.name).with_sms(self.sms).dispatch_send(&self.call()?)?)
    }

    fn call(&self) -> Result<Dispatch<'_>> {
        let dispatch = Dispatch::new(self.x.tensor()?, self.topk_idx.tensor()?);
        Ok(Dispatch { layout: exchange::layout(&self.case), ..dispatch })
    }

    /// Spoils the inputs after a dispatch was received, and copies the received rows.
    fn keep(&mut self, track: &Track, received: &Received) -> Result<()> {
        self.x.spoil(&track.stream)?;
        self.topk_idx.spoil(&track.stream)?;
        let shape = [received.rows(), self.case.hidden];
        let dtype = dtype(self.case.received_elem());
        copy(&track.stream, &mut self.kept[0], dtype, shape, &received.x()).context("keep rows")
    }

    fn dispatch(&mut self, comm: &mut Communicator, track: &Track) -> Result<(Received, Handle)> {
        self.bring(track)?;
        let pending = self.send(comm, track)?;
        let (received, handle) = comm.dispatch_recv(pending)?;
        self.keep(track, &received)?;
        Ok((received, handle))
    }

    /// Writes the expert outputs in stream order, to the caller's memory or to the arena's, combines them
    /// and copies the combined rows.
    fn combine(
        &mut self,
        comm: &mut Communicator,
        track: &Track,
        handle: &Handle,
        in_arena: bool,
    ) -> Result<()> {
        let dtype = self.rows.dtype;
        let mut room = match in_arena {
            true => Some(comm.combine_input(handle, dtype)?),
            false => None,
        };
        match &mut room {
            Some(room) => {
                let from = self.rows.view(&self.rows.right)?;
                // SAFETY: buffer and room are freed in stream order, after this copy.
                unsafe { track.stream.copy(&room.tensor_mut(), &from)? }
            }
            None => self.rows.restore(&track.stream)?,
        }
        let x = match &room {
            Some(room) => room.tensor(),
            None => self.rows.tensor()?,
        };
        let out_shape = self.out.shape;
        let combine = Combine::new(x, self.out.memory.tensor_mut(dtype, out_shape)?);
        comm.on(track.name).with_sms(self.sms).combine(handle, combine)?;
        drop(room);
        self.rows.spoil(&track.stream)?;
        let from = self.out.view(&self.out.memory)?;
        copy(&track.stream, &mut self.kept[1], dtype, out_shape, &from)?;
        self.out.spoil(&track.stream)
    }

    fn check_arrived(&self) -> Result<()> {
        let array = &self.arrived.x;
        let shape = [array.rows, array.width];
        let kept = self.kept[0].tensor(dtype(array.elem), shape, [array.width, 1])?.to_vec()?;
        array.compare(&kept).map_err(|e| anyhow::anyhow!("what arrived: {e}"))
    }

    fn check_combined(&self) -> Result<()> {
        let kept = self.out.view(&self.kept[1])?.to_vec()?;
        self.combined.x.compare(&kept).map_err(|e| anyhow::anyhow!("what came back: {e}"))
    }
}

fn journeys(comm: &Communicator, case: &Case, count: u64) -> Result<Vec<Journey>> {
    (0..count).map(|n| Journey::new(comm, &nth(case, n))).collect()
}

fn at(n: usize) -> String {
    format!("journey {n}")
}

fn chain(case: &Case, comm: &mut Communicator) -> Result<()> {
    let mut journeys = journeys(comm, case, 9)?;
    let (track, mut delay) = (Track::new(comm)?, Delay::new(comm)?);
    for (n, journey) in journeys.iter_mut().enumerate() {
        if n == 5 {
            // Runs a call without a stream between calls on a stream that is behind the host.
            Round::new(case, comm.rank()).run(comm).context("without a stream, between")?;
        }
        delay.pass(&track.stream)?;
        let (received, handle) = journey.dispatch(comm, &track).with_context(|| at(n))?;
        delay.pass(&track.stream)?;
        journey.combine(comm, &track, &handle, n % 2 == 0).with_context(|| at(n))?;
        drop((received, handle));
    }
    comm.flush().context("flush")?;
    for (n, journey) in journeys.iter().enumerate() {
        journey.check_arrived().with_context(|| at(n))?;
        journey.check_combined().with_context(|| at(n))?;
    }
    Ok(())
}

/// More than a device has, too. Ranks name different ones in the same call, and so do the calls of a handle.
fn numbers(case: &Case, comm: &mut Communicator) -> Result<()> {
    const SMS: [u32; 6] = [1, 0, 2, 24, 7, 1024];
    let mut journeys = journeys(comm, case, 12)?;
    let track = Track::new(comm)?;
    for (n, journey) in journeys.iter_mut().enumerate() {
        journey.sms = SMS[(n + comm.rank() as usize) % SMS.len()];
        let (received, handle) = journey.dispatch(comm, &track).with_context(|| at(n))?;
        journey.sms = SMS[(n / 2 + comm.rank() as usize) % SMS.len()];
        journey.combine(comm, &track, &handle, n % 2 == 0).with_context(|| at(n))?;
        drop((received, handle));
    }
    comm.flush().context("flush")?;
    for (n, journey) in journeys.iter().enumerate() {
        journey.check_arrived().and_then(|()| journey.check_combined()).with_context(|| at(n))?;
    }
    let mut last = Journey::new(comm, case)?;
    last.bring(&track)?;
    let on = comm.on(track.name).with_sms(1025).dispatch(&last.call()?);
    expect_error(on, &[ErrorKind::InvalidInput], &["sms: found 1025", "0 to 1024"])?;
    Ok(())
}

fn dropped(case: &Case, comm: &mut Communicator) -> Result<()> {
    let mut journeys = journeys(comm, case, 12)?;
    let tracks = [Track::new(comm)?, Track::new(comm)?];
    let mut delay = Delay::new(comm)?;
    for (n, journey) in journeys.iter_mut().enumerate() {
        let track = &tracks[n % 2];
        journey.bring(track)?;
        let pending = journey.send(comm, track).with_context(|| at(n))?;
        let (received, handle) = comm.dispatch_recv(pending).with_context(|| at(n))?;
        // The other stream may start the next dispatch, whose rows need this place.
        delay.pass(&track.stream)?;
        journey.keep(track, &received)?;
        match n % 3 {
            0 => drop((received, handle)),
            _ => std::thread::spawn(move || drop((received, handle)))
                .join()
                .map_err(|_| anyhow::anyhow!("dropping an output panicked"))?,
        }
    }
    comm.flush().context("flush")?;
    journeys.iter().enumerate().try_for_each(|(n, j)| j.check_arrived().with_context(|| at(n)))
}

fn several(case: &Case, comm: &mut Communicator) -> Result<()> {
    let mut journeys = journeys(comm, case, 4)?;
    let tracks = [Track::new(comm)?, Track::new(comm)?];
    let mut delay = Delay::new(comm)?;
    let mut live = Vec::new();
    for pair in journeys.chunks_mut(2) {
        for (journey, track) in pair.iter_mut().zip(&tracks) {
            delay.pass(&track.stream)?;
            journey.bring(track)?;
        }
        // Sends both before it receives the first.
        let [first, second] = pair else { continue };
        let sent = [first.send(comm, &tracks[0])?, second.send(comm, &tracks[1])?];
        let received: Vec<_> =
            sent.into_iter().map(|sent| comm.dispatch_recv(sent)).collect::<Result<_, _>>()?;
        for ((journey, track), one) in pair.iter_mut().zip(&tracks).zip(received) {
            journey.keep(track, &one.0)?;
            live.push(Some(one));
        }
    }
    for n in [2, 0, 3, 1] {
        let (received, handle) = live[n].take().context("each handle is combined once")?;
        drop(received);
        let track = &tracks[n % 2];
        journeys[n].combine(comm, track, &handle, n > 1).with_context(|| at(n))?;
    }
    comm.flush().context("flush")?;
    journeys.iter().enumerate().try_for_each(|(n, journey)| {
        journey.check_arrived().and_then(|()| journey.check_combined()).with_context(|| at(n))
    })
}

fn refused(case: &Case, comm: &mut Communicator) -> Result<()> {
    let tokens = oracle::Tokens::Exactly(vec![3; case.ranks]);
    let case = Case { tokens, ..case.clone() };
    let track = Track::new(comm)?;
    for n in 0..4 {
        let mut journey = Journey::new(comm, &Case { seed: n, ..case.clone() })?;
        journey.bring(&track)?;
        let bad = n % 2 == 0;
        if bad && comm.rank() == 0 {
            journey.topk_idx.spoil(&track.stream)?;
        }
        let sent = journey.send(comm, &track);
        // A kernel set may report a refusal in either half.
        let result = sent.and_then(|sent| Ok(comm.dispatch_recv(sent)?));
        if bad {
            let Err(error) = result else { anyhow::bail!("found success; expected a refusal") };
            let kind = error.downcast_ref::<tokenyard_core::Error>().map(|e| e.kind());
            let own = if comm.rank() == 0 { ErrorKind::InvalidInput } else { ErrorKind::Refused };
            anyhow::ensure!(kind == Some(own), "found {error:#}; expected {own:?}");
            continue;
        }
        let (received, handle) = result?;
        journey.keep(&track, &received)?;
        journey.combine(comm, &track, &handle, false)?;
        drop((received, handle));
        comm.flush().context("flush")?;
        journey
            .check_arrived()
            .and_then(|()| journey.check_combined())
            .context("after a refusal")?;
    }
    Ok(())
}
