//! The cost of crossing the plugin ABI.
//!
//! The benchmark makes the same two hot calls of the `shm` transport directly on the Rust value,
//! through the built-in table, and through the table of the loaded library. Run with `cargo build
//! --release -p tokenyard-plugin-cpu && cargo run --release -p tokenyard-bench-abi`. Exit code 1 if
//! the loaded library costs more than [`MOST_NS`] over either of the others.
//!
//! No test watches it: it is run by hand, as `docs/performance.md` says.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use criterion::Criterion;
use tokenyard_core::abi;
use tokenyard_core::conditions::Conditions;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::{OpenTransport, Registry, TransportRef, load_file};
use tokenyard_core::link::Link;
use tokenyard_core::transport::{
    Command, NO_COMMAND, Team, Transport, TransportNeeds, TransportOpen,
};
use tokenyard_cpu::{Shm, ShmConfig};

/// The most extra nanoseconds for a call through a loaded library.
const MOST_NS: f64 = 5.0;
/// How long loading a plugin may take.
const MOST_LOAD: Duration = Duration::from_millis(50);

const CALLS: [&str; 2] = ["read_signal", "post_signal"];
const PATHS: [&str; 3] = ["direct", "built_in", "loaded"];

const QUEUE: u32 = 0;
const SIGNAL: u32 = 3;

const NEEDS: TransportNeeds = TransportNeeds {
    windows: 0,
    queues: 1,
    signals: 8,
    queue_depth: 16,
    largest_put: 0,
    deadline: Duration::from_secs(5),
};

/// Raises a signal of this rank itself; no event follows.
const RAISE: Command = Command { op: abi::TY_OP_SIGNAL, signal: SIGNAL, add: 1, ..NO_COMMAND };

fn main() -> Result<ExitCode> {
    tokenyard_cpu::link();
    let target = target_folder()?;
    let plugin = target.join("release/libtokenyard_plugin_cpu.so");
    ensure!(
        plugin.is_file(),
        "{} is not there; build it with: cargo build --release -p tokenyard-plugin-cpu",
        plugin.display()
    );
    let start = Instant::now();
    let mut loaded = Registry::default();
    loaded.add(load_file(&plugin)?)?;
    let load_time = start.elapsed();

    let direct = open_direct()?;
    let built_in = open(&Registry::built_in()?.transport("shm")?)?;
    let loaded = open(&loaded.transport("shm")?)?;
    let folder = target.join("criterion");
    let mut criterion = Criterion::default().output_directory(&folder);
    // SAFETY: both transports live to the end of `main`.
    let links = unsafe { [built_in.link(), loaded.link()] };
    read_signal(&mut criterion, &direct, links);
    post_signal(&mut criterion, &direct, links);
    criterion.final_summary();
    report(&folder, load_time)
}

/// The target folder. This program lies in its subfolder `release`.
fn target_folder() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    program.ancestors().nth(2).map(Path::to_path_buf).context("find the target folder")
}

fn open_direct() -> Result<Shm> {
    let mut shm = Shm::open(ShmConfig::default(), &TransportOpen::new(&Team::world(0, 1), &NEEDS))?;
    let endpoint = shm.endpoint(0)?;
    shm.connect(0, &endpoint)?;
    Ok(shm)
}

fn open(component: &TransportRef) -> Result<OpenTransport> {
    let mut transport = component
        .open(&ComponentTable::empty(), &TransportOpen::new(&Team::world(0, 1), &NEEDS))?;
    let endpoint = transport.endpoint(0)?;
    transport.connect(0, &endpoint)?;
    Ok(transport)
}

fn read_signal(criterion: &mut Criterion, direct: &Shm, tables: [Link; 2]) {
    let mut group = criterion.benchmark_group(CALLS[0]);
    group.bench_function(PATHS[0], |b| {
        b.iter(|| black_box(direct).read_signal(QUEUE, black_box(SIGNAL)));
    });
    for (path, link) in PATHS[1..].iter().zip(tables) {
        group.bench_function(*path, |b| {
            b.iter(|| black_box(&link).read_signal(QUEUE, black_box(SIGNAL)));
        });
    }
    group.finish();
}

fn post_signal(criterion: &mut Criterion, direct: &Shm, tables: [Link; 2]) {
    let mut group = criterion.benchmark_group(CALLS[1]);
    let commands = [RAISE];
    group.bench_function(PATHS[0], |b| {
        // SAFETY: the command is in range of the opened transport, moves nothing, and one thread
        // posts.
        b.iter(|| unsafe { black_box(direct).post(QUEUE, black_box(&commands)) });
    });
    for (path, link) in PATHS[1..].iter().zip(tables) {
        group.bench_function(*path, |b| {
            // SAFETY: as above.
            b.iter(|| unsafe { black_box(&link).post(QUEUE, black_box(&commands)) });
        });
    }
    group.finish();
}

/// Prints the fastest samples, and judges.
fn report(folder: &Path, load_time: Duration) -> Result<ExitCode> {
    println!("{}", Conditions::find().line());
    let mut good = load_time <= MOST_LOAD;
    println!("loading the plugin: {load_time:.1?} (at most {MOST_LOAD:?})");
    println!("call         direct ns  built in ns  loaded ns  loaded - direct  loaded - built in");
    for call in CALLS {
        let mut times = [0.0; PATHS.len()];
        for (time, path) in times.iter_mut().zip(PATHS) {
            *time = fastest(&folder.join(call).join(path).join("new/sample.json"))?;
        }
        let [direct, built_in, loaded] = times;
        let (over_direct, over_built_in) = (loaded - direct, loaded - built_in);
        println!(
            "{call:<12} {direct:>9.2}  {built_in:>11.2}  {loaded:>9.2}  {over_direct:>15.2}  \
             {over_built_in:>17.2}"
        );
        good &= over_direct <= MOST_NS && over_built_in <= MOST_NS;
    }
    let word = if good { "reached" } else { "MISSED" };
    println!("required: at most {MOST_NS} ns over the built-in path: {word}");
    Ok(ExitCode::from(u8::from(!good)))
}

/// Nanoseconds per call of criterion's fastest sample. The median is not used: other programs on
/// the machine can only make calls slower, and rarely slow all three paths alike.
fn fastest(file: &Path) -> Result<f64> {
    let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    let sample: serde_json::Value = serde_json::from_str(&text)?;
    let numbers = |name: &str| {
        sample[name].as_array().into_iter().flatten().filter_map(serde_json::Value::as_f64)
    };
    numbers("times")
        .zip(numbers("iters"))
        .map(|(time, calls)| time / calls)
        .min_by(f64::total_cmp)
        .with_context(|| format!("find samples in {}", file.display()))
}
