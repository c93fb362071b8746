//! The request of a dispatch.

use tokenyard_core::Result;
use tokenyard_core::call::{DispatchCall, WireFormat};
use tokenyard_core::moe::{RegionLayout, RegionRows, RegionSpec, Shape};

use crate::engine::mode::Mode;

/// The request of a dispatch. A refused call has no known request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) format: WireFormat,
    pub(crate) spec: RegionSpec,
    /// The most rows that may arrive, and their layout.
    pub(crate) most: RegionRows,
    pub(crate) room: RegionLayout,
    pub(crate) worst: bool,
    pub(crate) replay: bool,
    pub(crate) mode: Mode,
}

impl Wanted {
    /// Whether rows are spread over the experts of their tokens while others arrive. `has_tiles`:
    /// the exchange supports it.
    pub(crate) fn in_tiles(&self, has_tiles: bool) -> bool {
        !self.spec.layout.has_a_row_per_token() && has_tiles
    }

    /// The rows that a region is laid out for, if this many arrive.
    pub(crate) fn rows(&self, counted: RegionRows) -> RegionRows {
        let most = self.worst || self.spec.layout.has_fixed_places();
        if most { self.most } else { counted }
    }

    /// M of the call.
    pub(crate) fn max_tokens(&self) -> u32 {
        self.spec.shape.max_tokens
    }

    /// `shape`: that of regions, with M of the call.
    pub(crate) fn of(call: &DispatchCall<'_>, shape: &Shape, mode: Mode) -> Result<Self> {
        let format = call.format;
        let spec = RegionSpec::new(*shape, call.layout, format.row);
        Ok(Self {
            format,
            spec,
            most: RegionRows::worst(&spec)?,
            room: RegionLayout::worst(&spec)?,
            worst: call.worst_case,
            replay: call.is_replay,
            mode,
        })
    }
}
