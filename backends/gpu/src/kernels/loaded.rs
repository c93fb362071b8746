//! The kernels of an exchange, loaded.

use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::moe::DType;

use super::device_api::DeviceApi;
use super::sizes::DECLARED;
use crate::compile::{self, Role, Rows};
use crate::config::{Decode, GpuConfig};
use crate::driver::{Context, DeviceFacts, Function, Module};

/// Kernels of low-latency operations: see `staging.cuh`.
#[derive(Debug)]
pub(super) struct StagedKernels {
    pub(super) dispatch: Function,
    /// The kernel for each type, as in [`Kernels`].
    pub(super) combine: [Function; 3],
    /// The kernel of a rank that does not take part.
    pub(super) refuse: Function,
}

impl StagedKernels {
    fn load(module: &Arc<Module>, most_shared: u32) -> Result<Self> {
        let kernels = Self {
            dispatch: module.cooperative("ty_dispatch_staged")?,
            combine: [
                module.cooperative("ty_combine_staged_bf16")?,
                module.cooperative("ty_combine_staged_f16")?,
                module.cooperative("ty_combine_staged_f32")?,
            ],
            refuse: module.function("ty_refuse_staged")?,
        };
        for kernel in kernels.combine.iter().chain([&kernels.dispatch, &kernels.refuse]) {
            kernel.allow_shared(most_shared.saturating_sub(DECLARED))?;
        }
        Ok(kernels)
    }
}

/// The kernel for each type that merges expert rows, pushes them and sums, as in [`Kernels`]: see
/// `fused_combine.cuh`.
type FusedKernels = [Function; 3];

/// The kernels.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) dispatch: Function,
    /// The kernel for each type: bf16, fp16, fp32. Where kernels put, it sums the returned rows.
    pub(super) combine: [Function; 3],
    /// Where kernels put: enters a combine, and puts rows back to their sources.
    pub(super) combine_put: Option<Function>,
    pub(super) arrive: Function,
    pub(super) spread: Function,
    /// The kernel for each type, as in `combine`.
    pub(super) merge: [Function; 3],
    pub(super) agree: Function,
    /// Where kernels load and store, in one domain.
    pub(super) fused: Option<FusedKernels>,
    /// Inside one of several domains: finds the group of each token.
    pub(super) group: Option<Function>,
    /// The kernels of low-latency operations, where rows of the packed layout are staged.
    pub(super) staged: Option<StagedKernels>,
    /// How they move rows.
    pub(super) rows: Rows,
}

impl Kernels {
    /// Compiles the kernels, unless that was done before, and grants them the shared memory of a
    /// block.
    pub(super) fn load(
        context: &Arc<Context>,
        config: &GpuConfig,
        device_api: &DeviceApi,
        role: Role,
    ) -> Result<Self> {
        let DeviceFacts { architecture, most_shared, .. } = context.device.facts()?;
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
        let combine_put = if puts { Some(module.function("ty_combine_put")?) } else { None };
        let spread = module.function("ty_spread")?;
        let merge = [
            module.function("ty_merge_bf16")?,
            module.function("ty_merge_f16")?,
            module.function("ty_merge_f32")?,
        ];
        for kernel in combine.iter().chain(&merge).chain(&combine_put).chain([&dispatch, &spread]) {
            kernel.allow_shared(most_shared.saturating_sub(DECLARED))?;
        }
        let arrive = module.function("ty_arrive")?;
        let agree = module.function("ty_agree")?;
        let group =
            if role == Role::IntraDomain { Some(module.function("ty_group")?) } else { None };
        let is_whole = role == Role::Direct && !puts;
        let fused = is_whole.then(|| fused(&module, most_shared)).transpose()?;
        let staged = match config.decode {
            Decode::LowLatency if is_whole => Some(StagedKernels::load(&module, most_shared)?),
            _ => None,
        };
        Ok(Self {
            dispatch,
            combine,
            combine_put,
            arrive,
            spread,
            merge,
            agree,
            fused,
            group,
            staged,
            rows,
        })
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
pub(super) fn summable(dtype: u32) -> (usize, u64) {
    match DType::from_code(dtype) {
        Some(DType::F16) => (1, 2),
        Some(DType::F32) => (2, 4),
        _ => (0, 2),
    }
}
