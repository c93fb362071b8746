//! A kernel set without streams: each call that names one is refused, on all ranks.

use anyhow::{Context, Result};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::Stream;

use super::super::{close, expect_error, open_with};
use super::plain;
use crate::moe::exchange;
use crate::moe::oracle::Layout;
use crate::moe::round::Round;
use crate::suite::{Outcome, Rank};

pub(super) fn none_to_have(rank: &Rank<'_>) -> Result<Outcome> {
    let case = plain(rank, Layout::Flat);
    let mut comm = open_with(rank, exchange::options(&case))?;
    if comm.has_streams() {
        let why = format!("kernel set `{}` has streams", comm.report().choices.kernels);
        close(vec![comm])?;
        return Ok(Outcome::NotSupported(why));
    }
    expect_error(comm.tool_stream(), &[ErrorKind::Unsupported], &["has no streams"])?;
    // SAFETY: no code uses the name of a stream where the kernel set has no streams.
    let name = unsafe { Stream::new(std::ptr::null_mut()) };
    let round = Round::new(&case, comm.rank());
    let dispatch = round.tensors.dispatch_on(&comm)?;
    // The first rank alone passes a stream, then all ranks do.
    for on_all in [false, true] {
        let names_one = on_all || comm.rank() == 0;
        let result = match names_one {
            true => comm.on(name).dispatch(&dispatch),
            false => comm.dispatch(&dispatch),
        };
        let own = if names_one { ErrorKind::InvalidInput } else { ErrorKind::Refused };
        expect_error(result, &[own], &["stream: found one", "has no streams"])?;
    }
    let live = round.dispatch(&mut comm).context("after a refusal")?;
    let replay = round.tensors.replay_on(&comm)?;
    let result = comm.on(name).replay(&live.handle, &replay);
    expect_error(result, &[ErrorKind::InvalidInput], &["has no streams"])?;
    let mut buffers = round.experts(&live.received)?;
    let combine = buffers.arguments(&round.tensors, &live.handle)?;
    let result = comm.on(name).combine(&live.handle, combine);
    expect_error(result, &[ErrorKind::InvalidInput], &["has no streams"])?;
    round.finish(&mut comm, &live).context("after a refusal")?;
    let sent = comm.dispatch_send(&dispatch)?;
    expect_error(comm.flush(), &[ErrorKind::InvalidInput], &["sent and not received"])?;
    drop(comm.dispatch_recv(sent)?);
    comm.flush().context("flush")?;
    drop(live);
    // An operation that is no longer recorded has no trace, whether times are recorded or not.
    expect_error(comm.trace(2), &[ErrorKind::InvalidInput], &["one of the last 2"])?;
    if let Err(error) = comm.trace(0) {
        anyhow::ensure!(error.kind() == ErrorKind::Unsupported, "{error}");
    }
    close(vec![comm])
}
