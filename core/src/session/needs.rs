//! The needs of a session: the sum of what its users ask for. A user is what runs operations: a kernel set.

use std::ops::Range;

use crate::abi;
use crate::kernels::{KernelNeeds, Limits, LinkNeeds, NO_LINK_NEEDS};
use crate::{Error, ErrorKind, Result};

/// One window of a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowNeed {
    pub(crate) bytes: u64,
    /// Bits `1 << TY_LEVEL_*`, or 0 for every level that has a transport.
    pub(crate) levels: u32,
    /// The user that asked for it, and its number there.
    pub(crate) user: usize,
    pub(crate) id: u32,
}

impl WindowNeed {
    pub(crate) fn is_for(&self, level: u64) -> bool {
        self.levels == 0 || self.levels >> level & 1 != 0
    }
}

/// The first numbers of a user on one level. A user counts its windows, queues and signals from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Base {
    pub(crate) window: u32,
    pub(crate) queue: u32,
    pub(crate) signal: u32,
}

/// The part of a session's resources that one user has.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    /// Its windows among those of the session.
    pub(crate) windows: Range<usize>,
    /// By level.
    pub(crate) bases: [Base; 2],
}

/// The resources of a session.
#[derive(Debug)]
pub(crate) struct SessionNeeds {
    pub(crate) windows: Vec<WindowNeed>,
    /// By level.
    pub(crate) links: [LinkNeeds; 2],
    /// Ordinal of the device, or -1.
    pub(crate) device: i32,
    /// By user.
    pub(crate) shares: Vec<Share>,
}

impl SessionNeeds {
    /// Adds up what the users ask for.
    ///
    /// # Errors
    /// A sum that is beyond the limits of a transport; each user alone is within them.
    pub(crate) fn sum(users: &[KernelNeeds], limits: &Limits) -> Result<Self> {
        let mut sum = Self {
            windows: Vec::new(),
            links: [NO_LINK_NEEDS; 2],
            device: users.first().map_or(-1, |first| first.device),
            shares: Vec::new(),
        };
        for (user, needs) in users.iter().enumerate() {
            sum.add(user, needs);
        }
        let levels = [abi::TY_LEVEL_SCALE_UP, abi::TY_LEVEL_SCALE_OUT];
        for (level, limits) in levels.into_iter().zip([&limits.scale_up, &limits.scale_out]) {
            let link = &sum.links[level as usize];
            let windows = if link.queues == 0 { 0 } else { sum.windows_of(level).count() as u32 };
            for (what, wanted, limit) in [
                ("windows", windows, limits.max_windows),
                ("queues", link.queues, limits.max_queues),
                ("signals", link.signals, limits.max_signals),
            ] {
                if wanted > limit {
                    return Err(beyond(users.len(), level, what, [wanted, limit]));
                }
            }
        }
        Ok(sum)
    }

    fn add(&mut self, user: usize, needs: &KernelNeeds) {
        let base = |level: u64| Base {
            window: self.windows_of(level).count() as u32,
            queue: self.links[level as usize].queues,
            signal: self.links[level as usize].signals,
        };
        let bases = [abi::TY_LEVEL_SCALE_UP, abi::TY_LEVEL_SCALE_OUT].map(base);
        let first = self.windows.len();
        let windows = needs.window_bytes.iter().zip(&needs.window_levels);
        for (id, (bytes, levels)) in (0..needs.windows).zip(windows) {
            self.windows.push(WindowNeed { bytes: *bytes, levels: *levels, user, id });
        }
        for (sum, link) in self.links.iter_mut().zip([&needs.scale_up, &needs.scale_out]) {
            // Each user is within limits of 32 bits; a sum that is not is beyond every limit.
            sum.queues = sum.queues.saturating_add(link.queues);
            sum.signals = sum.signals.saturating_add(link.signals);
            sum.queue_depth = sum.queue_depth.max(link.queue_depth);
            sum.largest_put = sum.largest_put.max(link.largest_put);
        }
        self.shares.push(Share { windows: first..self.windows.len(), bases });
    }

    /// Indices of the windows of a level, in the order in which its transport numbers them.
    pub(crate) fn windows_of(&self, level: u64) -> impl Iterator<Item = usize> {
        let windows = self.windows.iter().enumerate();
        windows.filter(move |(_, window)| window.is_for(level)).map(|(index, _)| index)
    }
}

