//! Operations beside MoE. They use the [`engine`](crate::engine), and no expert is known here.
//! Watched by `conformance/tests/pipes.rs`, `gathers.rs` and `tables.rs`.

pub(crate) mod gather;
pub(crate) mod line;
pub(crate) mod pipe;
pub(crate) mod reduce;
pub(crate) mod table;

use tokenyard_core::domains::Member;
use tokenyard_core::kernels::{KernelNeeds, KernelShape, Limits, NO_KERNEL_NEEDS};
use tokenyard_core::transport::Window;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::engine::control::Ids;
use crate::kernels::{inside, link_needs};
use gather::{Gather, GatherLayout};
use line::members;
use pipe::{Pipe, PipeLayout};
use table::{Table, TableLayout, two_levels};

/// The operation of an instance.
#[derive(Debug)]
pub(crate) enum Beside {
    Pipe(Pipe),
    Gather(Gather),
    Table(Table),
}

/// The layout of an instance's window.
enum Layout {
    Pipe(PipeLayout),
    Gather(GatherLayout),
    Table(TableLayout),
}

impl Layout {
    /// `puts`: some link of the ranks cannot store to peers.
    fn new(shape: &KernelShape, puts: bool) -> Result<Self> {
        match shape.runs {
            abi::TY_RUNS_PIPE => Ok(Self::Pipe(PipeLayout::new(shape, puts))),
            abi::TY_RUNS_GATHER => Ok(Self::Gather(GatherLayout::new(shape, puts))),
            abi::TY_RUNS_REDUCE => {
                reduce::check_even("in_flight", shape.in_flight.into())?;
                Ok(Self::Gather(GatherLayout::new(shape, puts)))
            }
            abi::TY_RUNS_TABLE if shape.domains > 1 => Err(two_levels(shape)),
            abi::TY_RUNS_TABLE => Ok(Self::Table(TableLayout::new(shape, puts))),
            other => {
                let text = format!("found operations {other}, which this kernel set does not know");
                Err(Error::new(ErrorKind::Unsupported, "open kernels", text))
            }
        }
    }

    fn bytes(&self) -> Option<u64> {
        match self {
            Self::Pipe(layout) => layout.bytes(),
            Self::Gather(layout) => layout.bytes(),
            Self::Table(layout) => layout.bytes(),
        }
    }

    fn capability(&self) -> u32 {
        match self {
            Self::Pipe(_) => abi::TY_KERNELS_CAP_PIPE,
            Self::Gather(layout) if layout.reduces.is_some() => {
                abi::TY_KERNELS_CAP_GATHER | abi::TY_KERNELS_CAP_REDUCE
            }
            Self::Gather(_) => abi::TY_KERNELS_CAP_GATHER,
            Self::Table(_) => abi::TY_KERNELS_CAP_TABLE,
        }
    }

    /// This rank on the links to others. Forwarders send the shards of other domains on; messages are not forwarded.
    fn members(&self, shape: &KernelShape, level: u64) -> Vec<Member> {
        members(shape, level, matches!(self, Self::Gather(_)))
    }
}

/// Whether a link of the ranks cannot store to peers. `links`: what those inside a domain and between domains can do.
fn puts(shape: &KernelShape, links: [u64; 2]) -> bool {
    let puts = |flags: u64| flags & abi::TY_CAP_LOAD_STORE == 0;
    puts(links[0]) || shape.domains > 1 && puts(links[1])
}

impl Beside {
    /// The needs of an instance.
    pub(crate) fn needs(shape: &KernelShape, limits: &Limits) -> Result<KernelNeeds> {
        let (is_up, inside) = inside(limits);
        let layout = Layout::new(shape, puts(shape, [inside.flags, limits.scale_out.flags]))?;
        let Some(bytes) = layout.bytes() else { return Err(too_large(shape)) };
        let mut needs =
            KernelNeeds { windows: 1, capabilities: layout.capability(), ..NO_KERNEL_NEEDS };
        needs.window_bytes[0] = bytes;
        let level = if is_up { abi::TY_LEVEL_SCALE_UP } else { abi::TY_LEVEL_SCALE_OUT };
        for member in layout.members(shape, level) {
            let ids = Ids { places: member.places(), in_flight: shape.in_flight };
            let is_up = member.level == abi::TY_LEVEL_SCALE_UP;
            let limits = if is_up { inside } else { &limits.scale_out };
            if matches!(layout, Layout::Table(_)) {
                table::check_link(limits)?;
            }
            let needed = link_needs(limits, ids);
            if is_up { needs.scale_up = needed } else { needs.scale_out = needed }
        }
        Ok(needs)
    }

