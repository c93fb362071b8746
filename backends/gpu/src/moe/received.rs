//! The result of a dispatch in the arena, in the ABI's form.

use tokenyard_core::abi;
use tokenyard_core::arena_output::ArenaOutput;
use tokenyard_core::moe::Shape;

use crate::moe::operation::DispatchOp;

/// The received tokens of a dispatch in regions of a shape. `lost`: the address of the list of ranks that are
/// left out.
pub(crate) fn describe(op: &DispatchOp, shape: &Shape, lost: u64) -> abi::TyReceived {
    let output = &op.output;
    let exact = op.arrangement.has_fixed_places() && !op.worst;
    let tokens = if exact { op.received } else { output.rows.tokens };
    debug_assert!(op.received <= tokens);
    ArenaOutput {
        region: output.region,
        address: output.address as *mut u8,
        layout: &output.layout,
        arrangement: op.arrangement,
        tokens,
        rows: output.rows_of(op.arrangement, shape),
        format: &op.format,
        shape,
        lost: lost as *mut u8,
    }
    .describe()
}
