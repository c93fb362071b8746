use std::marker::PhantomData;

use super::call::{check_size, fill, guarded};
use super::transport::read_table;
use super::{host, static_str};
use crate::abi;
use crate::topology::{Discover, Topology};
use crate::{Error, ErrorKind, Result};

/// The C table of a [`Topology`].
#[derive(Debug)]
pub struct TopologyComponent<T>(PhantomData<T>);

impl<T: Topology> TopologyComponent<T> {
    /// The table; every slot is filled.
    pub const TABLE: &'static abi::TyTopologyTable = &abi::TyTopologyTable {
        size: size_of::<abi::TyTopologyTable>(),
        name: static_str(T::NAME),
        version: static_str(env!("CARGO_PKG_VERSION")),
        about: static_str(T::ABOUT),
        discover: Some(Self::discover),
    };

    unsafe extern "C" fn discover(
        host: *const abi::TyHost,
        discover: *const abi::TyDiscover,
        place: *mut abi::TyPlace,
        error: *mut abi::TyError,
    ) -> i32 {
        guarded("discover", error, || {
            // SAFETY: the host's structures are valid for the call.
            let (ask, out) = unsafe {
                host::meet(host);
                (&*discover, &mut *place)
            };
            check_size("discover", ask.size, size_of::<abi::TyDiscover>())?;
            check_size("discover", out.size, size_of::<abi::TyPlace>())?;
            // SAFETY: the strings of the config are valid for the call.
            let config = unsafe { read_table(&ask.config)?.parse::<T::Config>(T::NAME)? };
            let about = Discover { rank: ask.rank, ranks: ask.ranks, local_rank: ask.local_rank };
            let found = T::discover(&config, &about)?;
            if found.host.len() >= abi::TY_HOST_BYTES {
                return Err(Error::new(
                    ErrorKind::Internal,
                    "discover",
                    format!(
                        "the host identity has {} bytes; expected at most {}",
                        found.host.len(),
                        abi::TY_HOST_BYTES - 1
                    ),
                ));
            }
            out.host = [0; abi::TY_HOST_BYTES];
            out.host[..found.host.len()].copy_from_slice(found.host.as_bytes());
            out.device = found.device.map_or(-1, |d| d as i32);
            out.numa_node = found.numa_node.map_or(-1, |n| n as i32);
            out.processors = found.processors;
            let flag = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
            out.flags = flag(found.nics_given, abi::TY_PLACE_NICS_GIVEN)
                | flag(found.any_rails, abi::TY_PLACE_ANY_RAILS);
            out.nic_count = found.nics.len() as u32;
            out.nics = nics(&found.nics)?;
            fill(&mut out.missing_nic, found.missing_nic.as_deref().unwrap_or_default());
            Ok(())
        })
    }
}

fn nics(names: &[String]) -> Result<[[u8; abi::TY_NIC_BYTES]; abi::TY_PLACE_NICS]> {
    let mut out = [[0; abi::TY_NIC_BYTES]; abi::TY_PLACE_NICS];
    let fits = |name: &String| !name.is_empty() && name.len() < abi::TY_NIC_BYTES;
    if names.len() > out.len() || !names.iter().all(fits) {
        return Err(Error::new(
            ErrorKind::Internal,
            "discover",
            format!(
                "found the NICs {names:?}; expected at most {} names of 1 to {} bytes",
                abi::TY_PLACE_NICS,
                abi::TY_NIC_BYTES - 1
            ),
        ));
    }
    for (slot, name) in out.iter_mut().zip(names) {
        slot[..name.len()].copy_from_slice(name.as_bytes());
    }
    Ok(out)
}
