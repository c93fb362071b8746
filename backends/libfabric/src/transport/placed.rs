//! The NICs that the topology chose, among those that the provider lists.

use tokenyard_core::error::first_names;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::config::MAX_RAILS;

/// Providers whose domains are named as the NICs of `/sys/class/infiniband` are. Others (`psm3`, `ucx`, `cxi`
/// and what is yet to come) may have names of their own: a NIC that they do not list may be there.
const NAMED_AS_NICS: [&str; 2] = ["verbs", "efa"];

/// Indices of the domains of `nics`, in their order. A domain is named as its NIC is, with or without
/// an ending: `mlx5_0`, `rdmap85s0-rdm`.
pub(super) fn of_nics(domains: &[String], nics: &[String]) -> Vec<usize> {
    nics.iter().filter_map(|nic| of_nic(domains, nic)).take(MAX_RAILS).collect()
}

fn of_nic(domains: &[String], nic: &str) -> Option<usize> {
    let is_of = |domain: &String| {
        domain.strip_prefix(nic).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    domains.iter().position(is_of)
}

/// A warning where NICs of all names reach each other or the provider has names of its own, else an error: the
/// rank would go on over the NICs of others, or over fewer than they have.
pub(super) fn refuse_unlisted(provider: &str, any_rails: bool, message: String) -> Result<()> {
    if any_rails || !NAMED_AS_NICS.contains(&provider) {
        tracing::warn!("{message}");
        return Ok(());
    }
    Err(Error::new(ErrorKind::Unavailable, "choose rails", message)
        .with_context("provider", provider)
        .with_fix(
            "give the process its device and a link (`fi_info -p PROVIDER`); or name `rails`; or set rails = \
             \"any\" in [topology.auto], where NICs of all names reach each other",
        ))
}

/// Says which NICs of the topology the provider does not list: their rails are missing.
pub(super) fn unlisted(domains: &[String], nics: &[String]) -> Option<String> {
    let missing: Vec<_> =
        nics.iter().map(String::as_str).filter(|nic| of_nic(domains, nic).is_none()).collect();
    (!missing.is_empty()).then(|| {
        format!(
            "rails = \"auto\": the topology chose {} for this rank, which the provider does not list; it \
             lists {}",
            first_names(&missing),
            first_names(domains)
        )
    })
}

#[cfg(test)]
mod tests {
    use tokenyard_core::abi::TY_ERROR_MESSAGE;

    use super::*;

    #[test]
    fn domains_of_chosen_nics_are_found_by_name_in_the_order_of_the_choice() {
        let domains = ["rdmap8s0-rdm", "rdmap85s0-rdm", "mlx5_1", "mlx5_10"].map(str::to_owned);
        let of = |nics: &[&str]| {
            of_nics(&domains, &nics.iter().map(|nic| (*nic).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(of(&["rdmap85s0", "rdmap8s0"]), [1, 0]);
        assert_eq!(of(&["mlx5_10", "mlx5_2"]), [3]);
        assert!(of(&[]).is_empty());
    }

    #[test]
    fn a_nic_of_the_topology_that_the_provider_does_not_list_is_named() {
        let domains = ["rdmap8s0-rdm", "mlx5_1"].map(str::to_owned);
        let of = |nics: &[&str]| {
            unlisted(&domains, &nics.iter().map(|nic| (*nic).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!([of(&[]), of(&["mlx5_1", "rdmap8s0"])], [None, None]);
        let text = of(&["mlx5_1", "mlx5_2", "mlx5_10"]).unwrap();
        assert!(
            text.contains("chose mlx5_2, mlx5_10 for") && text.contains("rdmap8s0-rdm"),
            "{text}"
        );
    }

    #[test]
    fn an_error_about_many_domains_leaves_room_for_the_way_out() {
        let domains: Vec<String> = (0..32).map(|i| format!("rocep249s{i}f1")).collect();
        let nics: Vec<String> = (0..2).map(|i| format!("rocep250s{i}f1")).collect();
        let message = unlisted(&domains, &nics).unwrap();
        let text = refuse_unlisted("verbs", false, message).unwrap_err().to_string();
        assert!(text.len() < TY_ERROR_MESSAGE && text.ends_with("reach each other"), "{text}");
    }

    #[test]
    fn a_nic_that_is_not_listed_is_refused_where_domains_are_named_as_nics_and_rails_matter() {
        let message = || "the topology chose mlx5_3 for this rank".to_owned();
        let error = refuse_unlisted("verbs", false, message()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(text.contains("chose mlx5_3") && text.contains("rails = \"any\""), "{text}");
        refuse_unlisted("verbs", true, message()).unwrap();
        // What it calls mlx5_3 is not known.
        refuse_unlisted("psm3", false, message()).unwrap();
    }
}