    /// # Safety
    /// Everything that the plan points to (but for the list of windows) outlives the instance.
    pub(crate) unsafe fn new(shape: &KernelShape, plan: &abi::TyPlan) -> Result<Self> {
        let (level, inside) = match plan.scale_up.table.is_null() {
            true => (abi::TY_LEVEL_SCALE_OUT, &plan.scale_out),
            false => (abi::TY_LEVEL_SCALE_UP, &plan.scale_up),
        };
        let links = [inside, &plan.scale_out].map(|link| link.capabilities.flags);
        let layout = Layout::new(shape, puts(shape, links))?;
        // SAFETY: as below.
        let windows = unsafe { std::slice::from_raw_parts(plan.windows, plan.window_count) };
        let room = windows.first().map_or(0, |window: &Window| window.bytes);
        if layout.bytes().is_none_or(|bytes| bytes > room) {
            let text = format!(
                "found a window of {room} bytes; expected {:?}: a transport says another thing of its stores than when \
                 it was asked what it needs",
                layout.bytes()
            );
            return Err(Error::new(ErrorKind::Plugin, "plan kernels", text)
                .with_fix("report it to the author of the transport"));
        }
        let members = layout.members(shape, level);
        // SAFETY: by this function's contract.
        unsafe {
            match layout {
                Layout::Pipe(layout) => Pipe::new(shape, layout, members, plan).map(Self::Pipe),
                Layout::Gather(layout) => {
                    Gather::new(shape, layout, members, plan).map(Self::Gather)
                }
                Layout::Table(layout) => Table::new(shape, layout, members, plan).map(Self::Table),
            }
        }
    }

    pub(crate) fn pipe(&mut self) -> Result<&mut Pipe> {
        match self {
            Self::Pipe(pipe) => Ok(pipe),
            _ => Err(other_operation()),
        }
    }

    pub(crate) fn gather(&mut self) -> Result<&mut Gather> {
        match self {
            Self::Gather(gather) => Ok(gather),
            _ => Err(other_operation()),
        }
    }

    pub(crate) fn table(&mut self) -> Result<&mut Table> {
        match self {
            Self::Table(table) => Ok(table),
            _ => Err(other_operation()),
        }
    }

    pub(crate) fn flush(&mut self) -> Result<()> {
        match self {
            Self::Pipe(pipe) => pipe.flush(),
            Self::Gather(gather) => gather.flush(),
            Self::Table(table) => table.flush(),
        }
    }

    pub(crate) fn counters(&self) -> Option<abi::TyCounters> {
        match self {
            Self::Pipe(pipe) => pipe.counters(),
            Self::Gather(gather) => gather.counters(),
            Self::Table(table) => table.counters(),
        }
    }
}

#[cold]
fn other_operation() -> Error {
    Error::new(ErrorKind::Internal, "run operation", "the instance was planned for another one")
}

#[cold]
fn too_large(shape: &KernelShape) -> Error {
    if shape.runs == abi::TY_RUNS_TABLE {
        let KernelShape { layers, entries, message_bytes, .. } = *shape;
        let text = format!(
            "found {layers} layers of {entries} entries of {message_bytes} bytes; expected a window of less than 2^47 \
             bytes"
        );
        return Error::new(ErrorKind::InvalidInput, "plan needs", text)
            .with_fix("name fewer layers, entries or bytes");
    }
    let text = format!(
        "found {} bytes, {} times in flight, for each of {} ranks; expected a window of less than 2^47 bytes",
        shape.message_bytes, shape.in_flight, shape.ranks
    );
    Error::new(ErrorKind::InvalidInput, "plan needs", text).with_fix("name fewer bytes or slots")
}

#[cfg(test)]
mod tests {
    use tokenyard_core::kernels::kernel_shape;
    use tokenyard_core::moe::Shape;

    use super::*;

    #[test]
    fn an_odd_number_of_slots_is_refused_where_each_call_has_two() {
        let world = Shape { ranks: 4, experts: 0, topk: 0, hidden: 0, max_tokens: 0 };
        let of = |in_flight, runs| {
            let shape = kernel_shape(&world, 2, in_flight, 0);
            Layout::new(&KernelShape { runs, message_bytes: 64, ..shape }, true).map(|_| ())
        };
        of(3, abi::TY_RUNS_GATHER).unwrap();
        of(4, abi::TY_RUNS_REDUCE).unwrap();
        let error = of(3, abi::TY_RUNS_REDUCE).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("in_flight: found 3; expected an even one"), "{error}");
    }
}
