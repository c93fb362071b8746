//! The open transports of a session, their windows, and the threads for the rings of kernels.

use std::sync::Arc;

use super::needs::SessionNeeds;
use crate::abi;
use crate::gpu_ring::{Counts, GpuRing, RingToServe};
use crate::host::OpenTransport;
use crate::link::Link;
use crate::transport::{MemoryNeeds, Window};
use crate::{Error, ErrorKind, Result};

/// The memory of a user's windows.
pub(crate) trait WindowMemory {
    /// Allocates window `id` of this user. It lives as long as the user.
    ///
    /// # Errors
    /// Errors of the component.
    fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window>;
}

/// The open transports of a session.
#[derive(Debug)]
pub(crate) struct Transports {
    pub(crate) scale_up: Option<OpenTransport>,
    pub(crate) scale_out: Option<OpenTransport>,
    /// The counters of threads that serve rings, the transports' own threads too: dropped after the
    /// transports.
    pub(crate) counts: Vec<Arc<Counts>>,
}

impl Transports {
    /// The transports of a window's levels, with the window's number in each.
    fn of_window(
        &mut self,
        needs: &SessionNeeds,
        index: usize,
    ) -> impl Iterator<Item = (u32, &mut OpenTransport)> {
        let number = |level| needs.windows_of(level).position(|window| window == index);
        let numbers = [abi::TY_LEVEL_SCALE_UP, abi::TY_LEVEL_SCALE_OUT].map(number);
        let transports = [self.scale_up.as_mut(), self.scale_out.as_mut()];
        let all = numbers.into_iter().zip(transports);
        all.filter_map(|(number, transport)| Some((number? as u32, transport?)))
    }

    /// The hot calls: scale-up, scale-out.
    ///
    /// # Safety
    /// The links, and every copy of them, are not used after `self` is dropped.
    pub(crate) unsafe fn links(&self) -> [Option<Link>; 2] {
        // SAFETY: by this function's contract.
        [&self.scale_up, &self.scale_out].map(|t| t.as_ref().map(|t| unsafe { t.link() }))
    }

    /// The transport of a level, one of `TY_LEVEL_*`.
    pub(crate) fn of_level(&mut self, level: u64) -> Option<&mut OpenTransport> {
        match level {
            abi::TY_LEVEL_SCALE_UP => self.scale_up.as_mut(),
            _ => self.scale_out.as_mut(),
        }
    }

    /// Finds a thread for the ring of kernels on a level: the transport's own, or one of core, which is
    /// returned with the transport's name.
    ///
    /// # Safety
    /// The contract of [`OpenTransport::serve_ring`], except for the counts, which `self` holds; the thread
    /// ends before `self`.
    pub(crate) unsafe fn serve_ring(
        &mut self,
        serve: &abi::TyServeRing,
        counts: Arc<Counts>,
    ) -> Result<Option<(&'static str, GpuRing)>> {
        self.counts.push(counts);
        // SAFETY: the ring lives, by this function's contract.
        let level = unsafe { (*serve.ring).level };
        let Some(transport) = self.of_level(level) else { return Ok(None) };
        // SAFETY: by this function's contract.
        unsafe {
            if transport.serve_ring(serve)? {
                return Ok(None);
            }
            let link = transport.link();
            Ok(Some((link.name(), GpuRing::start(RingToServe::new(serve), link)?)))
        }
    }

    /// Allocates every window, in memory that the transports of its levels can register. `users`: those that
    /// `needs` counts.
    pub(crate) fn allocate_windows(
        &mut self,
        users: &mut [&mut dyn WindowMemory],
        needs: &SessionNeeds,
    ) -> Result<Vec<Window>> {
        let mut windows = Vec::new();
        for (index, wanted) in needs.windows.iter().enumerate() {
            let (id, bytes) = (wanted.id, wanted.bytes);
            let memory = self.memory_needs(needs, index)?;
            let owners = self.of_window(needs, index).filter(|(_, t)| owns_memory(t)).count();
            if owners > 1 {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "allocate windows",
                    "the transports of both levels must own window memory; expected at most one",
                )
                .with_fix("choose another transport for one of the levels"));
            }
            let window = match self.of_window(needs, index).find(|(_, t)| owns_memory(t)) {
                Some((number, owner)) => Window { id, ..owner.alloc(number, bytes)? },
                None => users[wanted.user].allocate(id, bytes, &memory)?,
            };
            windows.push(window);
        }
        Ok(windows)
    }

    /// Registers every window with the transports of its levels.
    pub(crate) fn register_windows(
        &mut self,
        windows: &[Window],
        needs: &SessionNeeds,
    ) -> Result<()> {
        for (index, window) in windows.iter().enumerate() {
            for (number, transport) in self.of_window(needs, index) {
                // SAFETY: window memory belongs to a user or to a transport. `Session` drops the transports
                // first and the users after them. So does `bring_up` on an error, because locals are dropped in
                // reverse order of declaration.
                unsafe { transport.register(&Window { id: number, ..*window })? };
            }
        }
        Ok(())
    }

    /// The merged needs of a window's levels: kinds are intersected, handles united, the larger
    /// alignment wins.
    fn memory_needs(&mut self, needs: &SessionNeeds, index: usize) -> Result<MemoryNeeds> {
        let mut merged: Option<MemoryNeeds> = None;
        for (_, transport) in self.of_window(needs, index) {
            let needs = transport.memory_needs()?;
            merged = Some(match merged {
                None => needs,
                Some(other) => MemoryNeeds {
                    kinds: other.kinds & needs.kinds,
                    handles: other.handles | needs.handles,
                    alignment: other.alignment.max(needs.alignment),
                    ..needs
                },
            });
        }
        let needs = merged.ok_or_else(|| {
            let text = format!("window {index} is for levels that have no transport");
            Error::new(ErrorKind::Plugin, "merge memory needs", text)
        })?;
        if needs.kinds == 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "merge memory needs",
                "the transports of the two levels can register no common kind of memory",
            )
            .with_fix("choose another transport for one of the levels"));
        }
        Ok(needs)
    }
}

impl Drop for Transports {
    /// The owner of the windows is dropped last: the other transport still has them registered.
    fn drop(&mut self) {
        if self.scale_up.as_ref().is_some_and(owns_memory) {
            self.scale_out = None;
        }
    }
}

fn owns_memory(transport: &OpenTransport) -> bool {
    transport.capabilities().flags & abi::TY_CAP_OWNS_MEMORY != 0
}
