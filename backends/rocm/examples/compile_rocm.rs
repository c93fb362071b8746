//! Compiles every kernel for gfx942 and gfx950, without a GPU and without ROCm, and prints the resources of
//! each. Fails if a kernel has more registers or private memory than the table beside this file allows, or
//! spills registers. Fails also if a kernel declares more shared memory than launches leave for declarations,
//! or contracts a product and a sum where it must not. It then prints the table anew, to be compared and
//! pasted.
//!
//! Every program is compiled for gfx942, and for gfx950 two that have every kernel. With the variable
//! `TOKENYARD_TEST_ALL`, every program is compiled for both.
//!
//! Its argument is the compiler: a `clang` with `ld.lld` beside it, or the `zig` of the package `ziglang`.

// A check may panic as a test may.
#![allow(clippy::expect_used)]

use std::path::PathBuf;

use tokenyard_core::Result;
use tokenyard_gpu::compile::{
    Architecture, Compiled, Compiler as _, Role, Rows, Source, SourceFile, Target,
};
use tokenyard_gpu::warm::{Over, compile, compile_probe, compile_ring_probe, compile_table};
use tokenyard_plugin_paced::compile_engine;
use tokenyard_rocm::Clang;

#[path = "compile_rocm/table.rs"]
mod table;

const WANTED: [Architecture; 2] = [Architecture::Gfx(0x942), Architecture::Gfx(0x950)];

/// The name of a program.
fn named(over: &Over, role: Role) -> String {
    format!("{} {role:?}", over.name()).to_lowercase()
}

/// Whether a run compiles a program, or one without a device API of its own, for a chip. Both chips have the same
/// number of registers for every kernel but one, which `xgmi masked` has.
fn is_wanted(chip: &str, program: &str) -> bool {
    let skipped = ["xgmi direct", "gpu ring direct", "xgmi intradomain"];
    std::env::var_os("TOKENYARD_TEST_ALL").is_some()
        || chip == "gfx942"
        || !skipped.contains(&program)
}

/// Kernels of `probe.cu` without bulk copies.
const PROBE: usize = 6;
/// Kernels of `ring.cu`.
const RING_PROBE: usize = 2;
/// Kernels of `table.cu`.
const TABLE: usize = 7;

/// Bytes of shared memory that a kernel may declare: `DECLARED` of `backends/gpu/src/moe/sizes.rs`.
const DECLARED: u32 = 2048;

/// Vector registers of a thread where a block of 512 has a unit for itself.
const REGISTERS: u32 = 256;

/// Registers of a thread and bytes of its private memory, at most.
fn most(chip: &str, program: &str, kernel: &str) -> Option<(u32, u32)> {
    let mut rows = table::MOST.iter();
    let row = rows.find(|(c, p, k, ..)| (*c, *p, *k) == (chip, program, kernel));
    row.map(|(.., registers, scratch)| (*registers, *scratch))
}

/// Instructions that multiply and add with one rounding.
const CONTRACTED: [&str; 5] = ["v_fma_f32", "v_fmac_f32", "v_mad_f32", "v_mac_f32", "v_pk_fma_f32"];

/// The report at the end of the assembly about one kernel.
#[derive(Default)]
struct Usage {
    kernel: String,
    registers: u32,
    spills: u32,
    scratch: u32,
    shared: u32,
}

/// The metadata of all kernels: a list in YAML, whose entries have their name among other keys.
fn usages(assembly: &str) -> Vec<Usage> {
    let (_, metadata) = assembly.rsplit_once("amdhsa.kernels:").unwrap_or_default();
    let metadata = metadata.split("\namdhsa.").next().unwrap_or_default();
    let kernels = metadata.split("\n  - ").skip(1);
    let value = |entry: &str, key: &str| {
        let mut found = entry.lines().filter_map(|line| line.trim().strip_prefix(key));
        found.next().map(|value| value.trim().to_owned()).unwrap_or_default()
    };
    kernels
        .map(|entry| {
            // An unknown number counts as too much.
            let number = |key| value(entry, key).parse().unwrap_or(u32::MAX);
            Usage {
                kernel: value(entry, ".symbol:").trim_end_matches(".kd").to_owned(),
                registers: number(".vgpr_count:"),
                spills: number(".vgpr_spill_count:"),
                scratch: number(".private_segment_fixed_size:"),
                shared: number(".group_segment_fixed_size:"),
            }
        })
        .collect()
}

/// The instructions of a kernel.
fn body<'a>(assembly: &'a str, kernel: &str) -> &'a str {
    let start = assembly.find(&format!("\n{kernel}:")).expect("the kernel is in the assembly");
    let rest = &assembly[start..];
    &rest[..rest.find("\n.Lfunc_end").expect("it ends")]
}

/// The faults and the resources that compilations have shown.
#[derive(Default)]
struct Found {
    faults: Vec<String>,
    /// Rows of the table as they would be now.
    rows: Vec<String>,
}

impl Found {
    /// The faults, and the table in the form of its file. Empty if there is no fault.
    fn text(mut self) -> String {
        let expected =
            table::MOST.iter().filter(|(chip, program, ..)| is_wanted(chip, program)).count();
        if self.rows.len() != expected {
            let found = self.rows.len();
            self.faults
                .push(format!("found {found} kernels; expected {expected}, as in the table"));
        }
        if self.faults.is_empty() {
            return String::new();
        }
        let (faults, rows) = (self.faults.join("\n"), self.rows.concat());
        format!(
            "{faults}\nIf each of these is meant, the rows of backends/rocm/examples/compile_rocm/table.rs are:\n\
             {rows}"
        )
    }
}

