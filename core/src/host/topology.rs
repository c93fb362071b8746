use super::registry::TopologyRef;
use super::transport::missing_slot;
use super::{attended, blank_error, check, config_as_ty, services};
use crate::Result;
use crate::abi;
use crate::config::ComponentTable;
use crate::topology::{Discover, Place};

/// Gets this rank's place from a topology.
///
/// # Errors
/// Errors of the component.
pub fn discover(component: &TopologyRef, config: &ComponentTable, ask: &Discover) -> Result<Place> {
    let discover =
        component.table.discover.ok_or_else(|| missing_slot(component.name(), "discover"))?;
    let request = abi::TyDiscover {
        size: size_of::<abi::TyDiscover>(),
        config: config_as_ty(config),
        rank: ask.rank,
        ranks: ask.ranks,
        local_rank: ask.local_rank,
        reserved: 0,
    };
    let mut place = abi::TyPlace {
        size: size_of::<abi::TyPlace>(),
        host: [0; abi::TY_HOST_BYTES],
        device: -1,
        numa_node: -1,
        processors: 0,
        flags: 0,
        nic_count: 0,
        reserved: 0,
        nics: [[0; abi::TY_NIC_BYTES]; abi::TY_PLACE_NICS],
        missing_nic: [0; abi::TY_MISSING_NIC_BYTES],
    };
    let mut error = blank_error();
    // SAFETY: a judged table; every structure belongs to this side and is valid for the call.
    let status = attended("topology", component.name(), "discover", || unsafe {
        discover(services(), &request, &mut place, &mut error)
    });
    check("discover", status, &error)
        .map_err(|e| config.locate(e).with_context("component", component.name()))?;
    let nics = place.nics.iter().take(place.nic_count as usize);
    Ok(Place {
        host: text(&place.host),
        device: u32::try_from(place.device).ok(),
        numa_node: u32::try_from(place.numa_node).ok(),
        processors: place.processors,
        nics: nics.map(|name| text(name)).filter(|name| !name.is_empty()).collect(),
        nics_given: place.flags & abi::TY_PLACE_NICS_GIVEN != 0,
        any_rails: place.flags & abi::TY_PLACE_ANY_RAILS != 0,
        missing_nic: Some(text(&place.missing_nic)).filter(|words| !words.is_empty()),
    })
}

/// Text that ends with a zero byte or with its array.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
