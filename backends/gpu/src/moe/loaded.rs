//! The kernels of an exchange, loaded.

use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::moe::DType;

use crate::compile::{self, Role, Rows};
use crate::config::{Decode, GpuConfig};
use crate::decode::loaded::DecodeKernels;
use crate::driver::{Context, DeviceFacts, Function, Module};
use crate::engine::EngineKernels;
use crate::engine::device_api::DeviceApi;
use crate::moe::sizes::DECLARED;

/// The kernel for each type that merges expert rows, pushes them and sums, as in [`Kernels`]: see
/// `fused_combine.cuh`.
type FusedKernels = [Function; 3];

/// The kernels.
#[derive(Debug)]
pub(crate) struct Kernels {
    pub(crate) dispatch: Function,
    /// The kernel for each type: bf16, fp16, fp32. Where kernels put, it sums the returned rows.
    pub(crate) combine: [Function; 3],
    /// Where kernels put: enters a combine, and puts rows back to their sources.
    pub(crate) combine_put: Option<Function>,
    pub(crate) spread: Function,
    /// The kernel for each type, as in `combine`.
    pub(crate) merge: [Function; 3],
    pub(crate) copy_out: Function,
    pub(crate) count_routing: Function,
    /// Where kernels load and store, in one domain.
    pub(crate) fused: Option<FusedKernels>,
    /// Inside one of several domains: finds the group of each token.
    pub(crate) group: Option<Function>,
    /// The kernels of low-latency operations, where rows of the packed layout are sent without a request.
    pub(crate) decode: Option<DecodeKernels>,
    /// How they move rows.
    pub(crate) rows: Rows,
}

impl Kernels {
    /// Compiles the kernels, unless that was done before, and grants them the shared memory of a
    /// block.
    pub(crate) fn load(
        context: &Arc<Context>,
        config: &GpuConfig,
        device_api: &DeviceApi,
        role: Role,
    ) -> Result<(EngineKernels, Self)> {
        let facts = context.device.facts()?;
        let DeviceFacts { architecture, most_shared, .. } = facts;
        let rows = compile::rows_of(config, architecture, device_api.source().by_host)?;
        let (image, _) = compile::kernels(
            context.device.platform,
            config,
            architecture,
            device_api.source(),
            role,
        )?;
        let module = Module::load(context, &image)?;
        let dispatch = module.cooperative("ty_dispatch")?;
        let combine = [
            module.cooperative("ty_combine_bf16")?,
            module.cooperative("ty_combine_f16")?,
            module.cooperative("ty_combine_f32")?,
        ];
        let puts = device_api.source().puts;
        let combine_put = if puts { Some(module.function("ty_return_put")?) } else { None };
        let spread = module.function("ty_spread")?;
        let merge = [
            module.function("ty_merge_bf16")?,
            module.function("ty_merge_f16")?,
            module.function("ty_merge_f32")?,
        ];
        for kernel in combine.iter().chain(&merge).chain(&combine_put).chain([&dispatch, &spread]) {
            kernel.allow_shared(most_shared.saturating_sub(DECLARED))?;
        }
        let of_engine = EngineKernels {
            arrive: module.function("ty_arrive")?,
            agree: module.function("ty_agree")?,
        };
        let copy_out = module.function("ty_copy_out")?;
        let count_routing = module.function("ty_count_routing")?;
        let group =
            if role == Role::IntraDomain { Some(module.function("ty_group")?) } else { None };
        let is_whole = role != Role::IntraDomain && !puts;
        // As in `exchange.cu`: bulk copies, or more than 128 registers for a thread.
        let has_fused = is_whole && (rows == Rows::Tma || facts.wave == 64);
        let fused = has_fused.then(|| fused(&module, most_shared)).transpose()?;
        let decode = match config.decode {
            Decode::LowLatency if is_whole => {
                Some(DecodeKernels::load(&module, &facts, role == Role::Masked)?)
            }
            _ => None,
        };
        let of_moe = Self {
            dispatch,
            combine,
            combine_put,
            spread,
            merge,
            copy_out,
            count_routing,
            fused,
            group,
            decode,
            rows,
        };
        Ok((of_engine, of_moe))
    }
}

fn fused(module: &Arc<Module>, most_shared: u32) -> Result<FusedKernels> {
    let kernels = [
        module.cooperative("ty_combine_fused_bf16")?,
        module.cooperative("ty_combine_fused_f16")?,
        module.cooperative("ty_combine_fused_f32")?,
    ];
    for kernel in &kernels {
        kernel.allow_shared(most_shared.saturating_sub(DECLARED))?;
    }
    Ok(kernels)
}

/// The index of a type's kernel, and the bytes of an element.
pub(crate) fn summable(dtype: u32) -> (usize, u64) {
    match DType::from_code(dtype) {
        Some(DType::F16) => (1, 2),
        Some(DType::F32) => (2, 4),
        _ => (0, 2),
    }
}

#[cfg(test)]
mod tests {
    /// Kernels that run beside the one that a dispatch or a combine has always.
    const BESIDE: [&str; 9] = [
        "ty_return_put",
        "ty_refuse_decode",
        "ty_spread",
        "ty_merge_",
        "ty_agree",
        "ty_group",
        "ty_copy_out",
        "ty_count_routing",
        "ty_arrive",
    ];

    /// Scripts ask a profiler for the one kernel whose name has the word.
    #[test]
    fn the_names_of_kernels_show_one_for_each_dispatch_and_each_combine() {
        let source = include_str!("../../device/exchange.cu");
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let words = source.split(|c: char| !is_part(c));
        let names: Vec<&str> = words.filter(|word| word.starts_with("ty_")).collect();
        for name in &names {
            let words = ["dispatch", "combine"].iter().filter(|word| name.contains(*word)).count();
            let is_beside = BESIDE.iter().any(|one| name.starts_with(one));
            assert_eq!(words, usize::from(!is_beside), "{name}");
        }
        assert!(names.len() > 20, "{names:?}");
    }
}
