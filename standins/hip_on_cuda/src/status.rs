//! Statuses: CUDA's as HIP's, and their words.

use std::cell::Cell;
use std::ffi::{CStr, c_uint};

use cudarc::driver::sys::CUresult;

/// A status of HIP that is no success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed(pub(crate) c_uint);

pub(crate) type Answer = Result<(), Failed>;

pub(crate) const INVALID_VALUE: Failed = Failed(1);
pub(crate) const NOT_INITIALIZED: Failed = Failed(3);
pub(crate) const INSUFFICIENT_DRIVER: Failed = Failed(35);
const UNKNOWN: Failed = Failed(999);

/// The statuses that both have under one number: number, HIP's name, and a text.
const BOTH: &[(c_uint, &CStr, &CStr)] = &[
    (0, c"hipSuccess", c"no error"),
    (1, c"hipErrorInvalidValue", c"stand-in for HIP: invalid argument"),
    (2, c"hipErrorOutOfMemory", c"stand-in for HIP: out of memory"),
    (3, c"hipErrorNotInitialized", c"stand-in for HIP: hipInit has not succeeded"),
    (35, c"hipErrorInsufficientDriver", c"stand-in for HIP: found no libcuda.so, which it calls"),
    (100, c"hipErrorNoDevice", c"stand-in for HIP: NVIDIA's driver sees no device"),
    (101, c"hipErrorInvalidDevice", c"stand-in for HIP: invalid device ordinal"),
    (200, c"hipErrorInvalidImage", c"stand-in for HIP: the image is no CUDA kernel"),
    (201, c"hipErrorInvalidContext", c"stand-in for HIP: invalid context"),
    (400, c"hipErrorInvalidHandle", c"stand-in for HIP: invalid handle"),
    (500, c"hipErrorNotFound", c"stand-in for HIP: not found"),
    (600, c"hipErrorNotReady", c"stand-in for HIP: the work has not ended"),
    (700, c"hipErrorIllegalAddress", c"stand-in for HIP: a kernel used an illegal address"),
    (704, c"hipErrorPeerAccessAlreadyEnabled", c"stand-in for HIP: peer access is there already"),
    (712, c"hipErrorHostMemoryAlreadyRegistered", c"stand-in for HIP: already registered"),
    (713, c"hipErrorHostMemoryNotRegistered", c"stand-in for HIP: not registered"),
    (719, c"hipErrorLaunchFailure", c"stand-in for HIP: a kernel failed"),
    (
        720,
        c"hipErrorCooperativeLaunchTooLarge",
        c"stand-in for HIP: too many blocks to be resident",
    ),
    (801, c"hipErrorNotSupported", c"stand-in for HIP: not supported"),
    (900, c"hipErrorStreamCaptureUnsupported", c"stand-in for HIP: not while a stream captures"),
    (901, c"hipErrorStreamCaptureInvalidated", c"stand-in for HIP: the capture is invalid"),
    (
        906,
        c"hipErrorStreamCaptureImplicit",
        c"stand-in for HIP: an implicit dependency in a capture",
    ),
    (908, c"hipErrorStreamCaptureWrongThread", c"stand-in for HIP: another thread's capture"),
    (999, c"hipErrorUnknown", c"stand-in for HIP: another error of NVIDIA's driver"),
];

fn words(status: c_uint) -> (&'static CStr, &'static CStr) {
    let find = |wanted| BOTH.iter().find(|(number, ..)| *number == wanted);
    let (_, name, text) = find(status).or_else(|| find(UNKNOWN.0)).unwrap_or(&BOTH[0]);
    (name, text)
}

pub(crate) fn name(status: c_uint) -> &'static CStr {
    words(status).0
}

pub(crate) fn text(status: c_uint) -> &'static CStr {
    words(status).1
}

/// CUDA's status as HIP's: the numbers of one are those of the other, as far as both have them.
pub(crate) fn of_cuda(status: CUresult) -> Answer {
    let number = status as c_uint;
    match number {
        0 => Ok(()),
        _ if BOTH.iter().any(|(known, ..)| *known == number) => Err(Failed(number)),
        _ => Err(UNKNOWN),
    }
}

thread_local! {
    static LAST: Cell<c_uint> = const { Cell::new(0) };
}

/// Stores what `hipGetLastError` returns on this thread.
pub(crate) fn note(status: c_uint) {
    if status != 0 {
        LAST.set(status);
    }
}

/// Takes it back.
pub(crate) fn take() -> c_uint {
    LAST.replace(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_have_the_numbers_of_hip_and_unknown_ones_are_named_so() {
        assert_eq!(of_cuda(CUresult::CUDA_SUCCESS), Ok(()));
        assert_eq!(of_cuda(CUresult::CUDA_ERROR_OUT_OF_MEMORY), Err(Failed(2)));
        assert_eq!(of_cuda(CUresult::CUDA_ERROR_NOT_READY), Err(Failed(600)));
        assert_eq!(of_cuda(CUresult::CUDA_ERROR_NOT_SUPPORTED), Err(Failed(801)));
        // HIP has no such number.
        assert_eq!(of_cuda(CUresult::CUDA_ERROR_MPS_CONNECTION_FAILED), Err(UNKNOWN));
        assert_eq!(name(600), c"hipErrorNotReady");
        assert_eq!(name(12_345), c"hipErrorUnknown");
    }

    #[test]
    fn every_text_of_a_failure_says_that_it_is_a_stand_in_s() {
        for (number, _, text) in BOTH.iter().skip(1) {
            let text = text.to_str().unwrap();
            assert!(text.starts_with("stand-in for HIP: "), "{number}: {text}");
        }
    }

    #[test]
    fn the_last_error_of_a_thread_is_taken_once() {
        note(2);
        note(0);
        assert_eq!([take(), take()], [2, 0]);
    }
}
