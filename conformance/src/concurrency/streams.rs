//! Operations in the order of a stream: nothing waits on the host, and results are as ever. Every
//! input, output and expert output lies in device memory that holds something else but for the moment
//! in which the stream may be used for it; the stream is kept behind the host by copies that take long.

use anyhow::{Context, Result};
use tokenyard_core::ErrorKind;
use tokenyard_core::moe::DType;
use tokenyard_core::yard::{
    Buffer, Cast, Combine, Dispatch, Handle, PendingDispatch, Received, Sizes, Stream, TensorRef,
    ToolStream, Yard,
};

use super::chains::nth;
use super::replay::gradients;
use super::{LAYOUTS, close, expect_error, open_with, small};
use crate::exchange::{self, dtype, row_dtype};
use crate::oracle::{self, Case, Combined, ExpertOutput, Input, Layout, RowType, expected_combine};
use crate::round::Round;
use crate::suite::{Level, Outcome, Rank, Test};

/// What every rank of a test runs on a yard with streams.
type OnYard = fn(&Case, &mut Yard) -> Result<()>;

pub(super) fn tests() -> Vec<Test> {
    let every: [(&str, &str, OnYard); 4] = [
        ("chain", "inputs and outputs change on the stream, before and behind each call", chain),
        ("dropped_early", "an output may be dropped while its stream still reads it", dropped),
        ("several_handles", "calls on two streams, handles combined in any order", several),
        ("refused", "what only the device refuses leaves stream and yard usable", refused),
    ];
    let mut tests: Vec<Test> = every
        .into_iter()
        .flat_map(|(name, about, body)| {
            LAYOUTS
                .map(|(word, layout)| with_streams(&format!("{name}/{word}"), about, layout, body))
        })
        .collect();
    tests.push(Test {
        name: "l2/streams/none_to_have".to_owned(),
        level: Level::L2,
        ranks: 2,
        about: "a kernel set without streams refuses one on all ranks".to_owned(),
        body: Box::new(none_to_have),
    });
    tests
}

fn with_streams(name: &str, about: &str, layout: Layout, body: OnYard) -> Test {
    Test {
        name: format!("l2/streams/{name}"),
        level: Level::L2,
        ranks: 2,
        about: about.to_owned(),
        body: Box::new(move |rank| {
            let case = plain(rank, layout);
            let mut yard = open_with(rank, exchange::options(&case))?;
            if !yard.has_streams() {
                let kernels = yard.report().kernels.clone();
                close(vec![yard])?;
                let why = format!("kernel set `{kernels}` has no streams");
                return Ok(Outcome::NotSupported(why));
            }
            body(&case, &mut yard)?;
            // Plain calls go on behind calls on a stream.
            Round::new(&case, yard.rank()).run(&mut yard).context("without a stream")?;
            close(vec![yard])
        }),
    }
}

/// Rows that travel and come back as they are.
pub(super) fn plain(rank: &Rank<'_>, layout: Layout) -> Case {
    let input = Input::Plain(RowType::Bf16);
    let combine = oracle::Combine { row: RowType::Bf16, biases: 0, weighted: false };
    Case { input, combine, weights: false, ..small(rank, layout) }
}

/// Bytes that no test expects; as a routing they are refused.
pub(super) const WRONG: u8 = 0x7f;

/// Memory of an operation that is right for a moment.
struct Live {
    memory: Buffer,
    right: Buffer,
    wrong: Buffer,
    dtype: DType,
    shape: [usize; 2],
}

impl Live {
    fn new(yard: &Yard, bytes: &[u8], dtype: DType, shape: [usize; 2]) -> Result<Self> {
        let wrong = vec![WRONG; bytes.len()];
        let (memory, right) = (yard.buffer(&wrong)?, yard.buffer(bytes)?);
        Ok(Self { memory, right, wrong: yard.buffer(&wrong)?, dtype, shape })
    }

    fn view<'a>(&self, buffer: &'a Buffer) -> Result<TensorRef<'a>> {
        Ok(buffer.tensor(self.dtype, self.shape, [self.shape[1], 1])?)
    }

    fn tensor(&self) -> Result<TensorRef<'_>> {
        self.view(&self.memory)
    }

    /// What is right, from here on in the stream.
    fn mend(&mut self, stream: &ToolStream) -> Result<()> {
        let from = self.right.tensor(self.dtype, self.shape, [self.shape[1], 1])?;
        copy(stream, (&mut self.memory, self.dtype, self.shape), &from)
    }

    /// What is wrong.
    fn spoil(&mut self, stream: &ToolStream) -> Result<()> {
        let from = self.wrong.tensor(self.dtype, self.shape, [self.shape[1], 1])?;
        copy(stream, (&mut self.memory, self.dtype, self.shape), &from)
    }
}

