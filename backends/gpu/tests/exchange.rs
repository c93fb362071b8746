//! The kernels, run without a GPU: their source is compiled for the host, with a stand-in for a GPU under
//! it (`model/cuda.h`, `model/arch.cuh`) and one for the proxy and a transport beside it
//! (`model/exchange.cpp`). The model shows where every byte goes and that every wait ends; it shows nothing
//! of a GPU's effects on memory that it shares with others.

// Helpers of a test may panic as a test may.
#![allow(clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;
use tokenyard_core::abi;
use tokenyard_gpu::compile::Rows;

#[path = "exchange/coded.rs"]
mod coded;
#[path = "exchange/decode.rs"]
mod decode;
#[path = "exchange/local.rs"]
mod local;
#[path = "exchange/runs.rs"]
mod runs;

/// The file as the model has it: the dialect's words are the model's own, everything else is the
/// product's.
fn for_the_host(name: &str, text: &str, rows: Rows) -> String {
    const ARCH: &str = include_str!("model/arch.cuh");
    const BULK: &str = include_str!("model/bulk.h");
    const SHARED: &str = include_str!("model/shared.h");
    match name {
        "arch.cuh" => [ARCH, if rows == Rows::Tma { BULK } else { SHARED }].concat(),
        // The words of one maker.
        "arch_cuda.cuh" | "arch_amd.cuh" => String::new(),
        _ => text.to_owned(),
    }
}

/// A device API that the model runs over.
#[derive(Clone, Copy)]
struct DeviceApi {
    /// The path of its source, and that of the source in the namespace `inner` before it.
    source: &'static str,
    inner: Option<&'static str>,
    puts: bool,
    /// Queues of its own, where it has several; else 0.
    queues: u32,
    param_bytes: usize,
}

const GPU_RING: DeviceApi = DeviceApi {
    source: "device/common/gpu_ring.cuh",
    inner: None,
    puts: true,
    queues: 0,
    param_bytes: 40,
};
const NVLINK: DeviceApi = DeviceApi {
    source: "src/transport/nvlink.cuh",
    inner: None,
    puts: false,
    queues: 0,
    param_bytes: 32,
};
const DEVICE_PUT: DeviceApi = DeviceApi {
    source: "../../standins/device_put/src/device_put.cuh",
    inner: Some(NVLINK.source),
    puts: true,
    queues: 3,
    param_bytes: 56,
};

/// Writes the sources for the host, over a device API. `level` distinguishes the copies: a compiler
/// would take equal ones for the same file.
fn write_all(to: &Path, device_api: DeviceApi, rows: Rows, level: &str) {
    std::fs::create_dir_all(to).expect("made");
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let device = ["device", "device/common", "device/codec", "device/moe", "device/decode"];
    for from in device.into_iter().chain(["device/ops", "src/probe"]) {
        for entry in std::fs::read_dir(crate_folder.join(from)).expect("a folder of the crate") {
            let path = entry.expect("an entry").path();
            let is_source = path.extension().is_some_and(|e| e == "cuh" || e == "cu");
            if let Some(name) = path.file_name().and_then(|n| n.to_str()).filter(|_| is_source) {
                let text = std::fs::read_to_string(&path).expect("a source");
                let text = for_the_host(name, &text, rows);
                std::fs::write(to.join(name), format!("{text}// {level}\n")).expect("written");
            }
        }
    }
    let read = |name: &str| std::fs::read_to_string(crate_folder.join(name)).expect("a device API");
    let inner = device_api.inner.map(|inner| format!("namespace inner {{\n{}\n}}\n", read(inner)));
    let text = inner.unwrap_or_default() + &read(device_api.source);
    std::fs::write(to.join("up_device_api.cuh"), text).expect("written");
}

/// A model of `tests/model`, compiled.
struct Model {
    program: PathBuf,
    /// The folder of the program.
    _folder: TempDir,
}

impl Model {
    /// Compiles a model with the sources in the folder.
    fn compile(folder: TempDir, model: &str, defines: &[String]) -> Self {
        let program = folder.path().join("exchange");
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/model");
        let compiled = Command::new("g++")
            // Higher optimisation takes longer than it saves.
            .args(["-std=c++20", "-Og", "-pthread"])
            .arg(format!("-DTY_HOST_DEVICE_API_VERSION={}", abi::TY_DEVICE_API_VERSION))
            .args(defines)
            .arg("-I")
            .arg(folder.path())
            .arg("-I")
            .arg(&models)
            .arg(models.join(model))
            .arg("-o")
            .arg(&program)
            .output()
            .unwrap_or_else(|e| panic!("g++ cannot be run ({e}): apt-get install g++"));
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        Self { program, _folder: folder }
    }

