//! A stand-in for AMD's hiprtc, for tests only: the functions that `tokenyard-sys-hip` calls, over NVIDIA's
//! run-time compiler. The same sources then take CUDA's words. **It compiles nothing for an AMD GPU.**

mod options;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use cudarc::nvrtc::sys;

/// `HIPRTC_ERROR_INVALID_INPUT`.
const INVALID_INPUT: c_uint = 3;
/// `HIPRTC_ERROR_INTERNAL_ERROR`.
const INTERNAL_ERROR: c_uint = 11;

type Program = *mut c_void;

/// Whether NVRTC can be called.
fn is_ready() -> bool {
    // SAFETY: opening the library runs its constructors only.
    unsafe { sys::is_culib_present() }
}

/// The status of a call of NVRTC: hiprtc has the same numbers up to 11.
fn of_nvrtc(call: impl FnOnce() -> sys::nvrtcResult) -> c_uint {
    if !is_ready() {
        return INTERNAL_ERROR;
    }
    (call() as c_uint).min(INTERNAL_ERROR)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) -> c_uint {
    // SAFETY: by hiprtc's contract, which is NVRTC's.
    of_nvrtc(|| unsafe { sys::nvrtcVersion(major, minor) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hiprtcCreateProgram(
    program: *mut Program,
    source: *const c_char,
    name: *const c_char,
    headers: c_int,
    contents: *const *const c_char,
    names: *const *const c_char,
) -> c_uint {
    of_nvrtc(|| {
        // SAFETY: as above.
        unsafe { sys::nvrtcCreateProgram(program.cast(), source, name, headers, contents, names) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hiprtcCompileProgram(
    program: Program,
    count: c_int,
    options: *const *const c_char,
) -> c_uint {
    let given = (0..usize::try_from(count).unwrap_or(0)).map(|index| {
        // SAFETY: by hiprtc's contract, as many texts as it says.
        unsafe { CStr::from_ptr(*options.add(index)) }.to_string_lossy()
    });
    let Some(own) = options::of_nvrtc(given) else { return INVALID_INPUT };
    let own: Result<Vec<CString>, _> = own.into_iter().map(CString::new).collect();
    let Ok(own) = own else { return INVALID_INPUT };
    let pointers: Vec<*const c_char> = own.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: as above; the texts live until the end of this function.
    of_nvrtc(|| unsafe {
        sys::nvrtcCompileProgram(program.cast(), pointers.len() as c_int, pointers.as_ptr())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hiprtcDestroyProgram(program: *mut Program) -> c_uint {
    // SAFETY: as above.
    of_nvrtc(|| unsafe { sys::nvrtcDestroyProgram(program.cast()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hiprtcGetCodeSize(program: Program, bytes: *mut usize) -> c_uint {
    // SAFETY: as above.
    of_nvrtc(|| unsafe { sys::nvrtcGetCUBINSize(program.cast(), bytes) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hiprtcGetCode(program: Program, code: *mut c_char) -> c_uint {
    // SAFETY: as above.
    of_nvrtc(|| unsafe { sys::nvrtcGetCUBIN(program.cast(), code) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hiprtcGetProgramLogSize(program: Program, bytes: *mut usize) -> c_uint {
    // SAFETY: as above.
    of_nvrtc(|| unsafe { sys::nvrtcGetProgramLogSize(program.cast(), bytes) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hiprtcGetProgramLog(program: Program, log: *mut c_char) -> c_uint {
    // SAFETY: as above.
    of_nvrtc(|| unsafe { sys::nvrtcGetProgramLog(program.cast(), log) })
}

#[unsafe(no_mangle)]
extern "C" fn hiprtcGetErrorString(status: c_uint) -> *const c_char {
    let text = match status {
        0 => c"no error",
        INVALID_INPUT => c"stand-in for hiprtc: invalid input; expected --offload-arch",
        6 => c"stand-in for hiprtc: NVRTC found an error in the source",
        INTERNAL_ERROR => c"stand-in for hiprtc: no libnvrtc.so, or another error of it",
        _ => c"stand-in for hiprtc: an error of NVRTC",
    };
    text.as_ptr()
}
