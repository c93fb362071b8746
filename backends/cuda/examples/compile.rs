//! Compiles every kernel for every architecture, without a GPU, and says what each takes. Fails if
//! a kernel spills registers.

use tokenyard_core::Result;
use tokenyard_cuda::compile::{Architecture, Role, Rows, Up, compile};

const WANTED: [(u32, Rows); 4] =
    [(80, Rows::Vector), (90, Rows::Vector), (90, Rows::Tma), (100, Rows::Tma)];

/// Kernels of `exchange.cu`: over puts, a combine has one more; inside one of several domains, a
/// dispatch.
const PROGRAMS: [(Up, Role, usize); 4] = [
    (Up::Nvlink, Role::Direct, 10),
    (Up::Proxy, Role::Direct, 11),
    (Up::Nvlink, Role::Inside, 11),
    (Up::Proxy, Role::Inside, 12),
];

/// What the assembler says about one kernel.
#[derive(Default)]
struct Usage {
    kernel: String,
    registers: String,
    stack: String,
    spills: String,
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
        if let Some(stack) = before(line, " bytes stack frame") {
            last.stack = stack;
            last.spills = before(line, " bytes spill stores").unwrap_or_default();
        }
        if let Some(registers) = before(line, " registers") {
            last.registers = registers;
        }
    }
    all
}

fn main() -> Result<()> {
    println!(
        "{:<9} {:<7} {:<7} {:<7} {:<16} registers  stack  spilled",
        "target", "rows", "face", "role", "kernel"
    );
    let mut spilled = 0;
    let all = PROGRAMS.iter().flat_map(|program| WANTED.map(|target| (*program, target)));
    for ((up, role, kernels), (capability, rows)) in all {
        let architecture = Architecture { capability };
        let compiled = compile(architecture, rows, up, role)?;
        let usages = usages(&compiled.log);
        let found = usages.len();
        assert_eq!(found, kernels, "found {found} kernels; expected {kernels}: {}", compiled.log);
        for Usage { kernel, registers, stack, spills } in usages {
            let target = architecture.name();
            let words = [format!("{rows:?}"), format!("{up:?}"), format!("{role:?}")];
            let [rows, up, role] = words.map(|t| t.to_lowercase());
            println!(
                "{target:<9} {rows:<7} {up:<7} {role:<7} {kernel:<16} {registers:>9} {stack:>6} \
                 {spills:>8}"
            );
            spilled += usize::from(spills != "0");
        }
    }
    assert!(spilled == 0, "{spilled} kernels spill registers; expected none");
    Ok(())
}
