//! The primitives that loom replaces in model checks.

#[cfg(not(feature = "loom"))]
pub(super) use real::*;

#[cfg(feature = "loom")]
pub(super) use model::*;

#[cfg(not(feature = "loom"))]
mod real {
    pub(in super::super) use std::sync::Arc;
    pub(in super::super) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
    pub(in super::super) use std::thread::{Thread, current, park_timeout};

    /// `std::cell::UnsafeCell` with the interface of loom's.
    #[derive(Debug)]
    pub(in super::super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(in super::super) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        pub(in super::super) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        pub(in super::super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(feature = "loom")]
mod model {
    pub(in super::super) use loom::cell::UnsafeCell;
    pub(in super::super) use loom::sync::Arc;
    pub(in super::super) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
    pub(in super::super) use loom::thread::{Thread, current};

    /// Without a time limit, so that a lost wake-up is found as a deadlock.
    pub(in super::super) fn park_timeout(_: std::time::Duration) {
        loom::thread::park();
    }
}
