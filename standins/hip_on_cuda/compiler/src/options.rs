//! Options of hiprtc as options of NVRTC.

use std::borrow::Cow;

use cudarc::driver::sys;
use sys::CUdevice_attribute as A;

/// The architecture where there is no GPU to ask.
const DEFAULT: u32 = 90;

/// hiprtc's options for NVRTC: the architecture is that of the GPU that is there. None if they name no
/// architecture.
pub(crate) fn of_nvrtc<'a>(given: impl Iterator<Item = Cow<'a, str>>) -> Option<Vec<String>> {
    of_nvrtc_for(given, capability())
}

fn of_nvrtc_for<'a>(
    given: impl Iterator<Item = Cow<'a, str>>,
    capability: u32,
) -> Option<Vec<String>> {
    let mut has_architecture = false;
    let mut all = vec![format!("-arch=sm_{capability}")];
    for option in given {
        match option.as_ref() {
            option if option.starts_with("--offload-arch=") => has_architecture = true,
            // Words of clang. Kernels name each multiply-add, so nothing else is contracted.
            option if option.starts_with("-O") => {}
            "-ffp-contract=off" => all.push("--fmad=false".to_owned()),
            option => all.push(option.to_owned()),
        }
    }
    has_architecture.then_some(all)
}

/// The compute capability of the first GPU, as major * 10 + minor.
fn capability() -> u32 {
    let ask = |which| {
        let mut value = 0;
        // SAFETY: the driver is loaded and initialised below; the number is ours.
        let status = unsafe { sys::cuDeviceGetAttribute(&mut value, which, 0) };
        (status == sys::CUresult::CUDA_SUCCESS).then_some(value as u32)
    };
    // SAFETY: opening the driver's library runs its constructors only; it may be initialised again.
    let is_ready =
        unsafe { sys::is_culib_present() && sys::cuInit(0) == sys::CUresult::CUDA_SUCCESS };
    if !is_ready {
        return DEFAULT;
    }
    let major = ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    let minor = ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    major.zip(minor).map_or(DEFAULT, |(major, minor)| 10 * major + minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(given: &[&'static str]) -> Option<Vec<String>> {
        of_nvrtc_for(given.iter().map(|option| Cow::Borrowed(*option)), 90)
    }

    #[test]
    fn options_of_clang_become_those_of_nvrtc_and_defines_stay() {
        let given =
            ["--offload-arch=gfx942", "-O3", "-std=c++20", "-ffp-contract=off", "-DTY_ROWS_TMA=0"];
        let expected = ["-arch=sm_90", "-std=c++20", "--fmad=false", "-DTY_ROWS_TMA=0"];
        assert_eq!(translated(&given).unwrap(), expected);
    }

    #[test]
    fn a_program_for_no_architecture_is_refused() {
        assert_eq!(translated(&["-O3"]), None);
    }
}
