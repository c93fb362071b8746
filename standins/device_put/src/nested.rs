//! A device API around that of `nvlink`, for stand-ins: the text of `nvlink`'s lies in a namespace `inner` before it,
//! and its parameters come first.

use tokenyard_core::transport::Transport as _;
use tokenyard_core::{Result, abi};
use tokenyard_cuda::Nvlink;

/// The text: that of `nvlink` in its namespace, then a stand-in's own.
pub fn text(own: &str) -> String {
    let below = Nvlink::device_source().map(|below| {
        // SAFETY: the text of a constant.
        let text = unsafe { std::slice::from_raw_parts(below.source.data, below.source.bytes) };
        String::from_utf8_lossy(text).into_owned()
    });
    format!("namespace inner {{\n{}\n}}\n{own}", below.unwrap_or_default())
}

/// The parameters: those of an instance of `nvlink`, then a stand-in's own.
///
/// # Errors
/// Of `nvlink`, such as a peer that is not connected.
pub fn params(nvlink: &Nvlink, own: &[u64]) -> Result<Vec<u64>> {
    let inner = nvlink.device_api()?;
    // SAFETY: as many bytes as `nvlink` reports, which lives; words of 8 bytes.
    let words =
        unsafe { std::slice::from_raw_parts(inner.params.cast::<u64>(), inner.param_bytes / 8) };
    Ok([words, own].concat())
}

/// The device API of such a text, with so many words of parameters behind those of `nvlink`; without values.
///
/// # Errors
/// Of `nvlink`.
pub fn device_source(text: &'static str, own_words: usize) -> Result<abi::TyDeviceApi> {
    let below = Nvlink::device_source()?;
    Ok(abi::TyDeviceApi {
        flags: 0,
        source: abi::TyStr { data: text.as_ptr(), bytes: text.len() },
        params: std::ptr::null(),
        param_bytes: below.param_bytes + 8 * own_words,
        param_alignment: align_of::<u64>(),
        ..below
    })
}
