//! Compiles every kernel without a GPU, and prints the resources of each. Fails if a kernel spills registers, or
//! declares more shared memory than launches leave for declarations.
//!
//! Every program is compiled for sm_90a with bulk copies, and for the other architectures those whose registers
//! differ most. With the variable `TOKENYARD_TEST_ALL`, every program is compiled for every architecture.

use tokenyard_core::Result;
use tokenyard_core::transport::Transport as _;
use tokenyard_cuda::{Nvlink, Nvrtc, PLATFORM};
use tokenyard_device_put::DevicePut;
use tokenyard_gpu::compile::{Architecture, Compiled, Role, Rows, Target};
use tokenyard_gpu::warm::{
    Over, compile, compile_nic_probe, compile_probe, compile_ring_probe, compile_table,
};
use tokenyard_plugin_paced::{Paced, compile_engine};

const WANTED: [(u32, Rows); 4] =
    [(80, Rows::Vector), (90, Rows::Vector), (90, Rows::Tma), (100, Rows::Tma)];

/// Kernels of `exchange.cu` without bulk copies: over puts there is one more for a combine; inside one of several
/// domains there is one more for a dispatch.
fn programs() -> Result<[(Over, Role, usize); 8]> {
    let given = Nvlink::device_source()?;
    // SAFETY: the parameters that it points to are static.
    let nvlink = unsafe { Over::transport(&PLATFORM.dialect, "nvlink", Some(&given))? };
    let given = DevicePut::device_source()?;
    // SAFETY: as above.
    let puts = unsafe { Over::transport(&PLATFORM.dialect, "device-put", Some(&given))? };
    let ring = Over::gpu_ring();
    Ok([
        (nvlink.clone(), Role::Direct, 32),
        (nvlink.clone(), Role::Masked, 26),
        (ring.clone(), Role::Direct, 13),
        (puts.clone(), Role::Direct, 13),
        (puts, Role::InterDomain, 13),
        (nvlink, Role::IntraDomain, 13),
        (ring.clone(), Role::InterDomain, 13),
        (ring, Role::IntraDomain, 14),
    ])
}

/// Whether a default run compiles a program for a target: each program once, and for each other target one or two whose
/// registers differ most.
fn is_default(target: (u32, Rows), over: &str, role: Role) -> bool {
    matches!(
        (target, over, role),
        ((90, Rows::Tma), ..)
            | ((80, _), "nvlink", Role::Direct)
            | ((80, _), "gpu ring", Role::IntraDomain)
            | ((100, _), "nvlink", Role::Masked)
    )
}

/// With bulk copies there are fused combines of three types over loads and stores.
const FUSED: usize = 3;
/// Kernels of `probe.cu` with bulk copies.
const PROBE: usize = 7;
/// Kernels of `ring.cu`.
const RING_PROBE: usize = 2;

/// Kernels of `table.cu`.
const TABLE: usize = 7;
/// Kernels of `nic.cu`.
const NIC_PROBE: usize = 3;

/// Bytes of shared memory that a kernel may declare: `DECLARED` of `backends/gpu/src/moe/sizes.rs`.
const DECLARED: u32 = 2048;

/// The assembler's report about one kernel.
#[derive(Default)]
struct Usage {
    kernel: String,
    registers: String,
    stack: String,
    spills: String,
    /// Bytes of shared memory that the kernel declares.
    shared: u32,
}

impl Usage {
    fn fits(&self, is_masked: bool) -> bool {
        let spills = self.spills.parse().unwrap_or(u32::MAX);
        let most = most_spills(&self.kernel)[usize::from(is_masked)];
        spills <= most && self.shared <= DECLARED
    }
}

/// Bytes that a thread of a kernel may spill: without masks, and with them. Those of the low-latency combine cost time:
/// docs/history/decoding.md. Those of a dispatch are of the warp that looks at counts: 4096 rows take 0.1 % longer.
fn most_spills(kernel: &str) -> [u32; 2] {
    match kernel {
        "ty_dispatch" => [8, 8],
        "ty_dispatch_decode_cast_long" => [20, 44],
        "ty_dispatch_decode_long" => [0, 16],
        "ty_ring_posts" => [8, 0],
        // Around waits that last.
        "ty_nic_stream" => [16, 0],
        "ty_combine_decode_bf16" => [0, 20],
        "ty_combine_decode_f16" => [0, 12],
        "ty_combine_decode_f32" => [0, 16],
        "ty_combine_decode_bf16_long" | "ty_combine_decode_f16_long" => [288, 376],
        "ty_combine_decode_f32_long" => [88, 138],
        "ty_combine_decode_bf16_once" => [12, 28],
        "ty_combine_decode_f16_once" => [12, 32],
        "ty_combine_decode_bf16_logfmt" => [88, 80],
        // Beside the words that are looked at: of loops over tokens, and of waits that last.
        "ty_combine_rank_major_bf16" | "ty_combine_rank_major_f16" => [136, 0],
        _ => [0; 2],
    }
}