    /// The ranks of one level, over a device API.
    fn level(device_api: DeviceApi, rows: Rows) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        write_all(folder.path(), device_api, rows, "the level");
        Self::compile(folder, "exchange.cpp", &defines(device_api, rows))
    }

    /// A model over one device API on waves of 64 that run in lockstep.
    fn in_lockstep(device_api: DeviceApi, model: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        write_all(folder.path(), device_api, Rows::Vector, "in lockstep");
        if device_api.source == GPU_RING.source {
            mutate(folder.path(), &["up_device_api.cuh"], &[SIDE_BY_SIDE]);
        }
        let defines = defines(device_api, Rows::Vector);
        // The place of a lane in the program is derived from addresses: code must lie in the order
        // of the source.
        let lockstep = ["-DMODEL_WAVE=64", "-DMODEL_LOCKSTEP=1", "-O0", "-fno-omit-frame-pointer"];
        let all: Vec<_> =
            defines.into_iter().chain(lockstep.into_iter().map(str::to_owned)).collect();
        Self::compile(folder, model, &all)
    }

    /// A model over one device API on waves of 64, each lane by itself.
    fn of_wave_64(device_api: DeviceApi, model: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        write_all(folder.path(), device_api, Rows::Vector, "waves of 64");
        let defines = defines(device_api, Rows::Vector).into_iter();
        let all: Vec<_> = defines.chain(["-DMODEL_WAVE=64".to_owned()]).collect();
        Self::compile(folder, model, &all)
    }

    /// Kernels that load and store on warps of 32. Compiled once for all tests.
    fn of_stores(rows: Rows) -> &'static Self {
        static VECTOR: OnceLock<Model> = OnceLock::new();
        static TMA: OnceLock<Model> = OnceLock::new();
        let once = if rows == Rows::Vector { &VECTOR } else { &TMA };
        once.get_or_init(|| {
            let folder = tempfile::tempdir().expect("a folder");
            write_all(folder.path(), NVLINK, rows, "the level");
            if rows == Rows::Vector {
                mutate(folder.path(), &["tiles.cuh"], &[local::EARLY_TILE]);
            }
            Self::compile(folder, "exchange.cpp", &defines(NVLINK, rows))
        })
    }

    /// The same on waves of 64.
    fn of_stores_64() -> &'static Self {
        static OF_STORES: OnceLock<Model> = OnceLock::new();
        OF_STORES.get_or_init(|| Self::of_wave_64(NVLINK, "exchange.cpp"))
    }

    /// Kernels that put on one queue, on waves of 64 that run in lockstep. Compiled once for all tests.
    fn of_puts_in_lockstep() -> &'static Self {
        static OF_PUTS: OnceLock<Model> = OnceLock::new();
        OF_PUTS.get_or_init(|| Self::in_lockstep(GPU_RING, "exchange.cpp"))
    }

    /// Kernels that put on several queues. Compiled once for all tests.
    fn of_puts() -> &'static Self {
        static OF_PUTS: OnceLock<Model> = OnceLock::new();
        OF_PUTS.get_or_init(|| Self::level(DEVICE_PUT, Rows::Vector))
    }

    fn is_well(&self) {
        self.is_well_with(&[]);
    }

    fn is_well_with(&self, arguments: &[&str]) {
        let run = Command::new(&self.program).args(arguments).output().expect("it runs");
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    }

    /// The report of a failure that the program must notice. `arguments` name it: a `Fault` of `level.h` and
    /// the number of ranks, a change to the kernels, or a wavefront that `waits` for itself. A crash is no
    /// report.
    fn notices(&self, arguments: &[&str]) -> String {
        // Threads race for what a change breaks. On a busy machine the right one may win by chance.
        const RUNS: usize = 5;
        let mut run = Command::new(&self.program);
        run.args(arguments);
        let mut left = RUNS;
        let run = loop {
            let found = run.output().expect("it runs");
            left -= 1;
            if left == 0 || !found.status.success() {
                break found;
            }
        };
        let (code, printed) =
            (run.status.code(), String::from_utf8_lossy(&run.stderr).into_owned());
        assert!(
            code == Some(1) && !printed.is_empty(),
            "{arguments:?}: {:?} {printed}",
            run.status
        );
        printed
    }
}

/// Whether the run has all that is left out of a default run (`cargo xtask test --all`). Models ask it themselves, too.
fn runs_all() -> bool {
    std::env::var_os("TOKENYARD_TEST_ALL").is_some()
}

