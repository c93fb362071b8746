//! The `cpu` kernel set with a rank that is lost inside a call: while kernels are planned, or before a
//! command is posted.

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::call::{AgreeCall, CombineCall, DispatchCall};
use tokenyard_core::export::{Exported, KERNELS_HEADER, KernelsComponent};
use tokenyard_core::host::BuiltIn;
use tokenyard_core::kernels::{KernelNeeds, KernelSet, KernelShape, Limits};
use tokenyard_core::transport::{Command, MemoryNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_cpu::CpuKernels;

use crate::LIMIT;
use crate::order::{Order, Phase};

/// The order of this process; set before it opens a communicator.
pub(crate) static ORDER: OnceLock<Order> = OnceLock::new();

/// The kernel set's name in a config.
pub(crate) const NAME: &str = "cpu_losing";

struct Losing(CpuKernels, KernelShape);

/// Whether the victim is in the operation in which it is lost.
static ARMED: AtomicBool = AtomicBool::new(false);
/// The command at which a victim is lost, and the link's own `post` for all others.
static HOOK: OnceLock<(Trigger, PostFn)> = OnceLock::new();

type PostFn = unsafe extern "C" fn(*mut c_void, u32, *const Command, usize, *mut usize) -> i32;

/// From now on the victim is lost at the command that its phase names.
pub(crate) fn arm() {
    ARMED.store(true, Ordering::Release);
}

/// The first command that a victim does not post. Signals of one kind have consecutive ids in the `cpu`
/// kernel set.
struct Trigger {
    phase: Phase,
    /// The number of signals of one kind.
    kind: u32,
    /// Whether rows come before the entry.
    lands: bool,
    /// This rank's control window.
    control: usize,
}

impl Trigger {
    fn names(&self, command: &Command) -> bool {
        let (is_entry, is_grant) =
            (command.signal / self.kind == 0, command.signal / self.kind == 1);
        match self.phase {
            // A rank that grants has sent its entry, and has received the entries of all.
            Phase::Entered => {
                if self.lands {
                    is_entry
                } else {
                    is_grant
                }
            }
            Phase::Refusing => (is_entry || is_grant) && command.peer == 0 && self.is_full(command),
            _ => false,
        }
    }

    /// Whether a record reports that there is no room: word 1 is its verdict.
    fn is_full(&self, command: &Command) -> bool {
        let record = (self.control + command.src_offset as usize) as *const u64;
        // SAFETY: the kernel set sends a record of its control window, which it has just written.
        unsafe { record.add(1).read() == 2 }
    }
}

unsafe extern "C" fn post(
    instance: *mut c_void,
    queue: u32,
    commands: *const Command,
    count: usize,
    accepted: *mut usize,
) -> i32 {
    let Some((trigger, post)) = HOOK.get() else { return abi::TY_INTERNAL };
    // SAFETY: by the contract of `post`.
    let batch = unsafe { std::slice::from_raw_parts(commands, count) };
    if ARMED.load(Ordering::Acquire) && batch.iter().any(|command| trigger.names(command)) {
        let worst = ORDER.get().map(Order::do_worst);
        assert!(matches!(worst, Some(Ok(()))), "{worst:?}");
    }
    // SAFETY: by the contract of `post`, which is that of the link.
    unsafe { post(instance, queue, commands, count, accepted) }
}

/// The plan, with a link whose commands pass through [`post`].
fn hook(order: &Order, shape: &KernelShape, plan: &abi::TyPlan) -> abi::TyPlan {
    let mut plan = *plan;
    let link = if plan.scale_up.table.is_null() { &mut plan.scale_out } else { &mut plan.scale_up };
    // SAFETY: the host passes judged tables, and windows that exist.
    let (mut table, control) = unsafe { (link.table.read(), (*plan.windows).pointer as usize) };
    let kind = shape.ranks * shape.in_flight;
    let lands = order.layout().has_fixed_places();
    let trigger = Trigger { phase: order.phase, kind, lands, control };
    if let Some(old) = table.post.replace(post) {
        HOOK.get_or_init(|| (trigger, old));
    }
    link.table = Box::leak(Box::new(table));
    plan
}

fn failed(why: &str) -> Error {
    Error::new(ErrorKind::Internal, "plan", why)
}

/// Runs once, with all links made: the victims are lost, and the others wait until they know it.
fn meet_loss(order: &Order, plan: &abi::TyPlan) -> anyhow::Result<()> {
    if order.victims().iter().all(|rank| order.marker("worst", *rank).exists()) {
        return Ok(());
    }
    order.mark("planning")?;
    let is_lost = |rank: &usize| {
        // SAFETY: the table has a byte per rank that is only accessed atomically (`TyPlan`).
        unsafe { &*plan.lost.add(*rank).cast::<AtomicU8>() }.load(Ordering::Acquire) != 0
    };
    let is_victim = order.is_victim();
    let start = Instant::now();
    loop {
        if is_victim && (0..order.ranks()).all(|rank| order.marker("planning", rank).exists()) {
            return order.do_worst();
        }
        if !is_victim && order.victims().iter().all(is_lost) {
            return Ok(());
        }
        anyhow::ensure!(start.elapsed() < LIMIT, "no rank was lost");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl KernelSet for Losing {
    const NAME: &'static str = NAME;
    const ABOUT: &'static str = "the cpu kernels, with losses inside of calls";
    type Config = <CpuKernels as KernelSet>::Config;

    fn probe(config: &Self::Config) -> Result<u32> {
        CpuKernels::probe(config)
    }

    fn open(config: Self::Config, shape: &KernelShape) -> Result<Self> {
        Ok(Self(CpuKernels::open(config, shape)?, *shape))
    }

    fn needs(&mut self, limits: &Limits) -> Result<KernelNeeds> {
        self.0.needs(limits)
    }

    fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        self.0.allocate(id, bytes, needs)
    }

    unsafe fn plan(&mut self, plan: &abi::TyPlan) -> Result<()> {
        let order = ORDER.get().ok_or_else(|| failed("no order"))?;
        if order.phase == Phase::Planning {
            meet_loss(order, plan).map_err(|error| failed(&format!("{error:#}")))?;
        }
        let hooked;
        let is_hooked = order.is_victim() && !order.back && order.phase != Phase::Planning;
        let plan = if is_hooked {
            hooked = hook(order, &self.1, plan);
            &hooked
        } else {
            plan
        };
        // SAFETY: by this function's contract; a table that is leaked lives for ever.
        unsafe { self.0.plan(plan) }
    }

    unsafe fn dispatch_send(&mut self, dispatch: &DispatchCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.0.dispatch_send(dispatch) }
    }

    fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.0.dispatch_recv(operation)
    }

    fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        self.0.combine_input(handle, dtype)
    }

    unsafe fn combine_send(&mut self, combine: &CombineCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.0.combine_send(combine) }
    }

    fn combine_recv(&mut self, operation: u64) -> Result<()> {
        self.0.combine_recv(operation)
    }

    fn agree(&mut self, call: &AgreeCall<'_>) -> Result<()> {
        self.0.agree(call)
    }

    fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }

    fn release(&mut self, region: u64) {
        self.0.release(region);
    }
}

const TABLES: &[*const abi::TyKernelsTable] = &[KernelsComponent::<Losing>::TABLE];
static KERNELS: Exported<abi::TyKernelsExport> = Exported(abi::TyKernelsExport {
    header: KERNELS_HEADER,
    components: TABLES.as_ptr(),
    count: TABLES.len(),
});

inventory::submit! { BuiltIn::Kernels(&KERNELS) }
