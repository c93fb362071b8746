//! Faults of the link of one rank's RDMA device, in the test machine (docs/testing-rdma.md).

use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Fault, Kind, Phase};
use crate::pace::Pace;

/// All faults of links. They need a device per rank whose link can be cut.
pub fn on_links() -> Vec<Fault> {
    let of_rank_1 = Phase::EXCHANGE.map(|phase| fault(phase, 1, ""));
    // All ranks meet at rank 0. It takes one phase, as an emulated machine is slow.
    of_rank_1.into_iter().chain([fault(Phase::CombineReceive, 0, "/rank_0")]).collect()
}

fn fault(phase: Phase, victim: u32, suffix: &str) -> Fault {
    Fault {
        name: format!("l3/link_down/{}{suffix}", phase.name()),
        about:
            "the link of a rank's device is cut, and the ranks still meet: all end in time and say \
                whose link it is"
                .to_owned(),
        ranks: 3,
        victim,
        phase,
        kind: Kind::LinkDown,
        hosts: None,
        domains: 1,
        pace: Pace::USUAL,
    }
}

/// The link of rank i's device `rxe<i>` in the test machine, which is cut while this value lives.
#[derive(Debug)]
pub struct CutLink(u32);

impl CutLink {
    /// Cuts it.
    ///
    /// # Errors
    /// `ip` fails: the link does not exist, or the right to change it is missing.
    pub fn of(rank: u32) -> Result<Self> {
        set(rank, "down").map(|()| Self(rank))
    }
}

impl Drop for CutLink {
    fn drop(&mut self) {
        // If the link stays down, the next fault fails and reports the link.
        if let Err(error) = set(self.0, "up") {
            tracing::error!("{error:#}");
        }
    }
}

fn set(rank: u32, to: &str) -> Result<()> {
    let name = format!("veth{rank}");
    let status = Command::new("ip")
        .env_remove(tokenyard_core::bootstrap::SECRET_VARIABLE)
        .args(["link", "set", &name, to])
        .status();
    ensure!(status.context("run ip")?.success(), "ip cannot set the link {name} {to}");
    Ok(())
}