/// The number before `unit` in a line such as `48 bytes stack frame, 0 bytes spill stores`.
fn before(line: &str, unit: &str) -> Option<String> {
    let (left, _) = line.split_once(unit)?;
    left.split_whitespace().last().map(str::to_owned)
}

fn usages(log: &str) -> Vec<Usage> {
    let mut all: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            all.push(Usage { kernel, ..Usage::default() });
        }
        let Some(last) = all.last_mut() else { continue };
        // Functions that are called have lines of their own behind it.
        if !last.stack.is_empty() && !line.contains(" registers") {
            continue;
        }
        if let Some(stack) = before(line, " bytes stack frame") {
            last.stack = stack;
            last.spills = before(line, " bytes spill stores").unwrap_or_default();
        }
        if let Some(registers) = before(line, " registers") {
            last.registers = registers;
            last.shared =
                before(line, " bytes smem").map_or(0, |bytes| bytes.parse().unwrap_or(u32::MAX));
        }
    }
    all
}

/// Prints the resources of each kernel; returns the number of kernels that use too much.
fn show(capability: u32, rows: Rows, up: &str, compiled: &Compiled, kernels: usize) -> usize {
    let usages = usages(&compiled.log);
    let found = usages.len();
    assert_eq!(found, kernels, "found {found} kernels; expected {kernels}: {}", compiled.log);
    let target = Architecture::Sm(capability).name();
    let rows = format!("{rows:?}").to_lowercase();
    for Usage { kernel, registers, stack, spills, shared } in &usages {
        println!(
            "{target:<9} {rows:<7} {up:<15} {kernel:<27} {registers:>9} {stack:>6} {spills:>8} {shared:>7}"
        );
    }
    usages.iter().filter(|usage| !usage.fits(up.ends_with(" masked"))).count()
}

fn main() -> Result<()> {
    println!(
        "{:<9} {:<7} {:<15} {:<27} registers  stack  spilled  shared",
        "target", "rows", "device API", "kernel"
    );
    let mut too_much = 0;
    let all = std::env::var_os("TOKENYARD_TEST_ALL").is_some();
    for target in WANTED {
        let (capability, rows) = target;
        let compiler = &Nvrtc;
        let architecture = Architecture::Sm(capability);
        let about = Target { compiler, architecture, rows };
        for (over, role, kernels) in &programs()? {
            if !all && !is_default(target, over.name(), *role) {
                continue;
            }
            let name = format!("{} {role:?}", over.name()).to_lowercase();
            let compiled = compile(about, over, *role)?;
            let is_whole = *role != Role::IntraDomain && over.name() == "nvlink";
            let fused = if rows == Rows::Tma && is_whole { FUSED } else { 0 };
            too_much += show(capability, rows, &name, &compiled, *kernels + fused);
        }
        let kernels = if rows == Rows::Tma { PROBE } else { PROBE - 1 };
        too_much += show(capability, rows, "probe", &compile_probe(about)?, kernels);
        too_much += show(capability, rows, "ring probe", &compile_ring_probe(about)?, RING_PROBE);
        too_much += show(capability, rows, "table", &compile_table(about)?, TABLE);
        too_much += show(capability, rows, "paced", &compile_engine(about)?, 1);
        let given = Paced::device_source()?;
        // SAFETY: the parameters that it points to are static.
        let over = unsafe { Over::transport(&PLATFORM.dialect, "paced", Some(&given))? };
        too_much +=
            show(capability, rows, "nic probe", &compile_nic_probe(about, &over)?, NIC_PROBE);
    }
    assert!(
        too_much == 0,
        "{too_much} kernels spill registers, or declare more than {DECLARED} bytes of shared memory; \
         expected none"
    );
    Ok(())
}
