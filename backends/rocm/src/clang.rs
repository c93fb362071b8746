//! clang as a program: ROCm's, or that of the package `ziglang`, which needs no ROCm.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use tokenyard_core::{Error, ErrorKind, Result, files};
use tokenyard_gpu::compile::{Architecture, Compiled, Compiler, Source, Tool, Written};

/// The most bytes of an image, and of its assembly.
const MOST_FILE: u64 = 256 << 20;

/// clang and lld.
#[derive(Clone, Debug)]
pub struct Clang {
    clang: Tool,
    lld: Tool,
}

impl Clang {
    /// The compiler that the config names, a `clang` with `ld.lld` beside it or a `zig`; else that of
    /// `ROCM_PATH`, of `/opt/rocm`, or of `PATH`.
    ///
    /// # Errors
    /// `Unavailable` with the places that were searched, and the fix.
    pub fn find(named: Option<&Path>) -> Result<Self> {
        let places = match named {
            Some(path) => vec![path.to_owned()],
            None => places(&|name| std::env::var_os(name).filter(|value| !value.is_empty())),
        };
        if let Some(path) = places.iter().find(|path| path.is_file()) {
            return Ok(Self::at(path));
        }
        let looked: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
        let message = format!("found no clang; expected one; looked at: {}", looked.join(", "));
        Err(Error::new(ErrorKind::Unavailable, "load compiler", message).with_fix(
            "install ROCm, or `pip install ziglang==0.16.0`, and name clang or zig by `compiler` in \
             [kernels.rocm]",
        ))
    }

    fn at(path: &Path) -> Self {
        // One program that is both.
        if path.file_name() == Some(OsStr::new("zig")) {
            let zig = |which| Tool::new("zig", path.to_owned()).with_first(&[which]);
            return Self { clang: zig("clang"), lld: zig("ld.lld") };
        }
        Self {
            clang: Tool::new("clang", path.to_owned()),
            lld: Tool::new("ld.lld", path.with_file_name("ld.lld")),
        }
    }
}

/// Where clang may be, the best place first.
fn places(env: &dyn Fn(&str) -> Option<std::ffi::OsString>) -> Vec<PathBuf> {
    let of_rocm =
        env("ROCM_PATH").map(PathBuf::from).into_iter().chain([PathBuf::from("/opt/rocm")]);
    let mut all: Vec<PathBuf> = of_rocm.map(|rocm| rocm.join("llvm/bin/clang")).collect();
    if let Some(path) = env("PATH") {
        // A relative entry would take a program from the current folder.
        let folders = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
        all.extend(folders.map(|folder| folder.join("clang")));
    }
    all
}

impl Compiler for Clang {
    fn load(&self, _: Option<&Path>) -> Result<()> {
        Ok(())
    }

    fn identity(&self) -> Result<String> {
        self.clang.run("ask compiler", &[OsStr::new("--version")]).map(|ran| ran.out)
    }

    fn options(&self, architecture: Architecture) -> Vec<String> {
        options_of(architecture)
    }

    /// The log is the assembly, whose end reports the resources of each kernel.
    fn compile(&self, source: &Source) -> Result<Compiled> {
        let written = Written::new(source)?;
        let at = |name| written.folder().join(name);
        let (assembly, object, image) = (at("kernels.s"), at("kernels.o"), at("kernels.co"));
        // Its headers and device library belong to ROCm: the kernels need neither.
        let own = [
            "-nogpuinc",
            "-nogpulib",
            "--cuda-device-only",
            "--no-gpu-bundle-output",
            "-S",
            "-x",
            "hip",
            "-o",
        ];
        let mut own: Vec<&OsStr> = own.map(OsStr::new).into();
        own.push(assembly.as_os_str());
        self.clang.run("compile kernels", &written.arguments(source, &own))?;
        let architecture = architecture_of(source)?;
        let cpu = format!("-mcpu={architecture}");
        let assemble = ["-target", "amdgcn-amd-amdhsa", &cpu, "-c", "-o"].map(OsStr::new);
        let files = [object.as_os_str(), assembly.as_os_str()];
        self.clang.run("assemble kernels", &[&assemble[..], &files].concat())?;
        let link = [OsStr::new("-shared"), OsStr::new("-o"), image.as_os_str(), object.as_os_str()];
        self.lld.run("link kernels", &link)?;
        let read = |path: &Path| {
            files::read(path, MOST_FILE)
                .map_err(|e| Error::file(ErrorKind::System, "compile kernels", &e))
        };
        let log = String::from_utf8_lossy(&read(&assembly)?).into_owned();
        Ok(Compiled { image: read(&image)?, log })
    }
}

/// The options of every program, for hiprtc, too. Sums are defined bit for bit: by default clang contracts
/// products and sums of HIP.
pub(crate) fn options_of(architecture: Architecture) -> Vec<String> {
    let name = architecture.name();
    [&format!("--offload-arch={name}"), "-O3", "-std=c++20", "-ffp-contract=off"]
        .map(str::to_owned)
        .into()
}

/// The architecture that the options of a source name.
fn architecture_of(source: &Source) -> Result<&str> {
    let found = source.options.iter().find_map(|option| option.strip_prefix("--offload-arch="));
    found.ok_or_else(|| {
        let message = format!("found {:?}; expected --offload-arch", source.options);
        Error::new(ErrorKind::Internal, "compile kernels", message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_rocm_s_then_those_of_the_path() {
        let env = |name: &str| {
            Some(if name == "PATH" { "/usr/bin:bin".into() } else { "/opt/rocm-7.0".into() })
        };
        let expected =
            ["/opt/rocm-7.0/llvm/bin/clang", "/opt/rocm/llvm/bin/clang", "/usr/bin/clang"];
        assert_eq!(places(&env), expected.map(PathBuf::from));
    }

    #[test]
    fn a_compiler_that_is_not_there_is_named_with_the_fix() {
        let error = Clang::find(Some(Path::new("/nowhere/clang"))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("looked at: /nowhere/clang"), "{error}");
        assert!(error.fix().is_some_and(|fix| fix.contains("pip install ziglang==0.16.0")));
    }

    #[test]
    fn no_product_and_sum_is_contracted_on_any_architecture() {
        let clang = Clang::at(Path::new("/opt/rocm/llvm/bin/clang"));
        let options = clang.options(Architecture::Gfx(0x950));
        assert_eq!(options[0], "--offload-arch=gfx950");
        assert!(options.iter().any(|option| option == "-ffp-contract=off"), "{options:?}");
    }
}