/// Queues a copy over the front of a buffer.
pub(super) fn copy(
    stream: &ToolStream,
    (to, dtype, shape): (&mut Buffer, DType, [usize; 2]),
    from: &TensorRef<'_>,
) -> Result<()> {
    let to = to.tensor_mut(dtype, shape)?;
    // SAFETY: a buffer is freed behind all streams of tools, and so is an output of this stream.
    unsafe { stream.copy(&to, from)? }
    Ok(())
}

/// Keeps a stream busy for milliseconds.
pub(super) struct Delay {
    to: Buffer,
    from: Buffer,
}

const DELAY_SHAPE: [usize; 2] = [1 << 15, 1 << 10];

impl Delay {
    pub(super) fn new(yard: &Yard) -> Result<Self> {
        let bytes = vec![0; DELAY_SHAPE[0] * DELAY_SHAPE[1]];
        Ok(Self { to: yard.buffer(&bytes)?, from: yard.buffer(&bytes)? })
    }

    pub(super) fn pass(&mut self, stream: &ToolStream) -> Result<()> {
        let from = self.from.tensor(DType::U8, DELAY_SHAPE, [DELAY_SHAPE[1], 1])?;
        (0..64).try_for_each(|_| copy(stream, (&mut self.to, DType::U8, DELAY_SHAPE), &from))
    }
}

/// A stream and its name.
pub(super) struct Track {
    pub(super) stream: ToolStream,
    pub(super) name: Stream,
}

impl Track {
    pub(super) fn new(yard: &Yard) -> Result<Self> {
        let stream = yard.tool_stream()?;
        // SAFETY: tests drop their outputs before their tracks, use them on the same track only, and
        // their buffers are freed behind it.
        let name = unsafe { stream.stream() };
        Ok(Self { stream, name })
    }
}

/// One dispatch and its combine: what a rank brings, and what it expects. Expert outputs do not depend
/// on what arrives, so that no host need look at it.
pub(super) struct Plan {
    pub(super) case: Case,
    pub(super) x: Vec<u8>,
    pub(super) topk_idx: Vec<u8>,
    /// What this rank's experts give.
    pub(super) rows: Vec<u8>,
    pub(super) arrived: oracle::Received,
    pub(super) combined: Combined,
}

impl Plan {
    pub(super) fn new(yard: &Yard, case: &Case) -> Result<Self> {
        let me = yard.rank() as usize;
        Self::of(&Round::new(case, yard.rank()), me)
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

/// One dispatch and its combine: all memory, and what is expected.
struct Journey {
    case: Case,
    x: Live,
    topk_idx: Live,
    rows: Live,
    out: Live,
    /// Copies of what arrived, and of what came back.
    kept: [Buffer; 2],
    arrived: oracle::Received,
    combined: Combined,
}

impl Journey {
    fn new(yard: &Yard, case: &Case) -> Result<Self> {
        let plan = Plan::new(yard, &Case { worst_case: false, ..case.clone() })?;
        let Plan { case, x, topk_idx, rows, arrived, combined } = plan;
        let (tokens, row) = (case.tokens_of(yard.rank() as usize), row_dtype(case.combine.row));
        let row_count = rows.len() / (case.hidden * case.combine.row.bytes());
        let nothing = |array: &oracle::Array| vec![WRONG; array.rows * array.row_bytes()];
        let (here, back) = (nothing(&arrived.x), nothing(&combined.x));
        Ok(Self {
            x: Live::new(yard, &x, dtype(case.sent_elem()), [tokens, case.hidden])?,
            topk_idx: Live::new(yard, &topk_idx, DType::I64, [tokens, case.topk])?,
            rows: Live::new(yard, &rows, row, [row_count, case.hidden])?,
            out: Live::new(yard, &back, row, [tokens, case.hidden])?,
            kept: [yard.buffer(&here)?, yard.buffer(&back)?],
            arrived,
            combined,
            case,
        })
    }

    /// Brings the inputs, on the stream.
    fn bring(&mut self, track: &Track) -> Result<()> {
        self.x.mend(&track.stream)?;
        self.topk_idx.mend(&track.stream)
    }

    fn send<'a>(&'a self, yard: &mut Yard, track: &Track) -> Result<PendingDispatch<'a>> {
        let dispatch = Dispatch {
            x: self.x.tensor()?,
            scales: None,
            topk_idx: self.topk_idx.tensor()?,
            topk_weights: None,
            layout: exchange::layout(&self.case),
            cast: Cast::None,
            sizes: Sizes::Exact,
        };
        Ok(yard.on(track.name).dispatch_send(&dispatch)?)
    }

