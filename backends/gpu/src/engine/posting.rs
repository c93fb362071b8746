//! The means by which kernels reach other ranks, as the host watches them (INV-7).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::link::Link;
use tokenyard_core::wait::monotonic_ns;
use tokenyard_core::{Result, abi};

use crate::driver::Context;
use crate::engine::device_api::DeviceApi;
use crate::engine::gpu_ring::Ring;
use crate::engine::member::Member;

/// How often the transport is asked while kernels run, in nanoseconds.
const ASK_EVERY: u64 = 5_000_000;

/// See the [module](self).
#[derive(Debug)]
pub(crate) enum Posting {
    /// A ring that the host serves, and the link that its commands are posted to.
    Ring(Ring, Link),
    /// The transport's device API.
    DeviceApi(Health),
}

impl Posting {
    /// The way of kernels to other ranks over a link of a plan, and their device API. `signals`: those of the link.
    ///
    /// # Safety
    /// Objects that the plan points to outlive the result.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        member: &Member,
        signals: u32,
        plan: &abi::TyPlan,
    ) -> Result<(Self, DeviceApi)> {
        let is_up = member.level == abi::TY_LEVEL_SCALE_UP;
        let raw = if is_up { &plan.scale_up } else { &plan.scale_out };
        // SAFETY: by this function's contract; the host passes judged tables.
        let link = unsafe { Link::from_abi(raw)? };
        if member.path.has_ring() {
            let ring = Ring::new(context, member.level, signals)?;
            let device_api = ring.device_api(member.rank);
            return Ok((Self::Ring(ring, link), device_api));
        }
        // SAFETY: the link lives, and with it the objects that its device API points to.
        let device_api =
            unsafe { DeviceApi::read(&context.device.platform.dialect, &link.device_api()?)? };
        device_api.check_puts(member.path.puts())?;
        Ok((Self::DeviceApi(Health::new(link)), device_api))
    }

    /// Checks that the commands of kernels still leave. Cheap: hosts ask it as fast as they can.
    ///
    /// # Errors
    /// The failure; the same at every later call.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Self::Ring(ring, _) => ring.check(),
            Self::DeviceApi(health) => health.check(monotonic_ns()),
        }
    }

    /// Asks the transport now, and returns the failure in its own words. Only while an operation is open.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub(crate) fn explain(&self) -> Result<()> {
        match self {
            Self::Ring(ring, link) => {
                ring.check().map_err(|error| link.health().err().unwrap_or(error))
            }
            Self::DeviceApi(health) => health.link.health(),
        }
    }

    /// The ring, if there is one.
    pub(crate) fn ring(&self) -> Option<&Ring> {
        match self {
            Self::Ring(ring, _) => Some(ring),
            Self::DeviceApi(_) => None,
        }
    }
}

/// A transport that kernels use by themselves: its errors reach the host only when the host asks.
#[derive(Debug)]
pub(crate) struct Health {
    link: Link,
    pace: Pace,
}

impl Health {
    pub(crate) fn new(link: Link) -> Self {
        Self { link, pace: Pace::default() }
    }

    fn check(&self, now: u64) -> Result<()> {
        if !self.pace.is_due(now) {
            return Ok(());
        }
        self.link.health().inspect_err(|_| self.pace.always())
    }
}

/// When to ask next, in nanoseconds; [`ALWAYS`] once an error was seen, because no later caller may miss
/// it.
#[derive(Debug, Default)]
struct Pace(AtomicU64);

const ALWAYS: u64 = u64::MAX;

impl Pace {
    fn is_due(&self, now: u64) -> bool {
        let next = self.0.load(Ordering::Relaxed);
        if next == ALWAYS {
            return true;
        }
        let is_due = now >= next;
        if is_due {
            // Another thread may have stored `ALWAYS` meanwhile, which must stay.
            let later = now + ASK_EVERY;
            let _ = self.0.compare_exchange(next, later, Ordering::Relaxed, Ordering::Relaxed);
        }
        is_due
    }

    fn always(&self) {
        self.0.store(ALWAYS, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transport_is_asked_every_few_milliseconds_and_always_once_it_has_failed() {
        let pace = Pace::default();
        let due = |now| pace.is_due(now);
        assert!(due(7) && !due(8) && !due(ASK_EVERY + 6) && due(ASK_EVERY + 7));
        assert!(!due(ASK_EVERY + 8));
        pace.always();
        assert!(due(ASK_EVERY + 9) && due(ASK_EVERY + 10));
    }
}
