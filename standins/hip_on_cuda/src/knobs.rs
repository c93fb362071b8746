//! Failures on demand: the variable `TOKENYARD_HIP_FAIL` names functions, and the status that each returns.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The variable: `hipMemCreate=801, hipIpcOpenMemHandle=1@2` lets every call of the first function fail, and
/// the second call of the other.
const VARIABLE: &str = "TOKENYARD_HIP_FAIL";
/// The variable with the version that `hipRuntimeGetVersion` reports.
const VERSION: &str = "TOKENYARD_HIP_VERSION";
/// The variable with the threads of a warp that devices report.
const WAVE: &str = "TOKENYARD_HIP_WAVE";
/// Later than HIP 7.0, so that memory is shared by descriptors.
const DEFAULT_VERSION: i32 = 71_460_850;

/// A failure of one function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Failure {
    status: c_uint,
    /// The call that fails, from 1 on; nothing means all.
    call: Option<u32>,
}

type Failures = BTreeMap<String, Failure>;

fn parse(text: &str) -> Result<Failures, String> {
    let mut all = Failures::new();
    for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let wrong = || {
            format!("{VARIABLE}: found {entry:?}; expected FUNCTION=STATUS or FUNCTION=STATUS@CALL")
        };
        let (name, what) = entry.split_once('=').ok_or_else(wrong)?;
        let (status, call) = match what.split_once('@') {
            Some((status, call)) => (status, Some(call.parse().map_err(|_| wrong())?)),
            None => (what, None),
        };
        let status = status.parse().map_err(|_| wrong())?;
        all.insert(name.to_owned(), Failure { status, call });
    }
    Ok(all)
}

/// The status that this call of a function returns without doing anything, if it is to fail.
pub(crate) fn failure(function: &str) -> Option<c_uint> {
    static FAILURES: OnceLock<Failures> = OnceLock::new();
    static CALLS: Mutex<BTreeMap<String, u32>> = Mutex::new(BTreeMap::new());
    let failures = FAILURES.get_or_init(|| {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        parse(&text).unwrap_or_else(|message| {
            // A test with a wrong variable must not pass.
            eprintln!("stand-in for HIP: {message}");
            std::process::abort()
        })
    });
    let failure = failures.get(function)?;
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = calls.entry(function.to_owned()).or_default();
    *count += 1;
    failure.call.is_none_or(|call| call == *count).then_some(failure.status)
}

/// The version that the stand-in claims to be.
pub(crate) fn version() -> i32 {
    std::env::var(VERSION).ok().and_then(|text| text.parse().ok()).unwrap_or(DEFAULT_VERSION)
}

/// The threads of a warp that devices claim to have, where that is to differ from what they have.
pub(crate) fn wave() -> Option<i32> {
    let text = std::env::var(WAVE).ok()?;
    Some(text.parse().unwrap_or_else(|_| {
        eprintln!("stand-in for HIP: {WAVE}: found {text:?}; expected a number");
        std::process::abort()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_fail_always_or_at_one_call() {
        let failures = parse("hipMemCreate=801, hipIpcOpenMemHandle=1@2").unwrap();
        assert_eq!(failures["hipMemCreate"], Failure { status: 801, call: None });
        assert_eq!(failures["hipIpcOpenMemHandle"], Failure { status: 1, call: Some(2) });
        assert!(parse("").unwrap().is_empty());
    }

    #[test]
    fn a_variable_of_another_form_is_named() {
        for wrong in ["hipMemCreate", "hipMemCreate=many", "hipMemCreate=1@first"] {
            let text = parse(wrong).unwrap_err();
            assert!(text.contains(wrong) && text.contains("FUNCTION=STATUS@CALL"), "{text}");
        }
    }
}
