//! Bring-up: the transport checks bytes that come from another process.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::rig::{Needs, Rig};
use super::{Body, TransportCase};
use crate::suite::Rank;

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "bring_up_refuses_damaged_endpoints",
    about: "endpoint bytes that are cut, lengthened or altered give an error within the deadline",
    invariants: "INV-6",
    ranks: &[2],
    needs: Needs::SMALL,
    body: Body::Alone(bring_up_refuses_damaged_endpoints),
    ..TransportCase::BARE
}];

/// The time that a connect with damaged bytes may wait for a peer.
const PATIENCE: Duration = Duration::from_millis(200);

fn bring_up_refuses_damaged_endpoints(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut alive = Rig::open(rank, needs, PATIENCE)?;
    let peer = alive.next();
    let good = alive.exchange_endpoints()?.swap_remove(peer as usize);
    for (name, data, may_pass) in damages(&good) {
        // Each connect has an instance of its own: a failed one may end its instance.
        let mut own = Rig::open(rank, needs, PATIENCE)?;
        let start = Instant::now();
        let refused = own.transport.connect(peer, &data).is_err();
        let took = start.elapsed();
        ensure!(
            refused || may_pass,
            "connect accepted an endpoint that was {name}, {} bytes for {}; expected an error",
            data.len(),
            good.len()
        );
        // A busy machine may take longer, but must not wait for ever (INV-6).
        let longest = PATIENCE + rank.config.world.deadline;
        ensure!(
            took < longest,
            "an endpoint that was {name} took {took:?}; expected at most {longest:?}"
        );
    }
    rank.world.barrier("all damages were tried")?;
    drop(alive);
    good_endpoints_still_work(rank, needs)
}

/// Name, bytes, and whether they may pass as an endpoint: a raw address of a fabric has no room for a
/// checksum, so one altered bit may stay unnoticed.
fn damages(good: &[u8]) -> Vec<(&'static str, Vec<u8>, bool)> {
    let half = &good[..good.len() / 2];
    let mut all = vec![
        ("lengthened by a byte", [good, &[0]].concat(), false),
        ("replaced by 4096 bytes of 0xff", vec![0xff; abi::TY_ENDPOINT_BYTES], false),
    ];
    if !good.is_empty() {
        all.extend([
            ("emptied", Vec::new(), false),
            ("cut in half", half.to_vec(), false),
            ("cut by a byte", good[..good.len() - 1].to_vec(), false),
            ("inverted", good.iter().map(|byte| !byte).collect(), false),
        ]);
        for at in [0, good.len() / 3, good.len() / 2, good.len() - 1] {
            let mut data = good.to_vec();
            data[at] ^= 0x10;
            all.push(("altered in one bit", data, true));
        }
    }
    all
}

fn good_endpoints_still_work(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut rig = Rig::bring_up(rank, needs)?;
    let (peer, signal) = (rig.next(), rig.signal(0, 0, rig.me()));
    rig.post(0, &[Command { op: abi::TY_OP_SIGNAL, peer, signal, add: 1, ..NO_COMMAND }])?;
    rig.wait_signal(0, rig.signal(0, 0, rig.previous()), 1)?;
    rig.end(true)
}
