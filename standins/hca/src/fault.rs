//! Planted faults, drawn from a seed. A plan is a TOML file:
//!
//! ```toml
//! seed = 7
//! [[faults]]
//! kind = "error"
//! request = 5
//! syndrome = 0x15
//! ```

use serde::Deserialize;

/// One fault. Requests are counted from 1, over all queue pairs of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// Each completion comes up to `most` later; completions of a queue stay in order.
    CompletionsLate {
        /// Nanoseconds.
        most: u64,
    },
    /// The last of up to `most` completions of a collapsed queue stands for all of them.
    CompletionsMerged {
        /// Completions.
        most: u32,
    },
    /// A collapsed queue shows no completion until its queue pair has no work under way.
    CompletionsAtEnd,
    /// A request fails; later requests are flushed.
    Error {
        /// The number of the request.
        request: u64,
        /// One of `tokenyard_sys_mlx5::cqe::syndrome`.
        syndrome: u8,
    },
    /// From a request on, nothing goes to peers: they do not answer.
    PeerSilent {
        /// The number of the request.
        request: u64,
    },
    /// Each doorbell is seen up to `most` later.
    DoorbellLate {
        /// Nanoseconds.
        most: u64,
    },
    /// One doorbell in every `every` is lost: the device finds its work by the record at the next doorbell.
    DoorbellLost {
        /// Doorbells.
        every: u64,
    },
    /// Requests of peers are served up to `most` later.
    PayloadLate {
        /// Nanoseconds.
        most: u64,
    },
    /// From a request on, the device does no work.
    DeviceStops {
        /// The number of the request.
        request: u64,
    },
    /// At a request, the port goes down: an event comes, and nothing goes out or in.
    PortDown {
        /// The number of the request.
        request: u64,
    },
}

/// The faults of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultPlan {
    /// The seed of all random draws.
    #[serde(default)]
    pub seed: u64,
    /// The faults, in any order.
    #[serde(default)]
    pub faults: Vec<Fault>,
}

impl FaultPlan {
    /// Reads a plan.
    ///
    /// # Errors
    /// The text is not a plan. The error names the line, the value that was found and the values that are expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    /// A plan with one fault.
    pub fn one(seed: u64, fault: Fault) -> Self {
        Self { seed, faults: vec![fault] }
    }
}

/// A plan under way.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) completions_late: u64,
    /// The most completions that are held; all of them where this is the largest number.
    pub(crate) merged: u32,
    pub(crate) doorbell_late: u64,
    pub(crate) payload_late: u64,
    pub(crate) silent: bool,
    pub(crate) stopped: bool,
    lost_every: u64,
    rings: u64,
    requests: u64,
    at_requests: Vec<Fault>,
}

/// The fate of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Nothing,
    Fails(u8),
    PortDown,
}

impl Faults {
    pub(crate) fn new(plan: &FaultPlan) -> Self {
        let mut this = Self::default();
        for fault in &plan.faults {
            match *fault {
                Fault::CompletionsLate { most } => this.completions_late = most,
                Fault::CompletionsMerged { most } => this.merged = most,
                Fault::CompletionsAtEnd => this.merged = u32::MAX,
                Fault::DoorbellLate { most } => this.doorbell_late = most,
                Fault::DoorbellLost { every } => this.lost_every = every,
                Fault::PayloadLate { most } => this.payload_late = most,
                other => this.at_requests.push(other),
            }
        }
        this
    }

    /// Counts a doorbell; returns whether it is lost.
    pub(crate) fn loses_ring(&mut self) -> bool {
        self.rings += 1;
        self.lost_every != 0 && self.rings.is_multiple_of(self.lost_every)
    }

    /// Counts a request that is sent; returns its fate.
    pub(crate) fn fate(&mut self) -> Fate {
        self.requests += 1;
        let now = self.requests;
        let mut fate = Fate::Nothing;
        for fault in &self.at_requests {
            match *fault {
                Fault::Error { request, syndrome } if request == now => {
                    fate = Fate::Fails(syndrome);
                }
                Fault::PortDown { request } if request == now => fate = Fate::PortDown,
                Fault::PeerSilent { request } if request == now => self.silent = true,
                Fault::DeviceStops { request } if request == now => self.stopped = true,
                _ => {}
            }
        }
        fate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read_from_a_file() {
        let text = "seed = 7\n[[faults]]\nkind = \"error\"\nrequest = 5\nsyndrome = 0x15\n\
                    [[faults]]\nkind = \"completions_at_end\"\n";
        let faults = vec![Fault::Error { request: 5, syndrome: 0x15 }, Fault::CompletionsAtEnd];
        assert_eq!(FaultPlan::parse(text).unwrap(), FaultPlan { seed: 7, faults });
    }

    #[test]
    fn a_plan_with_an_unknown_fault_names_those_there_are() {
        let error = FaultPlan::parse("[[faults]]\nkind = \"rain\"\n").unwrap_err();
        assert!(error.contains("rain") && error.contains("peer_silent"), "{error}");
    }
}
