//! The NICs that are near to a rank, or named for it.

use tokenyard_core::error::words::first_names;
use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_machine::{Machine, Nic, Seat, Unusable};

use crate::config::NicChoice;

/// NICs of a rank.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) names: Vec<String>,
    /// The config names them for this rank.
    pub(super) given: bool,
}

/// Chooses the NICs of a rank that works at `seat`.
///
/// # Errors
/// [`ErrorKind::Config`] and [`ErrorKind::Unavailable`] with the name of the NIC that is absent, is
/// down, or is missing for this rank.
pub(super) fn choose(
    machine: &Machine,
    choice: Option<&NicChoice>,
    seat: Seat,
    local_rank: u32,
) -> Result<Chosen> {
    match choice {
        None => {
            warn_of_nearer(machine, seat);
            Ok(named(&machine.nearest_serving(seat), local_rank))
        }
        Some(NicChoice::Among(names)) => {
            let among =
                names.iter().map(|name| usable(machine, name)).collect::<Result<Vec<_>>>()?;
            Ok(named(&machine.nearest(&among, seat), local_rank))
        }
        Some(NicChoice::ByLocalRank(ranks)) => {
            let names = ranks.get(&local_rank).ok_or_else(|| {
                Error::new(
                    ErrorKind::Config,
                    "choose NICs",
                    format!(
                        "`nics` has no entry for local rank {local_rank}; found local ranks {}",
                        first_names(ranks.keys())
                    ),
                )
                .with_key("nics")
                .with_fix("name its NICs in [topology.auto.nics]")
            })?;
            for name in names {
                usable(machine, name)?;
            }
            let names = names.iter().take(abi::TY_PLACE_NICS).cloned().collect();
            Ok(Chosen { names, given: true })
        }
    }
}

/// As many of the near NICs as a place has room for.
fn named(near: &[&Nic], local_rank: u32) -> Chosen {
    let mut names: Vec<String> = near.iter().map(|nic| nic.name.clone()).collect();
    // Where there are more, each rank begins at a different NIC.
    if names.len() > abi::TY_PLACE_NICS {
        let start = local_rank as usize * abi::TY_PLACE_NICS % names.len();
        names.rotate_left(start);
        names.truncate(abi::TY_PLACE_NICS);
    }
    Chosen { names, given: false }
}

/// A named NIC that can be used.
fn usable<'a>(machine: &'a Machine, name: &str) -> Result<&'a Nic> {
    let Some(nic) = machine.nics.iter().find(|nic| nic.name == name) else {
        let known = first_names(machine.nics.iter().map(|nic| &nic.name));
        return Err(Error::new(
            ErrorKind::Unavailable,
            "choose NICs",
            format!("found no NIC `{name}`; available: {known}"),
        )
        .with_fix("correct `nics` in [topology.auto]"));
    };
    match machine.unusable(nic) {
        None => Ok(nic),
        Some(why) => Err(Error::new(
            ErrorKind::Unavailable,
            "choose NICs",
            format!("NIC `{name}` cannot be used: {}", in_words(why)),
        )
        .with_fix(match why {
            Unusable::PortDown => "bring its link up, or name another in `nics` of [topology.auto]",
            Unusable::NoAddress => {
                "give its network interface an address, or name another in `nics` of [topology.auto]"
            }
            Unusable::NoDevice => "pass its /dev/infiniband/uverbs* into the container",
        })),
    }
}

fn in_words(why: Unusable) -> &'static str {
    match why {
        Unusable::PortDown => "no port is active",
        Unusable::NoAddress => "its ports are active, and no entry in their GID tables",
        Unusable::NoDevice => "its device node is absent",
    }
}

/// Logs the NICs that would be nearer than the chosen ones, or as near, if they could be used.
fn warn_of_nearer(machine: &Machine, seat: Seat) {
    for (nic, why) in passed_over(machine, seat) {
        tracing::warn!("NIC {nic} is nearest to this rank; {}", in_words(why));
    }
}

/// Rail NICs that are nearer than the chosen ones, and cannot be used. A NIC that is only as near counts
/// where some GPUs have fewer usable NICs than others: nodes whose cards have a spare port are cabled so.
pub(super) fn passed_over(machine: &Machine, seat: Seat) -> Vec<(&str, Unusable)> {
    let distance = |nic: &Nic| machine.nic_distance(seat, nic);
    let Some(chosen) = machine.serving_nics().iter().map(|nic| distance(nic)).min() else {
        return Vec::new();
    };
    let is_uneven = seat.gpu.is_some() && !machine.has_even_links();
    let counts = |nic: &Nic| {
        let is_as_near = distance(nic) == chosen && is_uneven && machine.has_device(nic);
        distance(nic) < chosen || is_as_near
    };
    let rails = machine.rail_nics().into_iter().filter(|nic| counts(nic));
    rails.filter_map(|nic| Some((nic.name.as_str(), machine.unusable(nic)?))).collect()
}
