//! CUDA's compiler as a program, for device APIs that include headers which NVRTC cannot read.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tokenyard_core::{Error, ErrorKind, Result, files};
use tokenyard_gpu::compile::{Architecture, Compiled, Compiler, Source, Tool, Written, mapped};

use crate::nvrtc;

/// The most bytes of a header, and of an image.
const MOST_FILE: u64 = 256 << 20;

/// nvcc, at a path.
#[derive(Debug)]
pub struct Nvcc {
    tool: Tool,
}

impl Nvcc {
    /// The nvcc that the config names, else that of `CUDA_HOME`, of `PATH`, or of pip's package
    /// `nvidia-cuda-nvcc` beside a folder of `LD_LIBRARY_PATH` or beside the loaded NVRTC.
    ///
    /// # Errors
    /// `Unavailable` with the places that were searched, and the fix.
    pub fn find(named: Option<&Path>) -> Result<Self> {
        let places = match named {
            Some(path) => vec![path.to_owned()],
            None => {
                let env = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
                places(&env, mapped(nvrtc::LIBRARY).as_deref())
            }
        };
        if let Some(path) = places.iter().find(|path| path.is_file()) {
            return Ok(Self { tool: Tool::new("nvcc", path.clone()) });
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
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where nvcc may be, the best place first; `nvrtc` is the file of the run-time compiler that is loaded.
fn places(env: &dyn Fn(&str) -> Option<std::ffi::OsString>, nvrtc: Option<&Path>) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        env("CUDA_HOME").into_iter().map(|home| PathBuf::from(home).join("bin/nvcc")).collect();
    if let Some(path) = env("PATH") {
        // A relative entry would take a program from the current folder.
        let folders = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
        all.extend(folders.map(|folder| folder.join("nvcc")));
    }
    let libraries = env("LD_LIBRARY_PATH").unwrap_or_default();
    // pip's packages lie in one folder, `bin` beside `lib`. A framework loads its NVRTC from that folder by
    // itself.
    let libraries = std::env::split_paths(&libraries).filter(|folder| folder.is_absolute());
    let loaded = nvrtc.and_then(Path::parent).map(Path::to_owned);
    let beside = libraries.chain(loaded);
    all.extend(beside.filter_map(|folder| Some(folder.parent()?.join("bin/nvcc"))));
    all
}

impl Compiler for Nvcc {
    fn load(&self, _: Option<&Path>) -> Result<()> {
        Ok(())
    }

    fn identity(&self) -> Result<String> {
        self.tool.run("ask compiler", &[OsStr::new("--version")]).map(|ran| ran.out)
    }

    fn files_read(&self, source: &Source) -> Result<String> {
        let written = Written::new(source)?;
        let ran =
            self.tool.run("look for headers", &written.arguments(source, &[OsStr::new("-M")]))?;
        let mut all = String::new();
        for file in files_of(&ran.out) {
            // The files of the source itself have a separate place in the key.
            if file.starts_with(written.folder()) {
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
        let image = written.folder().join("kernels.cubin");
        let own = [OsStr::new("-cubin"), OsStr::new("-o"), image.as_os_str()];
        let ran = self.tool.run("compile kernels", &written.arguments(source, &own))?;
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
            // A blank inside a name is escaped.
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
        assert_eq!(places(&env, None), expected.map(PathBuf::from));
        let loaded = Path::new("/venv/nvidia/cu13/lib/libnvrtc.so.13");
        assert_eq!(places(&|_| None, Some(loaded)), [Path::new("/venv/nvidia/cu13/bin/nvcc")]);
    }

    #[test]
    fn a_compiler_that_is_not_there_is_named_with_the_fix() {
        let error = Nvcc::find(Some(Path::new("/nowhere/nvcc"))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("looked at: /nowhere/nvcc"), "{error}");
        assert!(error.fix().is_some_and(|fix| fix.contains("pip install nvidia-cuda-nvcc")));
    }

    #[test]
    fn the_files_of_a_rule_are_read_with_their_blanks() {
        let rule =
            "exchange.o : /tmp/a/exchange.cu \\\n    /usr/include/stdio.h \\\n  /opt/a\\ b/n.h\n";
        let expected = ["/tmp/a/exchange.cu", "/usr/include/stdio.h", "/opt/a b/n.h"];
        assert_eq!(files_of(rule), expected.map(PathBuf::from));
    }
}
