//! A dispatch's own rows as a source: the caller's tensors, or what they were cast to.

use tokenyard_core::call::{DispatchCall, WireFormat};
use tokenyard_core::moe::Cast;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::convert::{FloatType, Scaling, cast_row};
use crate::engine::launch::{CHUNK, Shared, pool_failed};
use crate::moe::launcher::Launcher;
use crate::moe::rows::writer::RowSource;

pub(crate) fn float_type(dtype: u32) -> Option<FloatType> {
    match dtype {
        1 => Some(FloatType::Bf16),
        2 => Some(FloatType::F16),
        3 => Some(FloatType::F32),
        _ => None,
    }
}

/// # Safety
/// The tensor is contiguous i64 and valid for `'a`.
pub(crate) unsafe fn i64_slice<'a>(tensor: &abi::TyTensor) -> &'a [i64] {
    let count = (tensor.shape[0] * tensor.shape[1]) as usize;
    if count == 0 {
        return &[];
    }
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts(tensor.data.cast(), count) }
}

impl Launcher {
    /// Reads the call's tensors, and casts rows where that is asked for.
    ///
    /// # Safety
    /// The call's tensors are valid until this operation is received.
    pub(crate) unsafe fn row_source(
        &mut self,
        call: &DispatchCall<'_>,
        format: &WireFormat,
    ) -> Result<RowSource> {
        let element = tokenyard_core::moe::DType::from_code(call.x.dtype).map_or(1, |d| d.bytes());
        let x_pitch = call.x.shape[1] as usize * element;
        let weights = call.topk_weights.data.cast::<f32>().cast_const();
        let sources = std::ptr::null();
        if call.cast == Cast::None {
            let pitch = call.scales.stride.map(|s| s as isize * 4);
            let scales = call.scales.data.cast_const();
            let x = call.x.data.cast_const();
            return Ok(RowSource { x, x_pitch, scales, scale_pitch: pitch, weights, sources });
        }
        // SAFETY: by this function's contract.
        unsafe { self.cast_rows(call, x_pitch, format.row.scale_bytes as usize)? };
        Ok(RowSource {
            x: self.scratch.cast_rows.as_ptr(),
            x_pitch: self.exchange.regions.hidden as usize,
            scales: self.scratch.cast_scales.as_ptr(),
            scale_pitch: [format.row.scale_bytes as isize, 4],
            weights,
            sources,
        })
    }

    /// # Safety
    /// As [`row_source`](Self::row_source).
    unsafe fn cast_rows(
        &mut self,
        call: &DispatchCall<'_>,
        x_pitch: usize,
        scale_bytes: usize,
    ) -> Result<()> {
        let scaling = match call.cast {
            Cast::None | Cast::Fp8 => Scaling::F32,
            Cast::Fp8Round => Scaling::RoundedF32,
            Cast::Fp8Ue8m0 => Scaling::Ue8m0,
        };
        let float = float_type(call.x.dtype).ok_or_else(|| {
            Error::new(ErrorKind::Internal, "cast rows", format!("type {}", call.x.dtype))
        })?;
        let (tokens, hidden) = (call.x.shape[0] as usize, self.exchange.regions.hidden as usize);
        let from = Shared(call.x.data.cast_const());
        let rows = Shared(self.scratch.cast_rows.as_mut_ptr());
        let scales = Shared(self.scratch.cast_scales.as_mut_ptr());
        let task = |chunk: usize| {
            let (from, rows, scales) = (from.get(), rows.get(), scales.get());
            for token in chunk * CHUNK..((chunk + 1) * CHUNK).min(tokens) {
                // SAFETY: row `token` is inside the tensor (T rows, validated by the host) and
                // inside the scratch (M >= T rows); every token belongs to one task.
                unsafe {
                    cast_row(
                        float,
                        std::slice::from_raw_parts(from.add(token * x_pitch), x_pitch),
                        scaling,
                        std::slice::from_raw_parts_mut(rows.add(token * hidden), hidden),
                        std::slice::from_raw_parts_mut(
                            scales.add(token * scale_bytes),
                            scale_bytes,
                        ),
                    );
                }
            }
        };
        self.pool.run(tokens.div_ceil(CHUNK), &task).map_err(|_| pool_failed("cast rows"))
    }
}
