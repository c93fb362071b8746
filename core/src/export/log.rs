//! A plugin has its own copy of every static, `tracing`'s subscriber included. So a plugin's log goes
//! through the host's table.

use tracing::span;

use crate::abi;
use crate::bootstrap::EventText;

/// Forwards this image's log to `host`, unless the image is the host itself or already logs.
///
/// # Safety
/// `host` is null or a table that lives as long as the process (the ABI's promise).
pub(super) unsafe fn forward_to(host: *const abi::TyHost) {
    // SAFETY: by this function's contract.
    let Some(host) = (unsafe { host.as_ref() }) else { return };
    let Some(log) = host.log else { return };
    if log as usize == crate::host::log as *const () as usize {
        return;
    }
    // A subscriber that is already there was chosen by the plugin's author: it stays.
    let _ =
        tracing::subscriber::set_global_default(Forward { context: host.context as usize, log });
}

struct Forward {
    context: usize,
    log: unsafe extern "C" fn(*mut std::ffi::c_void, u32, abi::TyStr, abi::TyStr),
}

impl tracing::Subscriber for Forward {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= tracing::Level::DEBUG
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let EventText { text, .. } = EventText::of(event);
        let level = match *event.metadata().level() {
            tracing::Level::ERROR => abi::TY_LOG_ERROR,
            tracing::Level::WARN => abi::TY_LOG_WARN,
            tracing::Level::INFO => abi::TY_LOG_INFO,
            _ => abi::TY_LOG_DEBUG,
        };
        let target = event.metadata().target();
        let as_ty = |s: &str| abi::TyStr { data: s.as_ptr(), bytes: s.len() };
        // SAFETY: the host's table outlives every component, and its log may be called by any thread.
        unsafe { (self.log)(self.context as *mut _, level, as_ty(target), as_ty(&text)) };
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
