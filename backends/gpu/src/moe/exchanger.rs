//! One exchange, planned: its engine, and what dispatch and combine keep beside it.

use std::sync::Arc;

use tokenyard_core::moe::{DType, Holder};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::config::GpuConfig;
use crate::decode::masked::Masked;
use crate::driver::{Context, RawStream};
use crate::engine::args::{Common, State};
use crate::engine::masking::Masks;
use crate::engine::places::Places;
use crate::engine::posting::Posting;
use crate::engine::{Added, Engine, Parts, Planned, Records};
use crate::moe::combine::Combine;
use crate::moe::copies::OutputCopies;
use crate::moe::dispatch::Dispatch;
use crate::moe::exchange::Exchange;
use crate::moe::faults::RoutingFaults;
use crate::moe::loaded::Kernels;
use crate::moe::quotient::factor;
use crate::moe::sizes::ARENA;
use crate::moe::state::{MoeState, PlannedExchange};

/// No bad entry of a routing.
const NO_PROBLEM: u64 = u64::MAX;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Exchanger {
    /// Dropped first: it ends the kernels.
    pub(crate) engine: Engine,
    pub(crate) moe: MoeState,
}

impl Exchanger {
    /// # Safety
    /// Objects that the plan points to (except for the list of windows) outlive the result.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        config: &GpuConfig,
        of: &PlannedExchange<'_>,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        let PlannedExchange { exchange, sizes, windows, counters, .. } = *of;
        let (member, after) = (exchange.member(), config.mask_after());
        // SAFETY: by this function's contract.
        let (masks, (posting, device_api)) = unsafe {
            (
                Masks::new(context, &member, exchange.ends_with_a_rank(), plan, after)?,
                Posting::new(context, &member, sizes.signals(), plan)?,
            )
        };
        let role = exchange.role(masks.is_some());
        let (engine_kernels, kernels) = Kernels::load(context, config, &device_api, role)?;
        let planned = Planned {
            member,
            records: Records { words: sizes.entry_words, end: sizes.entries(sizes.slots) },
            windows,
            counters: counters.of(&member),
            added: added(&exchange),
        };
        let parts = Parts {
            posting,
            params: device_api.params,
            masks,
            kernels: engine_kernels,
            places: Places::new(
                windows[ARENA],
                sizes.arena_bytes,
                format!("{} arena_mib", context.device.platform.names.table()),
            ),
            faults: Box::new(RoutingFaults { experts: exchange.regions.experts }),
        };
        // SAFETY: by this function's contract.
        let engine = unsafe { Engine::new(context, planned, parts, plan)? };
        Ok(Self { engine, moe: MoeState::new(context, config, of, kernels)? })
    }

    pub(crate) fn dispatch(&mut self) -> Dispatch<'_> {
        Dispatch { engine: &mut self.engine, moe: &mut self.moe }
    }

    pub(crate) fn combine(&mut self) -> Combine<'_> {
        Combine { engine: &mut self.engine, moe: &mut self.moe }
    }

    pub(crate) fn copies(&self) -> OutputCopies<'_> {
        OutputCopies { engine: &self.engine, moe: &self.moe }
    }

    pub(crate) fn masked(&mut self) -> Masked<'_> {
        Masked { engine: &mut self.engine, moe: &self.moe }
    }

    /// Forgets a stream that has ended: no later call may name it.
    pub(crate) fn forget(&mut self, stream: RawStream) {
        self.engine.forget(stream);
        self.moe.routing.forget(stream);
    }

    /// A region for the expert outputs of a handle.
    pub(crate) fn combine_input(
        &mut self,
        handle: u32,
        dtype: u32,
    ) -> Result<(u64, abi::TyTensor)> {
        self.engine.check()?;
        let Some(state) = self.moe.routing.handles.get(handle as usize) else {
            return Err(Error::new(ErrorKind::Internal, "combine input", "no such handle"));
        };
        let (rows, stream) = (state.rows, state.stream);
        let element = DType::from_code(dtype).map_or(4, DType::bytes) as u64;
        let columns = u64::from(self.moe.exchange.shape.hidden);
        let is_captured =
            stream.map_or(Ok(false), |stream| stream.is_captured(self.engine.order.context()))?;
        let (bytes, holder) = (rows * columns * element, Holder::CombineInput(handle));
        let region = match is_captured {
            true => self.engine.places.arena.allocate_captured(bytes, holder)?,
            false => self.engine.places.arena.allocate(bytes, holder)?,
        };
        if let Err(error) = self.engine.order.regions.lend(region.id, stream) {
            self.engine.places.arena.release(region.id);
            return Err(error);
        }
        let tensor = abi::TyTensor {
            data: (self.engine.places.address(&region)) as *mut u8,
            dtype,
            reserved: 0,
            shape: [rows, columns],
            stride: [columns as i64, 1],
        };
        Ok((region.id, tensor))
    }
}

/// The fields that dispatch and combine add to the arguments of each call, and to the state that kernels share.
fn added(exchange: &Exchange) -> Added {
    let shape = &exchange.shape;
    Added {
        common: Common {
            experts: shape.experts,
            topk: shape.topk,
            max_tokens: shape.max_tokens,
            group_count: exchange.groups,
            local: shape.local_experts(),
            local_factor: factor(shape.local_experts()),
            ..Common::NONE
        },
        state: State { problem: NO_PROBLEM, ..State::default() },
    }
}
