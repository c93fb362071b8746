//! HIP's run-time compiler behind [`Compiler`], loaded at run time.

use std::ffi::{CStr, CString, c_char, c_uint, c_void};
use std::path::Path;

use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_gpu::compile::{Architecture, Compiled, Compiler, Source, mapped, mapped_identity};
use tokenyard_sys_hip::{Hiprtc, consts};

use crate::clang::options_of;
use crate::driver::load_compiler;

/// The beginning of its file's name, and that of the library that generates its code.
const LIBRARY: &str = "libhiprtc.so";
const GENERATOR: &str = "libamd_comgr.so";

/// hiprtc.
#[derive(Debug)]
pub struct HipCompiler;

impl Compiler for HipCompiler {
    fn load(&self, folder: Option<&Path>) -> Result<()> {
        load_compiler(folder).map(drop)
    }

    fn identity(&self) -> Result<String> {
        let (hiprtc, mut major, mut minor) = (load_compiler(None)?, 0, 0);
        // SAFETY: the compiler is loaded; both numbers are ours.
        let status = unsafe { (hiprtc.version)(&mut major, &mut minor) };
        check(hiprtc, "ask compiler", status)?;
        let file = mapped_identity(LIBRARY)?;
        // It is loaded with the first program, in some versions.
        let generator = mapped(GENERATOR).map(|_| mapped_identity(GENERATOR)).transpose()?;
        Ok(format!("hiprtc {major}.{minor}, {file}, {generator:?}"))
    }

    fn options(&self, architecture: Architecture) -> Vec<String> {
        options_of(architecture)
    }

    fn compile(&self, source: &Source) -> Result<Compiled> {
        let hiprtc = load_compiler(None)?;
        let names = texts(source.headers.iter().map(|(name, _)| name.as_str()))?;
        let contents = texts(source.headers.iter().map(|(_, text)| text.as_str()))?;
        let options = texts(source.options.iter().map(String::as_str))?;
        let main = texts([source.main.text, source.main.name].into_iter())?;
        let (names_at, contents_at) = (pointers(&names), pointers(&contents));
        let mut raw = std::ptr::null_mut();
        // SAFETY: every text ends with a zero and lives until the end of this function.
        let status = unsafe {
            (hiprtc.create_program)(
                &mut raw,
                main[0].as_ptr(),
                main[1].as_ptr(),
                names.len() as i32,
                contents_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        check(hiprtc, "read kernels", status)?;
        let program = RawProgram { hiprtc, raw };
        let options_at = pointers(&options);
        // SAFETY: a program that lives, and the texts of above.
        let status = unsafe {
            (hiprtc.compile_program)(program.raw, options.len() as i32, options_at.as_ptr())
        };
        let log = program.log()?;
        check(hiprtc, "compile kernels", status).map_err(|e| e.with_context("log", &log))?;
        Ok(Compiled { image: program.image()?, log })
    }
}

/// Texts for C.
fn texts<'a>(all: impl Iterator<Item = &'a str>) -> Result<Vec<CString>> {
    let zero =
        |_| Error::new(ErrorKind::InvalidInput, "compile kernels", "a source has a zero byte");
    all.map(|text| CString::new(text).map_err(zero)).collect()
}

fn pointers(all: &[CString]) -> Vec<*const c_char> {
    all.iter().map(|text| text.as_ptr()).collect()
}

/// A program of the compiler.
struct RawProgram {
    hiprtc: &'static Hiprtc,
    raw: *mut c_void,
}

type SizeOf = unsafe extern "C" fn(*mut c_void, *mut usize) -> c_uint;
type Fill = unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_uint;

impl RawProgram {
    fn log(&self) -> Result<String> {
        let calls = (self.hiprtc.get_program_log_size, self.hiprtc.get_program_log);
        let text = self.bytes("read log", calls.0, calls.1)?;
        let text = text.strip_suffix(&[0]).unwrap_or(&text);
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    fn image(&self) -> Result<Vec<u8>> {
        self.bytes("read image", self.hiprtc.get_code_size, self.hiprtc.get_code)
    }

    fn bytes(&self, operation: &'static str, size: SizeOf, fill: Fill) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: a program that lives; the number is ours.
        check(self.hiprtc, operation, unsafe { size(self.raw, &mut bytes) })?;
        let mut all = vec![0_u8; bytes];
        // SAFETY: room for as many bytes as the compiler reported.
        check(self.hiprtc, operation, unsafe { fill(self.raw, all.as_mut_ptr().cast()) })?;
        Ok(all)
    }
}

impl Drop for RawProgram {
    fn drop(&mut self) {
        // SAFETY: made once; the call clears the handle.
        let _ = unsafe { (self.hiprtc.destroy_program)(&mut self.raw) };
    }
}

fn check(hiprtc: &Hiprtc, operation: &'static str, status: c_uint) -> Result<()> {
    if status == consts::RTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: the compiler is loaded; its texts are static, and end with a zero.
    let text = unsafe { (hiprtc.get_error_string)(status) };
    let text = if text.is_null() {
        "no text".into()
    } else {
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy()
    };
    let message = format!("hiprtc says {text} ({status})");
    Err(Error::new(ErrorKind::System, operation, message))
}
