//! Compares the properties of NCCL with the config. Nothing here calls NCCL.

use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_nccl::{CommProperties, consts};

use crate::config::{GinConfig, GinType};

/// The smallest queue that NCCL's proxy makes for a peer: 32 for each receive of its plugin. No call reports the number
/// of receives.
const PROXY_DEPTH: u32 = 32;
/// Where kernels post, the queue has the depth that is asked for.
const KERNEL_DEPTH: u32 = 256;

/// Chooses the type by which kernels post, among the types that NCCL has.
///
/// # Errors
/// `Unavailable`, with the types that NCCL found, and the fix.
pub(crate) fn choose(properties: &CommProperties, wanted: GinType) -> Result<GinType> {
    let missing = |message: String, fix: &str| {
        Err(Error::new(ErrorKind::Unavailable, "commit", message).with_fix(fix))
    };
    let has = |kind: &GinType| properties.gin_support.get(kind.code() as usize) == Some(&true);
    let all: Vec<_> =
        GinType::ALL.iter().filter(|kind| has(kind)).map(|kind| kind.name()).collect();
    let all = if all.is_empty() { "none".to_owned() } else { all.join(", ") };
    if !properties.device_api_support || properties.gin_type == consts::GIN_TYPE_NONE {
        return missing(
            format!(
                "found NCCL without GIN among these ranks (types: {all}, device API: {}); expected one type on all",
                properties.device_api_support
            ),
            "see why with NCCL_DEBUG=INFO: it takes an RDMA NIC with a GIN plugin, or GDRCopy for NCCL 2.32's GIN over \
             sockets, and NCCL_CROSS_NIC other than 0",
        );
    }
    let found = match wanted {
        GinType::Auto => {
            let kind = GinType::ALL.into_iter().find(|kind| kind.code() == properties.gin_type);
            match kind {
                Some(kind) => kind,
                None => {
                    return missing(
                        format!("found GIN type {}; expected 2 to 5", properties.gin_type),
                        "use NCCL 2.31 or 2.32, or name `type`",
                    );
                }
            }
        }
        wanted => wanted,
    };
    if !has(&found) && found.code() != properties.gin_type {
        return missing(
            format!("found GIN types {all}; expected type = \"{}\"", found.name()),
            "name another `type`, or none",
        );
    }
    if !wanted.has(found) {
        return missing(
            format!(
                "found GIN type {}, which kernels are not compiled for by default; expected another",
                found.name()
            ),
            "set type = \"efa_gda\" with an `nccl_include` that has its headers (NCCL's packages lack them), or \
             type = \"proxy\"",
        );
    }
    Ok(found)
}

/// The depth of the queue to a peer.
pub(crate) fn depth(config: &GinConfig, found: GinType) -> u32 {
    let default = if found == GinType::Proxy { PROXY_DEPTH } else { KERNEL_DEPTH };
    config.queue_depth.unwrap_or(default)
}

/// The most puts to a peer that may be under way: a put and its signal may be two commands.
pub(crate) fn credits(depth: u32) -> u32 {
    depth / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(kinds: &[GinType], best: u32) -> CommProperties {
        let mut properties = CommProperties {
            device_api_support: true,
            gin_type: best,
            ..CommProperties::default()
        };
        kinds.iter().for_each(|kind| properties.gin_support[kind.code() as usize] = true);
        properties
    }

    #[test]
    fn what_nccl_prefers_is_taken_unless_the_config_names_another_that_is_there() {
        let both = found(&[GinType::Proxy, GinType::Gdaki], consts::GIN_TYPE_GDAKI);
        assert_eq!(choose(&both, GinType::Auto).unwrap(), GinType::Gdaki);
        assert_eq!(choose(&both, GinType::Proxy).unwrap(), GinType::Proxy);
        let text = choose(&both, GinType::Gpi).unwrap_err().to_string();
        assert!(text.contains("found GIN types proxy, gdaki; expected type = \"gpi\""), "{text}");
    }

    #[test]
    fn nccl_without_gin_is_refused_with_the_fix() {
        for properties in [
            CommProperties { device_api_support: true, ..CommProperties::default() },
            CommProperties { gin_type: consts::GIN_TYPE_PROXY, ..CommProperties::default() },
        ] {
            let error = choose(&properties, GinType::Auto).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            assert!(error.to_string().contains("types: none"), "{error}");
            assert!(error.fix().is_some_and(|fix| fix.contains("NCCL_DEBUG=INFO")));
        }
    }

    #[test]
    fn kernels_that_lack_efa_gda_are_not_started_over_it() {
        let properties = found(&[GinType::EfaGda], consts::GIN_TYPE_EFA_GDA);
        let error = choose(&properties, GinType::Auto).unwrap_err();
        assert!(error.fix().is_some_and(|fix| fix.contains("nccl_include")), "{error}");
        assert_eq!(choose(&properties, GinType::EfaGda).unwrap(), GinType::EfaGda);
        assert!(choose(&found(&[], 9), GinType::Auto).unwrap_err().to_string().contains("type 9"));
    }

    #[test]
    fn a_queue_is_as_deep_as_the_config_says_and_half_of_it_is_credits() {
        let config = |queue_depth| GinConfig { queue_depth, ..GinConfig::default() };
        assert_eq!(depth(&config(None), GinType::Proxy), 32);
        assert_eq!(depth(&config(None), GinType::Gdaki), 256);
        assert_eq!(depth(&config(Some(4)), GinType::Gdaki), 4);
        assert_eq!([2, 4, 33].map(credits), [1, 2, 16]);
    }
}