/// A change to the kernels that a run of a model may switch on: the description, the text that occurs once in the
/// sources, and its replacement.
type Mutant = (&'static str, &'static str, &'static str);

/// Lanes post side by side: a command whose number is beyond the ring waits for those before it, which have not been
/// posted.
const SIDE_BY_SIDE: Mutant = (
    "lanes post side by side",
    "return ty::in_turn([&] { return post_one(command, guard); });",
    "if (model::mutant == 1) return post_one(command, guard);\nreturn ty::in_turn([&] { return post_one(command, guard); });",
);

/// Writes mutants into the sources of a folder. Kernels with mutants of which none is switched on do what those
/// without do, so one program serves all runs.
fn mutate(folder: &Path, sources: &[&str], mutants: &[Mutant]) {
    for (what, from, to) in mutants {
        let mut changed = 0;
        for name in sources {
            let path = folder.join(name);
            let text = std::fs::read_to_string(&path).expect("a source");
            changed += text.matches(from).count();
            std::fs::write(&path, text.replace(from, to)).expect("written");
        }
        assert_eq!(changed, 1, "{what}: the kernels have another form");
    }
}

/// A fault of the transport under kernels that put is noticed by every number of ranks: because a wait
/// ends, or because of the data.
fn is_noticed(fault: &str, ends_a_wait: bool) {
    for ranks in ["2", "3", "8"] {
        let printed = Model::of_puts().notices(&[fault, ranks]);
        assert_eq!(printed.contains("an ended wait"), ends_a_wait, "{ranks} ranks: {printed}");
    }
}

/// The defines of the sources of one level, for warps of 32.
fn defines(device_api: DeviceApi, rows: Rows) -> [String; 5] {
    let DeviceApi { puts, param_bytes, queues, .. } = device_api;
    [
        format!("-DTY_QUEUES={queues}"),
        format!("-DTY_ROWS_TMA={}", u32::from(rows == Rows::Tma)),
        format!("-DTY_PUTS={}", u32::from(puts)),
        format!("-DTY_UP_PARAM_BYTES={param_bytes}"),
        "-DTY_GROUPED=0".to_owned(),
    ]
}

/// The model of several domains: a device API inside, and one between them.
fn domains(up: DeviceApi, out: DeviceApi, wave: u32) -> Model {
    twin_of_domains(up, out, wave, 0)
}

/// The same with changes to the sources of both levels: between domains, and inside.
fn domains_with(up: DeviceApi, out: DeviceApi, change: impl FnOnce(&Path, &Path)) -> Model {
    levels(up, out, &[("MODEL_WAVE", 32), ("TWINS", 0)], Rows::Vector, change)
}

/// The same by bulk copies.
fn domains_in_bulk(up: DeviceApi, out: DeviceApi, change: impl FnOnce(&Path, &Path)) -> Model {
    levels(up, out, &[("MODEL_WAVE", 32), ("TWINS", 0)], Rows::Tma, change)
}

/// The same where only so many ranks of the first domain are there; 0 is all of all domains.
fn twin_of_domains(up: DeviceApi, out: DeviceApi, wave: u32, twins: u32) -> Model {
    levels(up, out, &[("MODEL_WAVE", wave), ("TWINS", twins)], Rows::Vector, |_, _| {})
}

/// The model of two levels with these defines.
fn levels(
    up: DeviceApi,
    out: DeviceApi,
    defined: &[(&str, u32)],
    rows: Rows,
    change: impl FnOnce(&Path, &Path),
) -> Model {
    let folder = tempfile::tempdir().expect("a folder");
    let mut defines = vec![format!("-DTY_ROWS_TMA={}", u32::from(rows == Rows::Tma))];
    defines.extend(defined.iter().map(|(name, value)| format!("-D{name}={value}")));
    for (name, device_api) in [("up", up), ("out", out)] {
        write_all(&folder.path().join(name), device_api, rows, name);
        let name = name.to_uppercase();
        defines.push(format!("-D{name}_PUTS={}", u32::from(device_api.puts)));
        defines.push(format!("-D{name}_QUEUES={}", device_api.queues));
        defines.push(format!("-D{name}_PARAM_BYTES={}", device_api.param_bytes));
    }
    change(&folder.path().join("out"), &folder.path().join("up"));
    Model::compile(folder, "domains.cpp", &defines)
}

#[test]
fn rows_reach_their_places_and_come_back_over_puts_in_any_order() {
    // Kernels over several queues do the same with every shape.
    let model = Model::level(GPU_RING, Rows::Vector);
    if runs_all() { model.is_well() } else { model.is_well_with(&["few"]) }
}

#[test]
fn rows_reach_their_places_and_come_back_over_a_device_api_that_puts_on_several_queues() {
    Model::of_puts().is_well();
}

#[test]
fn rows_that_are_staged_by_bulk_copies_are_put_on_several_queues() {
    let model = Model::level(DEVICE_PUT, Rows::Tma);
    if runs_all() {
        model.is_well()
    } else {
        model.is_well_with(&["few"])
    }
    model.is_well_with(&["long"]);
}

#[test]
fn rows_reach_their_places_and_come_back_over_loads_and_stores() {
    Model::of_stores(Rows::Vector).is_well();
}

#[test]
fn rows_reach_their_places_and_come_back_by_bulk_copies() {
    let model = Model::of_stores(Rows::Tma);
    if runs_all() {
        model.is_well()
    } else {
        model.is_well_with(&["few"])
    }
    model.is_well_with(&["pushes"]);
}

#[test]
fn rows_that_are_cast_as_they_move_end_as_the_oracle_casts_them() {
    for rows in [Rows::Vector, Rows::Tma] {
        Model::of_stores(rows).is_well_with(&["casts"]);
    }
    Model::of_puts().is_well_with(&["few casts"]);
    Model::of_stores_64().is_well_with(&["few casts"]);
}

#[test]
fn codecs_take_formats_of_other_groups_and_bits() {
    let folder = tempfile::tempdir().expect("a folder");
    write_all(folder.path(), NVLINK, Rows::Vector, "codecs alone");
    Model::compile(folder, "formats.cpp", &defines(NVLINK, Rows::Vector)).is_well();
    Model::of_wave_64(NVLINK, "formats.cpp").is_well();
}

#[test]
fn waves_of_64_bring_rows_to_their_places_and_back_over_loads_and_stores() {
    Model::of_stores_64().is_well_with(&["few"]);
}

#[test]
fn waves_of_64_bring_rows_to_their_places_and_back_over_puts_in_any_order() {
    let shapes = if runs_all() { "few" } else { "few puts" };
    Model::of_wave_64(GPU_RING, "exchange.cpp").is_well_with(&[shapes]);
}

#[test]
fn waves_of_64_bring_rows_to_their_places_and_back_over_puts_on_several_queues() {
    let shapes = if runs_all() { "few" } else { "other puts" };
    Model::of_wave_64(DEVICE_PUT, "exchange.cpp").is_well_with(&[shapes]);
}

#[test]
fn no_lane_of_a_wavefront_waits_for_another_over_loads_and_stores() {
    Model::in_lockstep(NVLINK, "exchange.cpp").is_well_with(&["least"]);
}

#[test]
fn no_lane_of_a_wavefront_waits_for_another_over_puts() {
    Model::of_puts_in_lockstep().is_well_with(&["least"]);
}

#[test]
fn a_wavefront_that_waits_for_itself_is_noticed() {
    let printed = Model::of_puts_in_lockstep().notices(&["waits"]);
    assert!(printed.contains("an ended wait"), "{printed}");
}

#[test]
fn a_signal_before_its_payload_is_noticed() {
    is_noticed("1", false);
}

#[test]
fn a_lost_put_ends_a_wait() {
    is_noticed("2", true);
}

#[test]
fn a_source_that_is_reusable_too_early_is_noticed() {
    is_noticed("3", false);
}

#[test]
fn a_signal_of_another_queue_ends_a_wait() {
    is_noticed("4", true);
}

#[test]
fn among_domains_rows_are_put_between_them_and_stored_inside_on_waves_of_64() {
    // Other tests have the pairs of a device API inside, one between domains, and a width of waves.
    if runs_all() {
        domains(NVLINK, GPU_RING, 32).is_well();
    }
    domains(NVLINK, GPU_RING, 64).is_well_with(&["few"]);
}

#[test]
fn among_domains_rows_are_put_at_both_levels() {
    domains(GPU_RING, GPU_RING, 32).is_well();
}

#[test]
fn among_domains_kernels_put_on_several_queues() {
    domains(NVLINK, DEVICE_PUT, 32).is_well();
}

#[test]
fn ranks_of_a_twin_exchange_what_a_rank_of_as_many_domains_would() {
    for twins in [2, 4] {
        twin_of_domains(NVLINK, DEVICE_PUT, 32, twins).is_well();
    }
}

#[test]
fn among_domains_rows_are_stored_at_both_levels() {
    domains(NVLINK, NVLINK, 32).is_well();
}

#[test]
fn copies_barriers_and_counts_of_the_probe_reach_every_rank() {
    let folder = tempfile::tempdir().expect("a folder");
    write_all(folder.path(), NVLINK, Rows::Vector, "the probe");
    Model::compile(folder, "probe.cpp", &defines(NVLINK, Rows::Vector)).is_well();
    Model::of_wave_64(NVLINK, "probe.cpp").is_well();
}

#[test]
fn entries_of_a_table_are_written_checked_and_fetched() {
    let model = |wave: u32| {
        let folder = tempfile::tempdir().expect("a folder");
        write_all(folder.path(), NVLINK, Rows::Vector, "the table");
        Model::compile(folder, "table.cpp", &[format!("-DMODEL_WAVE={wave}")])
    };
    model(32).is_well();
    model(64).is_well();
}
