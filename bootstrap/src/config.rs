//! The part of a config that the bootstrap reads.

use std::time::Duration;

/// The section `[world]`, except for its reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldConfig {
    /// How the ranks find each other: `env`, `tcp://host:port` or `file:///path`. Only the form
    /// is checked here; the bootstrap reads the rest.
    pub bootstrap: String,
    /// The network interface on which rank 0 listens and from which the others connect; without an
    /// entry, the host in `bootstrap` decides. Only the form is checked here.
    pub interface: Option<String>,
    /// From a peer's arrival or last heartbeat to the end of any wait on it (INV-6): 100 ms to
    /// 1 h, 30 s by default.
    pub deadline: Duration,
    /// Most time for a live peer to arrive at all: `deadline` to 7 days. By default 30 min, or
    /// `deadline` where that is longer.
    pub late: Duration,
    /// The reaction of the other ranks to the loss of a rank.
    pub on_failure: OnFailure,
}

/// The reaction of the other ranks to the loss of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// All waits end with an error that names the lost rank, and the communicator is closed.
    #[default]
    Stop,
    /// They continue without it: its missing rows are left out and flagged, and it may come back when
    /// the communicator is renewed. Only the loss of rank 0, where all ranks meet, ends the world.
    Mask,
}

impl OnFailure {
    /// The value in the config.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Mask => "mask",
        }
    }
}