/// Prints the resources of each kernel, and notes them and the faults.
fn show(found: &mut Found, name: &str, program: &str, compiled: &Compiled, kernels: usize) {
    let assembly = &compiled.log;
    let usages = usages(assembly);
    assert_eq!(usages.len(), kernels, "{name}, {program}: found another number of kernels");
    for Usage { kernel, registers, spills, scratch, shared } in &usages {
        println!(
            "{name:<7} {program:<20} {kernel:<21} {registers:>9} {spills:>7} {scratch:>7} {shared:>6}"
        );
        found.rows.push(format!(
            "    (\"{name}\", \"{program}\", \"{kernel}\", {registers}, {scratch}),\n"
        ));
        let about = format!("{name}, {program}, {kernel}");
        match most(name, program, kernel) {
            None => found.faults.push(format!("{about}: it is not in the table")),
            Some((most, private)) if *registers > most || *scratch > private => {
                found.faults.push(format!(
                    "{about}: found {registers} registers and {scratch} bytes of scratch; expected at most {most} \
                     and {private}"
                ));
            }
            Some(_) => {}
        }
        if *spills > 0 || *registers > REGISTERS || *shared > DECLARED {
            found.faults.push(format!(
                "{about}: found {registers} registers, {spills} spilled, {shared} bytes of shared memory; expected \
                 at most {REGISTERS}, 0 and {DECLARED}"
            ));
        }
        // Additions of returned rows. Kernels that push divide, too, and a division uses such
        // instructions.
        if kernel == "ty_combine_f32" && program.starts_with("gpu ring") {
            let text = body(assembly, kernel);
            assert!(text.contains("v_add_f32") || text.contains("v_pk_add_f32"), "it has no sum");
            if let Some(word) = contracted(text) {
                found.faults.push(format!("{about}: found {word}; expected sums"));
            }
        }
    }
}

/// The first instruction that rounds once after a product and a sum.
fn contracted(text: &str) -> Option<&'static str> {
    CONTRACTED.into_iter().find(|word| text.contains(word))
}

/// A product and a sum, which clang contracts in HIP by default.
const PRODUCT_AND_SUM: &str = r#"
#include "arch.cuh"
TY_KERNEL(64) product_and_sum(float* at) { at[0] = ty::add_rn(ty::mul_rn(at[1], at[2]), at[3]); }
"#;

/// Whether the options keep a product and a sum apart.
fn check_options(compiler: &Clang, architecture: Architecture) -> Result<()> {
    let header = |name: &str| -> (String, String) {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../gpu/device/common/");
        let text = std::fs::read_to_string(format!("{path}{name}")).expect("a header");
        (name.to_owned(), text)
    };
    let source = Source {
        main: SourceFile { name: "product_and_sum.cu", text: PRODUCT_AND_SUM },
        headers: vec![header("arch.cuh"), header("arch_amd.cuh")],
        options: compiler.options(architecture),
        include_folders: Vec::new(),
    };
    let log = compiler.compile(&source)?.log;
    let text = body(&log, "product_and_sum");
    assert!(text.contains("v_mul_f32") && text.contains("v_add_f32"), "{text}");
    assert_eq!(contracted(text), None, "{text}");
    Ok(())
}

fn main() -> Result<()> {
    let compiler = Clang::find(std::env::args_os().nth(1).map(PathBuf::from).as_deref())?;
    let (xgmi, ring) = (Over::peers("xgmi"), Over::gpu_ring());
    // Over puts there is one more kernel for a combine; inside one of several domains there is one
    // more for a dispatch.
    let programs = [
        (&xgmi, Role::Direct, 35),
        (&xgmi, Role::Masked, 29),
        (&ring, Role::Direct, 13),
        (&ring, Role::InterDomain, 13),
        (&xgmi, Role::IntraDomain, 13),
        (&ring, Role::IntraDomain, 14),
    ];
    println!(
        "{:<7} {:<20} {:<21} registers spilled scratch shared",
        "target", "device API", "kernel"
    );
    let compile_all = |architecture: Architecture| -> Result<Vec<(String, Compiled, usize)>> {
        let about = Target { compiler: &compiler, architecture, rows: Rows::Vector };
        check_options(&compiler, architecture)?;
        let mut all = Vec::new();
        for (over, role, kernels) in programs {
            let program = named(over, role);
            if !is_wanted(&architecture.name(), &program) {
                continue;
            }
            all.push((program, compile(about, over, role)?, kernels));
        }
        all.push(("probe".to_owned(), compile_probe(about)?, PROBE));
        all.push(("ring probe".to_owned(), compile_ring_probe(about)?, RING_PROBE));
        all.push(("table".to_owned(), compile_table(about)?, TABLE));
        all.push(("paced".to_owned(), compile_engine(about)?, 1));
        Ok(all)
    };
    // In parallel, because each takes seconds of one core.
    let compile_all = &compile_all;
    let all = std::thread::scope(|scope| {
        let running = WANTED
            .map(|architecture| (architecture, scope.spawn(move || compile_all(architecture))));
        running.map(|(architecture, thread)| (architecture, thread.join().expect("it is checked")))
    });
    let mut found = Found::default();
    for (architecture, programs) in all {
        for (program, compiled, kernels) in programs? {
            show(&mut found, &architecture.name(), &program, &compiled, kernels);
        }
    }
    let faults = found.text();
    assert!(faults.is_empty(), "{faults}");
    Ok(())
}