    /// Spoils the inputs behind a dispatch that was received, and keeps what arrived.
    fn keep(&mut self, track: &Track, received: &Received) -> Result<()> {
        self.x.spoil(&track.stream)?;
        self.topk_idx.spoil(&track.stream)?;
        let shape = [received.rows(), self.case.hidden];
        let dtype = dtype(self.case.received_elem());
        copy(&track.stream, (&mut self.kept[0], dtype, shape), &received.x()).context("keep rows")
    }

    fn dispatch(&mut self, yard: &mut Yard, track: &Track) -> Result<(Received, Handle)> {
        self.bring(track)?;
        let pending = self.send(yard, track)?;
        let (received, handle) = yard.dispatch_recv(pending)?;
        self.keep(track, &received)?;
        Ok((received, handle))
    }

    /// Brings the expert outputs on the stream, to the caller's memory or the arena's, combines them
    /// and keeps what came back.
    fn combine(
        &mut self,
        yard: &mut Yard,
        track: &Track,
        handle: &Handle,
        in_arena: bool,
    ) -> Result<()> {
        let dtype = self.rows.dtype;
        let mut room = match in_arena {
            true => Some(yard.combine_input(handle, dtype)?),
            false => None,
        };
        match &mut room {
            Some(room) => {
                let from = self.rows.view(&self.rows.right)?;
                // SAFETY: buffer and room are given back behind this stream.
                unsafe { track.stream.copy(&room.tensor_mut(), &from)? }
            }
            None => self.rows.mend(&track.stream)?,
        }
        let x = match &room {
            Some(room) => room.tensor(),
            None => self.rows.tensor()?,
        };
        let out_shape = self.out.shape;
        let combine = Combine {
            x,
            weights: None,
            bias: [None, None],
            weighted: false,
            out: self.out.memory.tensor_mut(dtype, out_shape)?,
            out_weights: None,
            missing: None,
        };
        yard.on(track.name).combine(handle, combine)?;
        drop(room);
        self.rows.spoil(&track.stream)?;
        let from = self.out.view(&self.out.memory)?;
        copy(&track.stream, (&mut self.kept[1], dtype, out_shape), &from)?;
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

fn journeys(yard: &Yard, case: &Case, count: u64) -> Result<Vec<Journey>> {
    (0..count).map(|n| Journey::new(yard, &nth(case, n))).collect()
}

fn at(n: usize) -> String {
    format!("journey {n}")
}

fn chain(case: &Case, yard: &mut Yard) -> Result<()> {
    let mut journeys = journeys(yard, case, 9)?;
    let (track, mut delay) = (Track::new(yard)?, Delay::new(yard)?);
    for (n, journey) in journeys.iter_mut().enumerate() {
        if n == 5 {
            // Between calls on a stream, while that is behind.
            Round::new(case, yard.rank()).run(yard).context("without a stream, between")?;
        }
        delay.pass(&track.stream)?;
        let (received, handle) = journey.dispatch(yard, &track).with_context(|| at(n))?;
        delay.pass(&track.stream)?;
        journey.combine(yard, &track, &handle, n % 2 == 0).with_context(|| at(n))?;
        drop((received, handle));
    }
    yard.flush().context("flush")?;
    for (n, journey) in journeys.iter().enumerate() {
        journey.check_arrived().with_context(|| at(n))?;
        journey.check_combined().with_context(|| at(n))?;
    }
    Ok(())
}

fn dropped(case: &Case, yard: &mut Yard) -> Result<()> {
    let mut journeys = journeys(yard, case, 12)?;
    let tracks = [Track::new(yard)?, Track::new(yard)?];
    let mut delay = Delay::new(yard)?;
    for (n, journey) in journeys.iter_mut().enumerate() {
        let track = &tracks[n % 2];
        journey.bring(track)?;
        let pending = journey.send(yard, track).with_context(|| at(n))?;
        let (received, handle) = yard.dispatch_recv(pending).with_context(|| at(n))?;
        // The other stream is free to go on with the next dispatch, whose rows want this place.
        delay.pass(&track.stream)?;
        journey.keep(track, &received)?;
        match n % 3 {
            0 => drop((received, handle)),
            _ => std::thread::spawn(move || drop((received, handle)))
                .join()
                .map_err(|_| anyhow::anyhow!("dropping an output panicked"))?,
        }
    }
    yard.flush().context("flush")?;
    journeys.iter().enumerate().try_for_each(|(n, j)| j.check_arrived().with_context(|| at(n)))
}

fn several(case: &Case, yard: &mut Yard) -> Result<()> {
    let mut journeys = journeys(yard, case, 4)?;
    let tracks = [Track::new(yard)?, Track::new(yard)?];
    let mut delay = Delay::new(yard)?;
    let mut live = Vec::new();
    for pair in journeys.chunks_mut(2) {
        for (journey, track) in pair.iter_mut().zip(&tracks) {
            delay.pass(&track.stream)?;
            journey.bring(track)?;
        }
        // Both are sent before one is received.
        let [first, second] = pair else { continue };
        let sent = [first.send(yard, &tracks[0])?, second.send(yard, &tracks[1])?];
        let received: Vec<_> =
            sent.into_iter().map(|sent| yard.dispatch_recv(sent)).collect::<Result<_, _>>()?;
        for ((journey, track), one) in pair.iter_mut().zip(&tracks).zip(received) {
            journey.keep(track, &one.0)?;
            live.push(Some(one));
        }
    }
    for n in [2, 0, 3, 1] {
        let (received, handle) = live[n].take().context("each handle is combined once")?;
        drop(received);
        let track = &tracks[n % 2];
        journeys[n].combine(yard, track, &handle, n > 1).with_context(|| at(n))?;
    }
    yard.flush().context("flush")?;
    journeys.iter().enumerate().try_for_each(|(n, journey)| {
        journey.check_arrived().and_then(|()| journey.check_combined()).with_context(|| at(n))
    })
}

fn refused(case: &Case, yard: &mut Yard) -> Result<()> {
    let tokens = oracle::Tokens::Exactly(vec![3; case.ranks]);
    let case = Case { tokens, ..case.clone() };
    let track = Track::new(yard)?;
    for n in 0..4 {
        let mut journey = Journey::new(yard, &Case { seed: n, ..case.clone() })?;
        journey.bring(&track)?;
        let bad = n % 2 == 0;
        if bad && yard.rank() == 0 {
            journey.topk_idx.spoil(&track.stream)?;
        }
        let sent = journey.send(yard, &track);
        // A kernel set may tell of a refusal in either half.
        let result = sent.and_then(|sent| Ok(yard.dispatch_recv(sent)?));
        if bad {
            let Err(error) = result else { anyhow::bail!("found success; expected a refusal") };
            let kind = error.downcast_ref::<tokenyard_core::Error>().map(|e| e.kind());
            let own = if yard.rank() == 0 { ErrorKind::InvalidInput } else { ErrorKind::Refused };
            anyhow::ensure!(kind == Some(own), "found {error:#}; expected {own:?}");
            continue;
        }
        let (received, handle) = result?;
        journey.keep(&track, &received)?;
        journey.combine(yard, &track, &handle, false)?;
        drop((received, handle));
        yard.flush().context("flush")?;
        journey
            .check_arrived()
            .and_then(|()| journey.check_combined())
            .context("after a refusal")?;
    }
    Ok(())
}

fn none_to_have(rank: &Rank<'_>) -> Result<Outcome> {
    let case = plain(rank, Layout::Flat);
    let mut yard = open_with(rank, exchange::options(&case))?;
    if yard.has_streams() {
        let why = format!("kernel set `{}` has streams", yard.report().kernels);
        close(vec![yard])?;
        return Ok(Outcome::NotSupported(why));
    }
    expect_error(yard.tool_stream(), &[ErrorKind::Unsupported], &["has no streams"])?;
    // SAFETY: nobody looks at the name of a stream where there are none.
    let name = unsafe { Stream::new(std::ptr::null_mut()) };
    let round = Round::new(&case, yard.rank());
    let dispatch = round.brought.dispatch_on(&yard)?;
    // On the first rank alone, and on all.
    for on_all in [false, true] {
        let names_one = on_all || yard.rank() == 0;
        let result = match names_one {
            true => yard.on(name).dispatch(&dispatch),
            false => yard.dispatch(&dispatch),
        };
        let own = if names_one { ErrorKind::InvalidInput } else { ErrorKind::Refused };
        expect_error(result, &[own], &["stream: found one", "has no streams"])?;
    }
    let live = round.dispatch(&mut yard).context("after a refusal")?;
    let replay = round.brought.replay_on(&yard)?;
    let result = yard.on(name).replay(&live.handle, &replay);
    expect_error(result, &[ErrorKind::InvalidInput], &["has no streams"])?;
    let mut buffers = round.experts(&live.received)?;
    let combine = buffers.arguments(&round.brought, &live.handle)?;
    let result = yard.on(name).combine(&live.handle, combine);
    expect_error(result, &[ErrorKind::InvalidInput], &["has no streams"])?;
    round.finish(&mut yard, &live).context("after a refusal")?;
    let sent = yard.dispatch_send(&dispatch)?;
    expect_error(yard.flush(), &[ErrorKind::InvalidInput], &["sent and not received"])?;
    drop(yard.dispatch_recv(sent)?);
    yard.flush().context("flush")?;
    drop(live);
    close(vec![yard])
}
