//! The kernels of an exchange, loaded.

use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::call::CombineCall;
use tokenyard_core::moe::{Compression, DType, logfmt};

use crate::compile::{self, Role, Rows};
use crate::config::{Decode, GpuConfig};
use crate::driver::{Context, DeviceFacts, Function, Module};
use crate::engine::device_api::DeviceApi;
use crate::moe::args::{CombineArgs, DispatchArgs, THREADS};
use crate::moe::sizes::DECLARED;

/// Kernels of low-latency operations: see `decode.cuh`.
#[derive(Debug)]
pub(crate) struct DecodeKernels {
    /// Dispatches of rows that are sent as they are given.
    dispatch: ByLength,
    /// Dispatches of rows that are cast.
    cast: ByLength,
    /// The kernel for each type, as in [`Kernels`].
    combine: [ByLength; 3],
    /// Combines of bf16 and of fp16 whose sums are rounded once.
    once: [Function; 2],
    /// Combines of bf16 whose sums travel in LogFMT-10.
    logfmt: Function,
    /// The kernel of a rank that does not take part.
    pub(crate) refuse: Function,
}

/// A kernel for rows of which each thread has few pieces of 16 bytes, and one for longer rows. Each has the code for
/// its length alone: blocks wait for instructions, too.
#[derive(Debug)]
struct ByLength {
    short: Function,
    /// Most pieces of a row of the first.
    most: u32,
    long: Function,
}

impl ByLength {
    /// `each`: the pieces of a thread in the first.
    fn load(module: &Arc<Module>, name: &str, each: u32, facts: &DeviceFacts) -> Result<Self> {
        let long = decode_kernel(module, &format!("{name}_long"), facts)?;
        Ok(Self { short: decode_kernel(module, name, facts)?, most: each * THREADS, long })
    }

    /// The kernel for rows of this many pieces.
    fn of(&self, pieces: u32) -> &Function {
        if pieces <= self.most { &self.short } else { &self.long }
    }
}

/// A kernel whose blocks wait for each other. If kernels may start early, this one does, and all its blocks
/// are resident soon. A multiprocessor has memory for one block, there are no more blocks than
/// multiprocessors, and the kernels that hold these wait for none of the blocks. Elsewhere the driver ensures
/// it.
fn decode_kernel(module: &Arc<Module>, name: &str, facts: &DeviceFacts) -> Result<Function> {
    let kernel = if facts.starts_early { module.early(name) } else { module.cooperative(name) }?;
    kernel.allow_shared(facts.most_shared.saturating_sub(DECLARED))?;
    Ok(kernel)
}

/// The kind of a low-latency sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SumKind {
    /// The index of the type, as in [`Kernels`].
    pub(crate) of_type: usize,
    /// It is rounded once.
    pub(crate) once: bool,
    /// It travels in LogFMT-10: a sum of bf16.
    coded: bool,
}

impl SumKind {
    pub(crate) fn of(call: &CombineCall<'_>) -> Self {
        let coded = call.compression == Compression::LogFmt10;
        Self { of_type: summable(call.x.dtype).0, once: call.round_once, coded }
    }

    /// Most bytes of a partial row for a row of this many numbers.
    pub(crate) fn partial_bytes(self, hidden: u32) -> u64 {
        if self.coded {
            return logfmt::most_bytes(hidden as usize) as u64;
        }
        u64::from(hidden) * if self.once || self.of_type == 2 { 4 } else { 2 }
    }
}

impl DecodeKernels {
    fn load(module: &Arc<Module>, facts: &DeviceFacts) -> Result<Self> {
        let find = |name: &str, each| ByLength::load(module, name, each, facts);
        let refuse = module.function("ty_refuse_decode")?;
        refuse.allow_shared(facts.most_shared.saturating_sub(DECLARED))?;
        Ok(Self {
            dispatch: find("ty_dispatch_decode", 2)?,
            cast: find("ty_dispatch_decode_cast", 1)?,
            combine: [
                find("ty_combine_decode_bf16", 2)?,
                find("ty_combine_decode_f16", 2)?,
                find("ty_combine_decode_f32", 2)?,
            ],
            once: [
                decode_kernel(module, "ty_combine_decode_bf16_once", facts)?,
                decode_kernel(module, "ty_combine_decode_f16_once", facts)?,
            ],
            logfmt: decode_kernel(module, "ty_combine_decode_bf16_logfmt", facts)?,
            refuse,
        })
    }

    /// The kernel of a dispatch.
    pub(crate) fn dispatch(&self, dispatch: &DispatchArgs) -> &Function {
        let kernels = if dispatch.cast != 0 { &self.cast } else { &self.dispatch };
        kernels.of((dispatch.row_bytes / 16) as u32 + dispatch.scale_words.div_ceil(4))
    }

    /// The kernel of a combine.
    pub(crate) fn combine(&self, combine: &CombineArgs, kind: SumKind) -> &Function {
        let pieces = (combine.row_bytes / 16) as u32;
        if kind.coded {
            return &self.logfmt;
        }
        // Sums of fp32 are rounded once in any case.
        match self.once.get(kind.of_type).filter(|_| kind.once) {
            Some(kernel) => kernel,
            None => self.combine[kind.of_type].of(pieces),
        }
    }
}

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
    pub(crate) arrive: Function,
    pub(crate) spread: Function,
    /// The kernel for each type, as in `combine`.
    pub(crate) merge: [Function; 3],
    pub(crate) agree: Function,
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
    ) -> Result<Self> {
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
        let arrive = module.function("ty_arrive")?;
        let agree = module.function("ty_agree")?;
        let copy_out = module.function("ty_copy_out")?;
        let count_routing = module.function("ty_count_routing")?;
        let group =
            if role == Role::IntraDomain { Some(module.function("ty_group")?) } else { None };
        let is_whole = role != Role::IntraDomain && !puts;
        // As in `exchange.cu`: bulk copies, or more than 128 registers for a thread.
        let has_fused = is_whole && (rows == Rows::Tma || facts.wave == 64);
        let fused = has_fused.then(|| fused(&module, most_shared)).transpose()?;
        let decode = match config.decode {
            Decode::LowLatency if is_whole => Some(DecodeKernels::load(&module, &facts)?),
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
            copy_out,
            count_routing,
            fused,
            group,
            decode,
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
