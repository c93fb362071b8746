//! Runs the real binary.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "test files use a part of it; they fail by panic"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A config whose waits end within seconds, in its own folder.
pub(crate) struct Config {
    folder: tempfile::TempDir,
}

impl Config {
    pub(crate) fn new() -> Self {
        Self::with("")
    }

    /// A config with more lines at its end.
    pub(crate) fn with(more: &str) -> Self {
        Self::of_world("deadline_ms = 6000\nlate_ms = 10000", more)
    }

    /// Ranks go on without a lost rank; a rank that is silent for `deadline_ms` counts as lost too.
    pub(crate) fn masking(deadline_ms: u32, more: &str) -> Self {
        let world = format!("deadline_ms = {deadline_ms}\nlate_ms = 60000\non_failure = \"mask\"");
        Self::of_world(&world, more)
    }

    fn of_world(world: &str, more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "[world]\n{world}\n[kernels]\nuse = \"cpu\"\n\
             [transport.scale_up]\nuse = \"shm\"\n{more}\n"
        );
        std::fs::write(folder.path().join("config.toml"), text).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.file("config.toml")
    }

    /// A file beside the config.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// A file of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// The command, without the variables of the launcher of this test.
pub(crate) fn tokenyard() -> Command {
    program(Path::new(env!("CARGO_BIN_EXE_tokenyard")))
}

/// The command in another file, in the same way.
pub(crate) fn program(file: &Path) -> Command {
    let mut command = Command::new(file);
    command.stdin(Stdio::null());
    let foreign = [
        "TOKENYARD_",
        "SLURM_",
        "OMPI_",
        "PMI",
        "MPI_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_",
        "TORCHELASTIC_",
    ];
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if foreign.iter().any(|start| name.starts_with(start)) {
            command.env_remove(name);
        }
    }
    command
}

/// `tokenyard run CONFIG` with these arguments after it.
pub(crate) fn run(config: &Config, arguments: &str) -> Output {
    let mut command = tokenyard();
    command.arg("run").arg(config.path()).args(arguments.split_whitespace());
    command.output().unwrap()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Checks the exit code; shows all output if the test fails.
pub(crate) fn expect_code(output: &Output, code: i32) {
    let (out, err) = (stdout(output), stderr(output));
    assert_eq!(output.status.code(), Some(code), "stdout:\n{out}\nstderr:\n{err}");
}

/// The last line of standard output, which must be one JSON document.
pub(crate) fn json(output: &Output) -> serde_json::Value {
    let text = stdout(output);
    let last = text.lines().last().unwrap_or_else(|| panic!("nothing: {}", stderr(output)));
    serde_json::from_str(last).unwrap()
}

/// A folder that contains only a library, which runs `code` while it is opened. It may contain the
/// example plugin, to be a plugin itself.
pub(crate) struct Library {
    folder: tempfile::TempDir,
}

impl Library {
    /// `code` is the body of a constructor in C; `late` is a function that kills the process.
    pub(crate) fn new(code: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let early = folder.path().join("early.h");
        let includes = "#include <signal.h>\n#include <stdlib.h>\n#include <unistd.h>\n";
        let late = "__attribute__((unused)) static void late(void) { kill(getpid(), SIGKILL); }\n";
        let text = format!(
            "{includes}{late}__attribute__((constructor)) static void early(void) {{ {code} }}\n"
        );
        std::fs::write(&early, text).unwrap();
        let output = Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Werror", "-shared", "-fPIC", "-include"])
            .arg(&early)
            .arg("-I")
            .arg(repository("abi/include"))
            .arg(repository("plugins/example-c/shm.c"))
            .arg("-o")
            .arg(folder.path().join("libearly.so"))
            .output()
            .unwrap_or_else(|e| panic!("cc cannot be run ({e}): apt-get install gcc"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::remove_file(early).unwrap();
        Self { folder }
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("libearly.so")
    }

    /// A config that names the library, and runs on it or not.
    pub(crate) fn config(&self) -> Config {
        let path = self.file();
        Config::with(&format!("[plugins]\npaths = [{:?}]", path.to_str().unwrap()))
    }
}

/// The names in a folder.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The live processes that a process has started.
pub(crate) fn children(parent: u32) -> Vec<i32> {
    let list = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten();
    let mut all: Vec<i32> = list
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok())
        .flat_map(|text| text.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect();
    all.sort_unstable();
    all
}

/// Whether a process exists and is no zombie: reaping an orphan is the duty of process 1, which a
/// container may lack.
pub(crate) fn lives(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}
