//! CUDA's compiler as a program, for device APIs that include headers which NVRTC cannot read.

use std::ffi::OsStr;
use std::fs;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;
use tokenyard_core::{Error, ErrorKind, Result, files};
use tokenyard_gpu::compile::{Architecture, Compiled, Compiler, Source};

/// A compilation takes seconds, with large headers a minute.
const LONGEST: Duration = Duration::from_secs(300);
const LOOK: Duration = Duration::from_millis(10);
/// The most that is kept of what it prints.
const MOST_LOG: u64 = 1 << 20;

/// The most bytes of a header, and of an image.
const MOST_FILE: u64 = 256 << 20;

/// nvcc, at a path.
#[derive(Debug)]
pub struct Nvcc {
    path: PathBuf,
    longest: Duration,
}

/// What a run has printed, and whether it was well.
struct Ran {
    out: String,
    log: String,
}

impl Nvcc {
    /// The one that the config names, else that of `CUDA_HOME`, of `PATH`, or of the package
    /// `nvidia-cuda-nvcc` beside the run-time compiler that is loaded.
    ///
    /// # Errors
    /// `Unavailable` with the places that were looked at, and the fix.
    pub fn find(named: Option<&Path>) -> Result<Self> {
        let places = match named {
            Some(path) => vec![path.to_owned()],
            None => places(&|name| std::env::var_os(name).filter(|value| !value.is_empty())),
        };
        if let Some(path) = places.iter().find(|path| path.is_file()) {
            return Ok(Self { path: path.clone(), longest: LONGEST });
        }
        let looked: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
        let message = format!(
            "found no nvcc; expected one, as a transport's device API includes headers; looked at: {}",
            if looked.is_empty() { "nothing".to_owned() } else { looked.join(", ") }
        );
        Err(Error::new(ErrorKind::Unavailable, "load compiler", message).with_fix(
            "install it (`pip install nvidia-cuda-nvcc==13.* nvidia-cuda-crt==13.* nvidia-nvvm==13.* \
             nvidia-cuda-runtime==13.* nvidia-cuda-cccl==13.*`, or the CUDA toolkit), or name it by \
             `compiler` in [kernels.cuda]",
        ))
    }

    /// Runs it until it ends, or its time is over.
    fn run(&self, operation: &'static str, arguments: &[&OsStr]) -> Result<Ran> {
        let system = |e| {
            Error::system(operation, "nvcc cannot be run", e)
                .with_context("program", self.path.display())
        };
        let mut running = Command::new(&self.path)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // It starts other programs, which end with it.
            .process_group(0)
            .spawn()
            .map_err(system)?;
        // Read beside it, as it waits where a pipe is full.
        let out = running.stdout.take().map(|pipe| std::thread::spawn(move || text_of(pipe)));
        let log = running.stderr.take().map(|pipe| std::thread::spawn(move || text_of(pipe)));
        let start = Instant::now();
        let status = loop {
            if let Some(status) = running.try_wait().map_err(system)? {
                break status;
            }
            if start.elapsed() > self.longest {
                // They have ended meanwhile, or end now.
                let _ = kill_process_group(Pid::from_child(&running), Signal::KILL);
                let _ = running.wait();
                let message = format!("nvcc has not ended in {} s", self.longest.as_secs());
                return Err(Error::new(ErrorKind::Deadline, operation, message)
                    .with_context("program", self.path.display()));
            }
            std::thread::sleep(LOOK);
        };
        let end = |thread: Option<std::thread::JoinHandle<String>>| {
            thread.and_then(|thread| thread.join().ok()).unwrap_or_default()
        };
        let (out, log) = (end(out), end(log));
        if !status.success() {
            let message = format!("nvcc ended with {status}");
            return Err(Error::new(ErrorKind::System, operation, message)
                .with_context("program", self.path.display())
                .with_context("log", &log));
        }
        Ok(Ran { out, log })
    }
}

