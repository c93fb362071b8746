//! CUDA's run-time compiler behind [`Compiler`], loaded at run time.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;

use cudarc::nvrtc::sys;
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_gpu::compile::{Architecture, Compiled, Compiler, Source, mapped_identity};

use crate::driver::refuse_folder;

/// The beginning of its file's name.
pub(crate) const LIBRARY: &str = "libnvrtc.so";

/// The first release of the compiler that the kernels are compiled with: CUDA 13.
const OLDEST_MAJOR: i32 = 13;

/// NVRTC.
#[derive(Debug)]
pub struct Nvrtc;

impl Compiler for Nvrtc {
    fn load(&self, folder: Option<&Path>) -> Result<()> {
        refuse_folder(folder)?;
        // SAFETY: opening the library runs its constructors only.
        if unsafe { sys::is_culib_present() } {
            return expect_version(version()?);
        }
        let message = "found no libnvrtc.so; expected the run-time compiler of CUDA 13";
        Err(Error::new(ErrorKind::Unavailable, "load compiler", message).with_fix(
            "install it (`pip install nvidia-cuda-nvrtc==13.*`, or the package cuda-nvrtc-13-0) and \
             put its folder into LD_LIBRARY_PATH",
        ))
    }

    fn identity(&self) -> Result<String> {
        identity()
    }

    fn options(&self, architecture: Architecture) -> Vec<String> {
        vec![
            format!("-arch={}", architecture.name()),
            "-std=c++20".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ]
    }

    fn compile(&self, source: &Source) -> Result<Compiled> {
        let texts = |all: &mut dyn Iterator<Item = &str>| -> Result<Vec<CString>> {
            all.map(|text| {
                CString::new(text).map_err(|_| {
                    Error::new(
                        ErrorKind::InvalidInput,
                        "compile kernels",
                        "a source has a zero byte",
                    )
                })
            })
            .collect()
        };
        let names = texts(&mut source.headers.iter().map(|(name, _)| name.as_str()))?;
        let contents = texts(&mut source.headers.iter().map(|(_, text)| text.as_str()))?;
        let options = texts(&mut source.options.iter().map(String::as_str))?;
        let main = texts(&mut [source.main.text, source.main.name].into_iter())?;
        let pointers = |all: &[CString]| all.iter().map(|t| t.as_ptr()).collect::<Vec<_>>();
        let (names_at, contents_at) = (pointers(&names), pointers(&contents));
        let mut raw = std::ptr::null_mut();
        // SAFETY: every text ends with a zero and lives until the end of this function.
        check("read kernels", unsafe {
            sys::nvrtcCreateProgram(
                &mut raw,
                main[0].as_ptr(),
                main[1].as_ptr(),
                names.len() as i32,
                contents_at.as_ptr(),
                names_at.as_ptr(),
            )
        })?;
        let program = Raw(raw);
        let options_at = pointers(&options);
        // SAFETY: a program that lives, and the texts of above.
        let status = unsafe {
            sys::nvrtcCompileProgram(program.0, options.len() as i32, options_at.as_ptr())
        };
        let log = program.log()?;
        check("compile kernels", status).map_err(|e| e.with_context("log", &log))?;
        Ok(Compiled { image: program.image()?, log })
    }
}

fn version() -> Result<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the compiler is loaded; both numbers are ours.
    check("ask compiler", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
    Ok((major, minor))
}

/// Refuses a compiler that the kernels are not written for.
fn expect_version(version: (i32, i32)) -> Result<()> {
    let (major, minor) = version;
    if major >= OLDEST_MAJOR {
        return Ok(());
    }
    let message = format!("found NVRTC {major}.{minor}; expected {OLDEST_MAJOR}.0 or later");
    Err(Error::new(ErrorKind::Unavailable, "load compiler", message).with_fix(
        "install it (`pip install nvidia-cuda-nvrtc==13.*`, or the package cuda-nvrtc-13-0) and put its \
         folder first into LD_LIBRARY_PATH",
    ))
}

/// The version, which many releases share, and the size and time of the library's file.
fn identity() -> Result<String> {
    let (major, minor) = version()?;
    let file = mapped_identity(LIBRARY)?;
    Ok(format!("nvrtc {major}.{minor}, {file}"))
}

/// A program of the compiler.
struct Raw(sys::nvrtcProgram);

impl Raw {
    fn log(&self) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: a program that lives.
        check("read log", unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut bytes) })?;
        let mut text = vec![0_u8; bytes];
        // SAFETY: room for as many bytes as the compiler reported.
        check("read log", unsafe {
            sys::nvrtcGetProgramLog(self.0, text.as_mut_ptr().cast::<c_char>())
        })?;
        let text = text.strip_suffix(&[0]).unwrap_or(&text);
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    fn image(&self) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: a program that was compiled.
        check("read image", unsafe { sys::nvrtcGetCUBINSize(self.0, &mut bytes) })?;
        let mut image = vec![0_u8; bytes];
        // SAFETY: room for as many bytes as the compiler reported.
        check("read image", unsafe {
            sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast::<c_char>())
        })?;
        Ok(image)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: made once; the call clears the handle.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn check(operation: &'static str, status: sys::nvrtcResult) -> Result<()> {
    if status == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: the compiler is loaded; its texts are static.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(status)) };
    let message = format!("NVRTC says {}", text.to_string_lossy());
    Err(Error::new(ErrorKind::System, operation, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_of_cuda_12_is_refused_with_its_version() {
        assert!(expect_version((13, 0)).is_ok() && expect_version((14, 1)).is_ok());
        let text = expect_version((12, 8)).unwrap_err().to_string();
        assert!(text.contains("found NVRTC 12.8; expected 13.0 or later"), "{text}");
    }
}