#[cold]
fn beyond(users: usize, level: u64, what: &str, [wanted, limit]: [u32; 2]) -> Error {
    let level = if level == abi::TY_LEVEL_SCALE_UP { "scale-up" } else { "scale-out" };
    let text = format!(
        "{users} users of one session need {wanted} {what}; the {level} transport has {limit}"
    );
    Error::new(ErrorKind::Unsupported, "plan needs", text)
        .with_fix("open fewer users on the session, or open some of them alone")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::NO_KERNEL_NEEDS;
    use crate::transport::NO_CAPABILITIES;

    fn needs(windows: u32, queues: u32, signals: u32) -> KernelNeeds {
        let link = LinkNeeds { queues, signals, queue_depth: 8, ..NO_LINK_NEEDS };
        let mut window_levels = [0; abi::TY_MAX_WINDOWS];
        window_levels[0] = 1 << abi::TY_LEVEL_SCALE_UP;
        KernelNeeds {
            windows,
            scale_up: link,
            scale_out: LinkNeeds { signals: 2 * signals, ..link },
            window_bytes: [64; abi::TY_MAX_WINDOWS],
            window_levels,
            ..NO_KERNEL_NEEDS
        }
    }

    fn limits(max_windows: u32, max_queues: u32, max_signals: u32) -> Limits {
        let of = crate::transport::Capabilities {
            max_windows,
            max_queues,
            max_signals,
            ..NO_CAPABILITIES
        };
        Limits { size: size_of::<Limits>(), scale_up: of, scale_out: of }
    }

    #[test]
    fn users_have_windows_queues_and_signals_of_their_own_on_each_level() {
        let users = [needs(2, 1, 10), needs(3, 2, 20), needs(1, 1, 1)];
        let sum = SessionNeeds::sum(&users, &limits(64, 64, 64)).unwrap();
        assert_eq!(sum.links.map(|link| (link.queues, link.signals)), [(4, 31), (4, 62)]);
        let bases: Vec<_> = sum.shares.iter().map(|share| share.bases).collect();
        // The first window of each user is for scale-up alone.
        let base = |window, queue, signal| Base { window, queue, signal };
        assert_eq!(bases[0], [base(0, 0, 0), base(0, 0, 0)]);
        assert_eq!(bases[1], [base(2, 1, 10), base(1, 1, 20)]);
        assert_eq!(bases[2], [base(5, 3, 30), base(3, 3, 60)]);
        let windows: Vec<_> = sum.shares.iter().map(|share| share.windows.clone()).collect();
        assert_eq!(windows, [0..2, 2..5, 5..6]);
    }

    #[test]
    fn a_transport_numbers_the_windows_of_its_level_and_those_of_both() {
        let of = |needs: &KernelNeeds, level| {
            let sum = SessionNeeds::sum(&[*needs], &limits(8, 1, 2)).unwrap();
            sum.windows_of(level).collect::<Vec<_>>()
        };
        let mut needs = KernelNeeds { window_levels: [0; abi::TY_MAX_WINDOWS], ..needs(5, 1, 1) };
        assert_eq!(of(&needs, abi::TY_LEVEL_SCALE_OUT), [0, 1, 2, 3, 4]);
        needs.window_levels[..5].copy_from_slice(&[1, 1, 2, 2, 3]);
        assert_eq!(of(&needs, abi::TY_LEVEL_SCALE_UP), [0, 1, 4]);
        assert_eq!(of(&needs, abi::TY_LEVEL_SCALE_OUT), [2, 3, 4]);
    }

    #[test]
    fn a_sum_beyond_a_limit_is_refused_and_names_both_numbers() {
        let users = [needs(2, 1, 10), needs(2, 1, 10)];
        for (limits, text) in [
            (limits(3, 2, 40), "need 4 windows; the scale-up transport has 3"),
            (limits(4, 1, 40), "need 2 queues; the scale-up transport has 1"),
            (limits(4, 2, 39), "need 40 signals; the scale-out transport has 39"),
        ] {
            let error = SessionNeeds::sum(&users, &limits).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        assert!(SessionNeeds::sum(&users, &limits(4, 2, 40)).is_ok());
    }
}