fn text_of(mut pipe: impl std::io::Read) -> String {
    let mut bytes = Vec::new();
    // What is not kept is read all the same, so that the program ends.
    let _ = pipe.by_ref().take(MOST_LOG).read_to_end(&mut bytes);
    let _ = std::io::copy(&mut pipe, &mut std::io::sink());
    String::from_utf8_lossy(&bytes).into_owned()
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where nvcc may be, the best place first.
fn places(env: &dyn Fn(&str) -> Option<std::ffi::OsString>) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        env("CUDA_HOME").into_iter().map(|home| PathBuf::from(home).join("bin/nvcc")).collect();
    if let Some(path) = env("PATH") {
        // A relative entry would take a program from the current folder.
        let folders = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
        all.extend(folders.map(|folder| folder.join("nvcc")));
    }
    let libraries = env("LD_LIBRARY_PATH").unwrap_or_default();
    // pip's packages lie in one folder, `bin` beside `lib`.
    let beside = std::env::split_paths(&libraries).filter(|folder| folder.is_absolute());
    all.extend(beside.filter_map(|folder| Some(folder.parent()?.join("bin/nvcc"))));
    all
}

/// The files of a source in a private folder.
struct Written {
    folder: TempDir,
    main: PathBuf,
    defines: PathBuf,
}

/// The file of the macros that options define: nvcc takes the commas of an option apart.
const DEFINES: &str = "defines.h";

/// The line of an option that defines a macro; none of another option.
fn define(option: &str) -> Option<String> {
    let (name, value) = option.strip_prefix("-D")?.split_once('=')?;
    Some(format!("#define {name} {value}\n"))
}

impl Written {
    fn new(source: &Source) -> Result<Self> {
        let system = |e| Error::system("write kernels", "a source cannot be written", e);
        let folder = tempfile::Builder::new().prefix("tokenyard-").tempdir().map_err(system)?;
        let headers = source.headers.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        let defines: String = source.options.iter().filter_map(|option| define(option)).collect();
        for (name, text) in headers.chain([source.main, (DEFINES, &defines)]) {
            fs::write(folder.path().join(name), text).map_err(system)?;
        }
        let at = |name| folder.path().join(name);
        Ok(Self { main: at(source.main.0), defines: at(DEFINES), folder })
    }

    /// Options, and folders that it includes from; then what it compiles.
    fn arguments<'a>(&'a self, source: &'a Source, own: &'a [&'a OsStr]) -> Vec<&'a OsStr> {
        let others = source.options.iter().filter(|option| define(option).is_none());
        let mut all: Vec<&OsStr> = others.map(OsStr::new).collect();
        all.extend([OsStr::new("-include"), self.defines.as_os_str()]);
        for folder in [self.folder.path()]
            .into_iter()
            .chain(source.include_folders.iter().map(PathBuf::as_path))
        {
            all.extend([OsStr::new("-I"), folder.as_os_str()]);
        }
        all.extend(own);
        all.push(self.main.as_os_str());
        all
    }
}

impl Compiler for Nvcc {
    fn load(&self) -> Result<()> {
        Ok(())
    }

    fn identity(&self) -> Result<String> {
        self.run("ask compiler", &[OsStr::new("--version")]).map(|ran| ran.out)
    }

    fn files_read(&self, source: &Source) -> Result<String> {
        let written = Written::new(source)?;
        let ran = self.run("look for headers", &written.arguments(source, &[OsStr::new("-M")]))?;
        let mut all = String::new();
        for file in files_of(&ran.out) {
            // The source's own files have a place of their own in the key.
            if file.starts_with(written.folder.path()) {
                continue;
            }
            let text = files::read(&file, MOST_FILE)
                .map_err(|e| Error::file(ErrorKind::System, "read header", &e))?;
            all.push_str(&format!("{} {}\n", file.display(), sum(&text)));
        }
        Ok(all)
    }

