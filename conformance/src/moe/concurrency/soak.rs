//! Many exchanges in one communicator, with every disturbance that may occur between them.

use std::time::Duration;

use anyhow::{Context, Result};
use tokenyard_core::communicator::Communicator;

use super::streams::Track;
use super::{LAYOUTS, chains, close, l2, lacked_by, open, small};
use crate::moe::exchange::Got;
use crate::moe::oracle::rng::{Rng, Stream};
use crate::moe::oracle::{Case, Layout};
use crate::moe::round::{Live, Round};
use crate::suite::{Outcome, Rank, Test};

/// The variable that sets another number of rounds than the suite's own.
const ROUNDS: &str = "TOKENYARD_SOAK_ROUNDS";

/// The suite's own number.
const USUAL: u64 = 100;

/// The longest pause of a rank.
const PAUSE_US: usize = 5000;

pub(super) fn tests() -> Vec<Test> {
    let about = format!("{USUAL} rounds, or {ROUNDS}: late ranks, poison, every layout, halves");
    vec![l2("soak", &about, 2, soak)]
}

fn rounds() -> Result<u64> {
    let Ok(text) = std::env::var(ROUNDS) else { return Ok(USUAL) };
    text.parse().with_context(|| format!("{ROUNDS}: found {text}; expected a number"))
}

fn soak(rank: &Rank<'_>) -> Result<Outcome> {
    let base = small(rank, Layout::Flat);
    let comm = open(rank, &base)?;
    let track = comm.has_graphs().then(|| Track::new(&comm)).transpose()?;
    let mut soak = Soak { comm, base, track };
    for n in 0..rounds()? {
        soak.round(n).with_context(|| format!("round {n}"))?;
    }
    let Soak { comm, track, .. } = soak;
    drop(track);
    close(vec![comm])
}

/// How the calls of a round are made.
#[derive(Clone, Copy, Debug)]
enum Calls {
    Whole,
    Halves,
    /// Halves in the order of a stream, for which no host waits. Where the kernel set has none: as `Halves`.
    HalvesInOrder,
}

const CALLS: [Calls; 3] = [Calls::Whole, Calls::Halves, Calls::HalvesInOrder];

struct Soak {
    comm: Communicator,
    base: Case,
    track: Option<Track>,
}

impl Soak {
    /// One round. All ranks draw the same numbers, so that they agree on which rank is late.
    fn round(&mut self, n: u64) -> Result<()> {
        let mut shared = Rng::new(n, Stream::Shared, 0);
        let (_, layout) = LAYOUTS[shared.below(LAYOUTS.len())];
        let layout = lacked_by(&self.comm, layout).map_or(layout, |_| Layout::Packed);
        let calls = CALLS[shared.below(CALLS.len())];
        let case = Case { layout, ..chains::nth(&self.base, n) };
        let worst_case = case.worst_case || self.in_order(calls).is_some();
        let round = Round::new(&Case { worst_case, ..case }, self.comm.rank());
        self.pause(&mut shared);
        let mut live = self.dispatch(&round, calls, &mut shared)?;
        self.pause(&mut shared);
        let got = self.combine(&round, calls, &mut live, &mut shared)?;
        round.check_combined(&got).with_context(|| format!("{calls:?}"))
    }

    fn in_order(&self, calls: Calls) -> Option<&Track> {
        self.track.as_ref().filter(|_| matches!(calls, Calls::HalvesInOrder))
    }

    fn dispatch(&mut self, round: &Round, calls: Calls, shared: &mut Rng) -> Result<Live> {
        if matches!(calls, Calls::Whole) {
            return round.dispatch(&mut self.comm);
        }
        let call = round.tensors.dispatch_on(&self.comm)?;
        let sent = match self.in_order(calls).map(|track| track.name) {
            Some(stream) => self.comm.on(stream).without_sync().dispatch_send(&call),
            None => self.comm.dispatch_send(&call),
        };
        let sent = sent.context("send a dispatch")?;
        self.pause(shared);
        let (received, handle) = self.comm.dispatch_recv(sent).context("receive a dispatch")?;
        self.comm.flush()?;
        round.check_received(&received).with_context(|| format!("{calls:?}"))?;
        Ok(Live { received, handle })
    }

    fn combine(
        &mut self,
        round: &Round,
        calls: Calls,
        live: &mut Live,
        shared: &mut Rng,
    ) -> Result<Got> {
        // The combine reads copies, so nothing below reads the rows that are poisoned here. A row that the next
        // dispatch does not write shows.
        let mut buffers = round.experts(&live.received)?;
        let rows = live.received.x().to_vec()?.len();
        live.received.x_mut().write(&vec![0xff; rows])?;
        let arguments = buffers.arguments(&round.tensors, &live.handle)?;
        let stream = self.in_order(calls).map(|track| track.name);
        let sent = match (calls, stream) {
            (Calls::Whole, _) => {
                self.comm.combine(&live.handle, arguments).context("combine")?;
                return buffers.into_got();
            }
            (_, Some(stream)) => {
                self.comm.on(stream).without_sync().combine_send(&live.handle, arguments)
            }
            (_, None) => self.comm.combine_send(&live.handle, arguments),
        };
        let sent = sent.context("send a combine")?;
        self.pause(shared);
        self.comm.combine_recv(sent).context("receive a combine")?;
        self.comm.flush()?;
        buffers.into_got()
    }

    /// One rank is late in one of four rounds.
    fn pause(&self, shared: &mut Rng) {
        let (late, turn) = (shared.below(self.base.ranks), shared.below(4));
        let time = Duration::from_micros(shared.below(PAUSE_US) as u64);
        if turn == 0 && late == self.comm.rank() as usize {
            std::thread::sleep(time);
        }
    }
}
