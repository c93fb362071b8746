//! Addressing: every (peer, window, offset) is its own place, and no put reaches another one.

use anyhow::Result;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::memory::{compare, pattern};
use super::needs::Needs;
use super::rig::Rig;
use super::waits::Total;
use super::{Body, TransportCase};

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "puts_reach_the_right_place",
    about: "every rank reaches every peer, itself included, at the named windows and offsets",
    invariants: "INV-1",
    ranks: &[2, 4],
    needs: Needs { windows: &[1 << 16, 1 << 13, 1 << 14], ..Needs::SMALL },
    body: Body::Connected(puts_reach_the_right_place),
    ..TransportCase::BARE
}];

/// Bytes of a cell. One (writer, source window) writes it. They are an odd number, and the cells beside it are of other
/// writers: a transport that writes whole words overwrites their bytes.
const CELL: usize = 39;
/// The window that receives values next to puts.
const VALUES: usize = 1;

/// One put: from `source`, a window of `writer`, to `target`, a window of `reader`.
#[derive(Clone, Copy)]
struct Reach {
    writer: u32,
    reader: u32,
    source: usize,
    target: usize,
}

impl Reach {
    fn payload(&self) -> Vec<u8> {
        let ranks = u64::from(self.writer) << 16 | u64::from(self.reader) << 8;
        pattern(ranks | (self.source * 8 + self.target) as u64, CELL)
    }

    /// The place of the payload: low in the source window, and different for each reader and pair of
    /// windows.
    fn from(&self, rig: &Rig<'_>) -> usize {
        8 + (self.reader as usize * rig.windows.len() + self.target) * CELL
    }

    /// The destination of the payload: the last cell ends with its window.
    fn to(&self, rig: &Rig<'_>) -> usize {
        cell(rig, self.target, self.writer, self.source)
    }
}

/// The cell of `writer` for puts from window `source`.
fn cell(rig: &Rig<'_>, window: usize, writer: u32, source: usize) -> usize {
    let cells = source * rig.ranks() as usize + writer as usize + 1;
    rig.windows[window].len() - cells * CELL
}

/// The place of the value of `writer`: between sources and cells.
fn value_cell(rig: &Rig<'_>, writer: u32) -> usize {
    rig.windows[VALUES].len() / 2 + 8 * writer as usize
}

fn value(writer: u32, reader: u32) -> u64 {
    0xabcd_0000_0000_0000 | u64::from(writer) << 8 | u64::from(reader)
}

/// Differs for each pair, so that a signal to a wrong rank shows.
fn add(writer: u32, reader: u32) -> u32 {
    1 + 16 * writer + reader
}

fn ways(rig: &Rig<'_>, writer: u32, reader: u32) -> impl Iterator<Item = Reach> + use<> {
    let windows = rig.windows.len();
    (0..windows).flat_map(move |source| {
        (0..windows).map(move |target| Reach { writer, reader, source, target })
    })
}

fn puts_reach_the_right_place(rig: &mut Rig<'_>) -> Result<()> {
    let (me, ranks) = (rig.me(), rig.ranks());
    let commands: Vec<_> = (0..ranks).flat_map(|peer| commands_to(rig, peer)).collect();
    let mut expected: Vec<_> = rig.windows.iter().map(|w| w.read(0, w.len())).collect();
    rig.barrier("sources are ready")?;
    rig.post(0, &commands)?;
    let totals: Vec<_> = (0..ranks)
        .map(|writer| {
            let puts = ways(rig, writer, me).count() as u64;
            let total = puts * u64::from(add(writer, me));
            Total { queue: 0, id: rig.signal(0, 0, writer), total }
        })
        .collect();
    rig.wait_signals(&totals)?;
    for writer in 0..ranks {
        for way in ways(rig, writer, me) {
            let (at, payload) = (way.to(rig), way.payload());
            let Reach { source, target, .. } = way;
            let what = format!("put of rank {writer} from its window {source} to window {target}");
            compare(&what, &rig.windows[target].read(at, CELL), &payload)?;
            expected[target][at..at + CELL].copy_from_slice(&payload);
        }
    }
    for writer in 0..ranks {
        let (at, value) = (value_cell(rig, writer), value(writer, me));
        let found = |rig: &Rig<'_>| rig.windows[VALUES].load(at);
        rig.wait(
            |rig| found(rig) == value,
            |rig| format!("value of rank {writer}: found {:#x}; expected {value:#x}", found(rig)),
        )?;
        expected[VALUES][at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }
    // Once all ranks have their payloads, no put is on its way that could reach a wrong place.
    rig.barrier("all arrived")?;
    for (id, (window, image)) in rig.windows.iter().zip(&expected).enumerate() {
        let what = format!("window {id} of rank {me}, all of it");
        compare(&what, &window.read(0, window.len()), image)?;
    }
    Ok(())
}

/// Writes the sources for `peer` and returns the commands that move them.
fn commands_to(rig: &Rig<'_>, peer: u32) -> Vec<Command> {
    let me = rig.me();
    let put = |way: Reach| {
        let from = way.from(rig);
        rig.windows[way.source].write(from, &way.payload());
        Command {
            op: abi::TY_OP_PUT_SIGNAL,
            peer,
            signal: rig.signal(0, 0, me),
            add: add(me, peer),
            src_window: way.source as u16,
            dst_window: way.target as u16,
            src_offset: from as u64,
            dst_offset: way.to(rig) as u64,
            bytes: CELL as u64,
            ..NO_COMMAND
        }
    };
    let mut commands: Vec<_> = ways(rig, me, peer).map(put).collect();
    commands.push(Command {
        op: abi::TY_OP_PUT_VALUE,
        peer,
        dst_window: VALUES as u16,
        dst_offset: value_cell(rig, me) as u64,
        value: value(me, peer),
        ..NO_COMMAND
    });
    commands
}
