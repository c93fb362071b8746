use std::sync::Mutex;

/// Claims on arena regions, counted, and on handle slots.
///
/// Outputs and handles may be dropped on any thread, while the kernel set belongs to one. So drops are
/// recorded here, and the communicator returns the regions at its next call. Nothing is allocated in
/// steady state: all lists have their room from the start.
#[derive(Debug)]
pub(super) struct Claims {
    state: Mutex<ClaimState>,
}

#[derive(Debug)]
struct ClaimState {
    regions: Vec<(u64, u32)>,
    returned: Vec<u64>,
    free_handles: Vec<u32>,
    /// By handle slot.
    handles: Vec<u32>,
}

impl Claims {
    pub(super) fn new(handles: u32) -> Self {
        let room = 8 * handles as usize + 64;
        Self {
            state: Mutex::new(ClaimState {
                regions: Vec::with_capacity(room),
                returned: Vec::with_capacity(room),
                free_handles: (0..handles).rev().collect(),
                handles: vec![0; handles as usize],
            }),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, ClaimState> {
        // A panic cannot leave the lists half changed: every change below is one push or one pop.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// One more claim on a region.
    pub(super) fn claim(&self, region: u64) {
        let mut state = self.state();
        match state.regions.iter_mut().find(|(id, _)| *id == region) {
            Some((_, claims)) => *claims += 1,
            None => state.regions.push((region, 1)),
        }
    }

    /// One claim less; the last one returns the region.
    pub(super) fn unclaim(&self, region: u64) {
        let mut state = self.state();
        let Some(index) = state.regions.iter().position(|(id, _)| *id == region) else { return };
        state.regions[index].1 -= 1;
        if state.regions[index].1 == 0 {
            state.regions.swap_remove(index);
            state.returned.push(region);
        }
    }

    /// A region without claims, to be returned.
    pub(super) fn next_returned(&self) -> Option<u64> {
        self.state().returned.pop()
    }

    /// A free handle slot; `Err` holds the total number of slots.
    pub(super) fn take_handle(&self) -> Result<u32, u32> {
        let mut state = self.state();
        let slot = state.free_handles.pop().ok_or(state.handles.len() as u32)?;
        state.handles[slot as usize] = 1;
        Ok(slot)
    }

    /// One more claim on a slot that was taken.
    pub(super) fn claim_handle(&self, slot: u32) {
        self.state().handles[slot as usize] += 1;
    }

    /// One claim less; the last one frees the slot.
    pub(super) fn give_handle(&self, slot: u32) {
        let mut state = self.state();
        let claims = &mut state.handles[slot as usize];
        *claims -= 1;
        if *claims == 0 {
            state.free_handles.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_comes_back_after_its_last_claim_only() {
        let claims = Claims::new(2);
        claims.claim(7);
        claims.claim(7);
        claims.unclaim(7);
        assert_eq!(claims.next_returned(), None);
        claims.unclaim(7);
        assert_eq!(claims.next_returned(), Some(7));
        claims.unclaim(7);
        assert_eq!(claims.next_returned(), None);
    }

    #[test]
    fn handle_slots_run_out_and_come_back() {
        let claims = Claims::new(2);
        let first = claims.take_handle().expect("two are free");
        claims.take_handle().expect("one is free");
        assert_eq!(claims.take_handle(), Err(2));
        claims.claim_handle(first);
        claims.give_handle(first);
        assert_eq!(claims.take_handle(), Err(2), "one claim is left");
        claims.give_handle(first);
        assert_eq!(claims.take_handle(), Ok(first));
    }
}
