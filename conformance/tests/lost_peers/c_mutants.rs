//! The mutants of the C examples. `plugins/example-c/mutants_*.toml` list edits of their sources, each of which breaks
//! the contract once, and the test of the suite that must notice it. `variants_*.toml` list edits that break nothing,
//! and tests that must pass.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokenyard_conformance::faults::Fault;
use tokenyard_conformance::runner::{Program, Settings, Verdict, run_fault};
use tokenyard_conformance::suite;
use tokenyard_core::config::Config;

use crate::{trial, verdicts_of};

/// The file of mutants.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutants {
    mutant: Vec<Mutant>,
}

/// A broken example.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutant {
    name: String,
    /// The mistake, for readers of the list.
    #[serde(rename = "about")]
    _about: String,
    /// The case of L0 that notices it, or the whole name of a fault of L3.
    case: String,
    /// Words of its failure.
    says: String,
    /// The start of the names that it leaves in shared memory, `/tmp` or its folder for temporary files, which no other
    /// mutant uses, or [`SEMAPHORES`]. Its test then runs alone.
    leaves: Option<String>,
    edits: Vec<Edit>,
}

/// The file of variants.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Variants {
    variant: Vec<Variant>,
}

/// A changed example that is right.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Variant {
    name: String,
    #[serde(rename = "about")]
    _about: String,
    cases: BTreeSet<String>,
    edits: Vec<Edit>,
}

/// An unbroken example.
#[derive(Clone, Copy, Debug)]
enum Example {
    Shm,
    Sockets,
}

