//! The request of a dispatch.

use tokenyard_core::moe::{DType, Layout, RegionLayout, RegionRows, RegionSpec, RowFormat, Shape};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::mode::Mode;

/// The form of received rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Format {
    pub(super) row: RowFormat,
    pub(super) dtype: u32,
    pub(super) scale_dtype: u32,
    pub(super) scale_columns: u64,
}

impl Format {
    fn of(call: &abi::TyDispatch, hidden: u32) -> Self {
        let groups = u64::from(hidden.div_ceil(128));
        let scaled = !call.scales.data.is_null();
        let (dtype, scale_dtype, scale_columns) = match call.cast {
            abi::TY_CAST_NONE if scaled => (call.x.dtype, call.scales.dtype, call.scales.shape[1]),
            abi::TY_CAST_NONE => (call.x.dtype, DType::F32.code(), 0),
            abi::TY_CAST_FP8_UE8M0 => {
                (DType::Fp8E4m3.code(), DType::I32.code(), groups.div_ceil(4))
            }
            _ => (DType::Fp8E4m3.code(), DType::F32.code(), groups),
        };
        let element = DType::from_code(dtype).map_or(1, DType::bytes) as u32;
        Self {
            row: RowFormat {
                x_bytes: hidden * element,
                scale_bytes: 4 * scale_columns as u32,
                weights: !call.topk_weights.data.is_null(),
            },
            dtype,
            scale_dtype,
            scale_columns,
        }
    }
}

/// How received rows are arranged.
fn layout_of(call: &abi::TyDispatch) -> Result<Layout> {
    let refuse = |message: String| {
        Err(Error::new(ErrorKind::Unsupported, "dispatch", message)
            .with_fix("use a version of the kernel set that knows it"))
    };
    if call.cast > abi::TY_CAST_FP8_UE8M0 {
        return refuse(format!("found cast {}; expected 0 to 3", call.cast));
    }
    match call.layout {
        abi::TY_LAYOUT_FLAT => Ok(Layout::Flat),
        abi::TY_LAYOUT_EXPERT_MAJOR => Ok(Layout::ExpertMajor {
            alignment: call.alignment,
            zero_padding: call.flags & abi::TY_DISPATCH_ZERO_PADDING != 0,
        }),
        abi::TY_LAYOUT_PACKED => Ok(Layout::Packed),
        other => refuse(format!("found layout {other}; expected 1 to 3")),
    }
}

/// The request of a dispatch. A refused call has no known request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) format: Format,
    pub(super) spec: RegionSpec,
    /// The most rows that may arrive, and their layout.
    pub(super) most: RegionRows,
    pub(super) room: RegionLayout,
    pub(super) worst: bool,
    pub(super) replay: bool,
    pub(super) mode: Mode,
}

impl Wanted {
    /// Whether rows are spread over the experts of their tokens while others arrive. `has_tiles`:
    /// the exchange supports it.
    pub(super) fn in_tiles(&self, has_tiles: bool) -> bool {
        self.spec.layout != Layout::Flat && has_tiles
    }

    /// The rows that a region is laid out for, if this many arrive.
    pub(super) fn rows(&self, counted: RegionRows) -> RegionRows {
        // Packed regions have space for all rows.
        let most = self.worst || self.spec.layout == Layout::Packed;
        if most { self.most } else { counted }
    }

    pub(super) fn of(call: &abi::TyDispatch, shape: &Shape, mode: Mode) -> Result<Self> {
        let format = Format::of(call, shape.hidden);
        let spec = RegionSpec { shape: *shape, layout: layout_of(call)?, row: format.row };
        Ok(Self {
            format,
            spec,
            most: RegionRows::worst(&spec)?,
            room: RegionLayout::worst(&spec)?,
            worst: call.flags & abi::TY_DISPATCH_WORST_CASE != 0,
            replay: call.flags & abi::TY_DISPATCH_REPLAY != 0,
            mode,
        })
    }
}