    fn options(&self, architecture: Architecture) -> Vec<String> {
        let name = architecture.name();
        [&format!("-arch={name}"), "-std=c++20", "--ptxas-options=-v"].map(str::to_owned).into()
    }

    fn compile(&self, source: &Source) -> Result<Compiled> {
        let written = Written::new(source)?;
        let image = written.folder.path().join("kernels.cubin");
        let own = [OsStr::new("-cubin"), OsStr::new("-o"), image.as_os_str()];
        let ran = self.run("compile kernels", &written.arguments(source, &own))?;
        let image = files::read(&image, MOST_FILE)
            .map_err(|e| Error::file(ErrorKind::System, "compile kernels", &e))?;
        Ok(Compiled { image, log: ran.log })
    }
}

/// The files in the rule of a makefile that `-M` prints.
fn files_of(rule: &str) -> Vec<PathBuf> {
    let (_, files) = rule.split_once(':').unwrap_or_default();
    let joined = files.replace("\\\n", " ");
    let mut all = Vec::new();
    let mut file = String::new();
    let mut rest = joined.chars();
    while let Some(next) = rest.next() {
        match next {
            // A blank of a name is escaped.
            '\\' => file.extend(rest.next()),
            next if next.is_whitespace() => all.push(std::mem::take(&mut file)),
            next => file.push(next),
        }
    }
    all.push(file);
    all.retain(|file| !file.is_empty());
    all.into_iter().map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn places_are_the_toolkit_s_then_those_of_the_path_then_those_of_pip_s_package() {
        let env = |name: &str| {
            Some(match name {
                "CUDA_HOME" => "/opt/cuda".into(),
                "PATH" => "/usr/bin:bin:/bin".into(),
                _ => "/site/nvidia/cu13/lib:lib".into(),
            })
        };
        let expected =
            ["/opt/cuda/bin/nvcc", "/usr/bin/nvcc", "/bin/nvcc", "/site/nvidia/cu13/bin/nvcc"];
        assert_eq!(places(&env), expected.map(PathBuf::from));
    }

    #[test]
    fn a_compiler_that_is_not_there_is_named_with_the_fix() {
        let error = Nvcc::find(Some(Path::new("/nowhere/nvcc"))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("looked at: /nowhere/nvcc"), "{error}");
        assert!(error.fix().is_some_and(|fix| fix.contains("pip install nvidia-cuda-nvcc")));
    }

    #[test]
    fn a_compiler_that_does_not_end_is_ended_with_what_it_has_started() {
        let folder = tempfile::tempdir().unwrap();
        let (program, child) = (folder.path().join("nvcc"), folder.path().join("child"));
        let text = format!("#!/bin/sh\nsleep 600 &\necho $! > {}\nwait\n", child.display());
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let nvcc = Nvcc { path: program, longest: Duration::from_secs(1) };
        let error = nvcc.identity().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Deadline, "{error}");
        let child = fs::read_to_string(child).unwrap();
        let state = fs::read_to_string(format!("/proc/{}/stat", child.trim()));
        // A process that nobody has waited for yet is dead all the same.
        assert!(state.is_err() || state.is_ok_and(|state| state.contains(") Z ")));
    }

    #[test]
    fn macros_go_into_a_file_whatever_is_in_them() {
        assert_eq!(define("-DSIZES=1,2").as_deref(), Some("#define SIZES 1,2\n"));
        assert_eq!(define("-DHEADER=<n.h>").as_deref(), Some("#define HEADER <n.h>\n"));
        assert_eq!(define("-std=c++20"), None);
    }

    #[test]
    fn the_files_of_a_rule_are_read_with_their_blanks() {
        let rule =
            "exchange.o : /tmp/a/exchange.cu \\\n    /usr/include/stdio.h \\\n  /opt/a\\ b/n.h\n";
        let expected = ["/tmp/a/exchange.cu", "/usr/include/stdio.h", "/opt/a b/n.h"];
        assert_eq!(files_of(rule), expected.map(PathBuf::from));
    }
}