impl Example {
    /// Its files beside the list.
    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Shm => &["shm.c"],
            Self::Sockets => &["sockets.h", "sockets_io.c", "sockets.c"],
        }
    }

    /// Its mutants.
    fn mutants(self) -> Vec<Mutant> {
        self.read::<Mutants>("mutants").mutant
    }

    /// Its variants.
    fn variants(self) -> Vec<Variant> {
        self.read::<Variants>("variants").variant
    }

    /// A list of edits of its sources.
    fn read<T: DeserializeOwned>(self, list: &str) -> T {
        let example = match self {
            Self::Shm => "shm",
            Self::Sockets => "sockets",
        };
        let file = folder().join(format!("{list}_{example}.toml"));
        toml::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
    }

    /// Its table in a config, with a key where it has one.
    fn table(self) -> &'static str {
        match self {
            Self::Shm => "use = \"example_c\"\nexample_c.load_store = true",
            Self::Sockets => "use = \"example_sockets\"",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Sockets => "sockets",
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Edit {
    find: String,
    put: String,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins/example-c")
}

/// A trial for each mutant, which is caught, for each unbroken example, which passes all of their cases, and for each
/// variant.
pub(crate) fn trials(program: &Arc<Program>) -> Vec<Trial> {
    let mut trials = Vec::new();
    for example in [Example::Shm, Example::Sockets] {
        let mut cases = BTreeSet::new();
        for mutant in example.mutants() {
            cases.insert(mutant.case.clone());
            let program = Arc::clone(program);
            let name = format!("{}/{}", mutant.name, mutant.case);
            let leaves_names = mutant.leaves.is_some();
            trials.push(trial(name, leaves_names, move || caught(&program, example, &mutant)));
        }
        let name = format!("{}/the_cases_of_its_mutants", example.name());
        let own = Arc::clone(program);
        let run = move || unbroken_passes(&own, example, cases);
        trials.push(trial(name, false, run));
        for Variant { name, cases, edits, .. } in example.variants() {
            let program = Arc::clone(program);
            let run = move || passes(&program, &Build::new(example, &edits, USUAL)?, &cases);
            trials.push(trial(format!("{name}/its_cases"), false, run));
        }
    }
    trials
}

/// The deadline of examples that are right, in milliseconds.
const USUAL: u32 = 10_000;

/// An unbroken example passes the cases of its mutants, except those for which it lacks a capability: a variant that
/// has it passes them.
fn unbroken_passes(
    program: &Program,
    example: Example,
    mut cases: BTreeSet<String>,
) -> Result<(), Failed> {
    let build = Build::new(example, &[], USUAL)?;
    let variants = example.variants().into_iter().flat_map(|one| one.cases);
    let variants: BTreeSet<String> = variants.collect();
    for (case, lacks) in build.lacks() {
        if cases.remove(&case) && !variants.contains(&case) {
            return Err(
                format!("no variant passes {case}, for which the example lacks {lacks}").into()
            );
        }
    }
    passes(program, &build, &cases)
}

fn passes(program: &Program, build: &Build, cases: &BTreeSet<String>) -> Result<(), Failed> {
    let verdicts = build.run(program, &cases.iter().map(String::as_str).collect::<Vec<_>>())?;
    assert_eq!(verdicts.len(), cases.len(), "{verdicts:?}");
    let failed: Vec<_> = verdicts.iter().filter(|(_, verdict)| *verdict != Verdict::Pass).collect();
    if failed.is_empty() {
        return Ok(());
    }
    Err(Failed::from(format!("the unbroken example fails: {failed:?}")))
}

/// Deadlines of a mutant in milliseconds: the time in which a case notices that nothing comes. On a busy machine the
/// first may end something else before, so there is a second one.
const DEADLINES: [u32; 2] = [3000, 15_000];

fn caught(program: &Program, example: Example, mutant: &Mutant) -> Result<(), Failed> {
    let Mutant { edits, case, says, .. } = mutant;
    let mut found = Vec::new();
    for deadline in DEADLINES {
        let verdicts = Build::new(example, edits, deadline)?.run(program, &[case]);
        mutant.leaves.as_deref().map(remove_left_names);
        for (_, verdict) in verdicts? {
            match verdict {
                Verdict::Fail(why) if why.contains(says) => return Ok(()),
                other => found.push(other),
            }
        }
    }
    Err(Failed::from(format!("expected a failure that says {says:?}: {found:?}")))
}

/// The mark of a mutant that leaves sets of as many semaphores, which no other program makes.
const SEMAPHORES: &str = "37 semaphores";

/// Removes the names that a mutant left: it alone uses this prefix.
fn remove_left_names(prefix: &str) {
    if prefix == SEMAPHORES {
        return remove_semaphores();
    }
    let folders = ["/dev/shm", "/tmp"].map(|folder| std::fs::read_dir(folder).unwrap());
    for entry in folders.into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
}

fn remove_semaphores() {
    let sets = std::fs::read_to_string("/proc/sysvipc/sem").unwrap();
    for set in sets.lines().skip(1) {
        let columns: Vec<_> = set.split_whitespace().collect();
        if columns[3] == "37" && columns[4] == rustix::process::geteuid().as_raw().to_string() {
            // SAFETY: a set of a mutant, whose processes have ended; no command of this call takes an argument.
            unsafe { libc::semctl(columns[1].parse().unwrap(), 0, libc::IPC_RMID) };
        }
    }
}

/// An example with some edits, and its config.
struct Build {
    folder: tempfile::TempDir,
    config: String,
}

impl Build {
    fn new(example: Example, edits: &[Edit], deadline: u32) -> Result<Self, Failed> {
        let folder = tempfile::tempdir().unwrap();
        let library = compile(folder.path(), example, edits)?;
        let config = format!(
            "[world]\ndeadline_ms = {deadline}\nlate_ms = {}\n[kernels]\nuse = \"cpu\"\n[transport.scale_up]\n\
             {}\n[plugins]\npaths = [{library:?}]\n",
            2 * deadline,
            example.table(),
        );
        Ok(Self { folder, config })
    }

    /// Runs cases of L0, each in its largest world, and faults of L3.
    fn run(&self, program: &Program, cases: &[&str]) -> Result<Vec<(String, Verdict)>, Failed> {
        let (faults, cases): (Vec<&str>, Vec<&str>) =
            cases.iter().partition(|case| case.starts_with("l3/"));
        let mut verdicts = verdicts_of(program, &self.config, &self.tests(&cases)?);
        for name in faults {
            let path = self.folder.path().join("config.toml");
            std::fs::write(&path, &self.config).unwrap();
            let fault = Fault::find(name).ok_or_else(|| format!("no fault is called {name}"))?;
            verdicts.push((name.to_owned(), run_fault(program, &path, &fault.within(2))?.verdict));
        }
        Ok(verdicts)
    }

    fn suite(&self) -> Vec<suite::Test> {
        let settings = Settings::new(Config::parse(&self.config, "mutants").unwrap()).unwrap();
        suite::tests(settings.capabilities(), 1)
    }

    /// The cases of L0 that the capabilities exclude, and what each lacks.
    fn lacks(&self) -> Vec<(String, String)> {
        let lacks =
            |test: suite::Test| Some((test.name.split('/').nth(1)?.to_owned(), test.lacks?));
        self.suite().into_iter().filter_map(lacks).collect()
    }

    /// The tests of these cases. Without a number of ranks it is that in the largest world.
    fn tests(&self, cases: &[&str]) -> Result<Vec<String>, Failed> {
        if cases.is_empty() {
            return Ok(Vec::new());
        }
        let tests = self.suite();
        let names = || tests.iter().map(|test| &test.name);
        let of_case = |case: &&str| {
            let is_case = |name: &&String| {
                name.split('/').nth(1) == Some(*case) || name.strip_prefix("l0/") == Some(*case)
            };
            names().rfind(is_case).cloned().ok_or_else(|| format!("no case is called {case}"))
        };
        Ok(cases.iter().map(of_case).collect::<Result<_, _>>()?)
    }
}

fn compile(build: &Path, example: Example, edits: &[Edit]) -> Result<PathBuf, Failed> {
    let read =
        |file: &&str| (build.join(file), std::fs::read_to_string(folder().join(file)).unwrap());
    let mut sources: Vec<_> = example.files().iter().map(read).collect();
    for Edit { find, put } in edits {
        let places: usize =
            sources.iter().map(|(_, code)| code.matches(find.as_str()).count()).sum();
        if places != 1 {
            return Err(format!("{example:?} has {places} places with {find:?}; expected 1").into());
        }
        for (_, code) in &mut sources {
            *code = code.replace(find.as_str(), put);
        }
    }
    for (file, code) in &sources {
        std::fs::write(file, code).unwrap();
    }
    let library = build.join("libexample.so");
    let units =
        sources.iter().map(|(file, _)| file).filter(|file| file.extension().unwrap() == "c");
    let output = Command::new("cc")
        .args(["-std=c11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"])
        .args(["-Wall", "-Werror", "-I"])
        .arg(folder().join("../../abi/include"))
        .args(units)
        .arg("-o")
        .arg(&library)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(library)
    } else {
        Err(format!("{example:?}: {printed}").into())
    }
}
