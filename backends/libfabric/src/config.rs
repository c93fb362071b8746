//! The config tables of this backend's components.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};

/// Most rails of a rank.
pub(crate) const MAX_RAILS: usize = 16;
/// Range of `queue_depth`.
const QUEUE_DEPTHS: RangeInclusive<u32> = 1..=4096;
/// Range of `proxy_threads`.
const PROXY_THREADS: RangeInclusive<u32> = 0..=MAX_RAILS as u32;

/// The table `[transport.scale_out.libfabric]` (or `scale_up`).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LibfabricConfig {
    /// Provider, by its name in `fi_info -l`: `tcp`, `shm`, `udp`, `verbs`, `net`, ... Equal on all
    /// ranks. Default: `tcp`.
    pub provider: String,
    /// The NICs to use; the same number on all ranks. Default: `auto`.
    pub rails: Rails,
    /// Threads that post and poll for the caller, 0 to 16; at most one per rail is started. With 0
    /// the caller's thread does it. Default: 0; for `efa` 4.
    #[serde(deserialize_with = "proxy_threads")]
    pub proxy_threads: u32,
    /// Most commands of a queue that are in flight, 1 to 4,096. Default: 512.
    #[serde(deserialize_with = "queue_depth")]
    pub queue_depth: u32,
    /// Whether peers may read this rank's windows, for the op get. Equal on all ranks. Default:
    /// `false`: windows are registered for writing only.
    pub get: bool,
    /// Whether a signal waits for a read-back of a window. Default: `auto`.
    pub flush: Flush,
}

impl Default for LibfabricConfig {
    fn default() -> Self {
        let EfaConfig { rails, queue_depth, get, flush, .. } = EfaConfig::default();
        Self { provider: "tcp".into(), rails, proxy_threads: 0, queue_depth, get, flush }
    }
}

/// The table `[transport.scale_out.efa]`. The keys are those of [`LibfabricConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "documented at LibfabricConfig")]
pub struct EfaConfig {
    pub rails: Rails,
    #[serde(deserialize_with = "proxy_threads")]
    pub proxy_threads: u32,
    #[serde(deserialize_with = "queue_depth")]
    pub queue_depth: u32,
    pub get: bool,
    pub flush: Flush,
}

impl Default for EfaConfig {
    fn default() -> Self {
        Self {
            rails: Rails::Auto,
            proxy_threads: 4,
            queue_depth: 512,
            get: false,
            flush: Flush::Auto,
        }
    }
}

/// The key `flush`: whether the receiver reads one of its own windows through the NIC before a
/// signal counts, so that payloads in device memory are visible by then (INV-1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flush {
    /// Only if a window is device memory.
    #[default]
    Auto,
    /// Also if all windows are host memory, where it is not needed. For tests.
    Always,
}

/// The key `rails`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rails {
    /// The NICs that the topology chose for the rank; where it chose none, all NICs on the NUMA
    /// nodes that this process may run on. For a provider that drives no NIC (sockets, shared
    /// memory), the first interface.
    Auto,
    /// The first NICs of the provider's list, this many.
    Count(NonZeroU32),
    /// Interfaces or domains by name, in this order.
    Named(Vec<String>),
}

impl<'de> Deserialize<'de> for Rails {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RailsVisitor)
    }
}

struct RailsVisitor;

impl<'de> Visitor<'de> for RailsVisitor {
    type Value = Rails;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"auto\", a number from 1 to {MAX_RAILS}, or a list of interface names")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Rails, E> {
        match text {
            "auto" => Ok(Rails::Auto),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Rails, E> {
        let count = u32::try_from(number).ok().and_then(NonZeroU32::new);
        match count.filter(|count| count.get() as usize <= MAX_RAILS) {
            Some(count) => Ok(Rails::Count(count)),
            None => Err(E::invalid_value(de::Unexpected::Signed(number), &self)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Rails, A::Error> {
        let mut names = Vec::<String>::new();
        while let Some(name) = list.next_element::<String>()? {
            if names.contains(&name) {
                return Err(de::Error::custom(format!("found {name:?} twice; expected it once")));
            }
            names.push(name);
        }
        if names.is_empty() || names.len() > MAX_RAILS {
            let expected = format!("1 to {MAX_RAILS} names");
            return Err(de::Error::invalid_length(names.len(), &expected.as_str()));
        }
        Ok(Rails::Named(names))
    }
}

fn queue_depth<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    within(i64::deserialize(deserializer)?, QUEUE_DEPTHS)
}

fn proxy_threads<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    within(i64::deserialize(deserializer)?, PROXY_THREADS)
}

fn within<E: de::Error>(found: i64, range: RangeInclusive<u32>) -> Result<u32, E> {
    u32::try_from(found).ok().filter(|number| range.contains(number)).ok_or_else(|| {
        E::custom(format!("found {found}; expected {} to {}", range.start(), range.end()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_core::config::ComponentTable;

    fn parse(text: &str) -> Result<LibfabricConfig, String> {
        ComponentTable::from_text(text, "a.toml").parse("libfabric").map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_table_is_one_rail_of_tcp() {
        let config = parse("").unwrap();
        assert_eq!(config, LibfabricConfig::default());
        assert_eq!((config.provider.as_str(), config.rails), ("tcp", Rails::Auto));
    }

    #[test]
    fn rails_are_auto_a_count_or_names() {
        assert_eq!(parse("rails = \"auto\"").unwrap().rails, Rails::Auto);
        let four = Rails::Count(NonZeroU32::new(4).unwrap());
        assert_eq!(parse("rails = 4").unwrap().rails, four);
        let named = Rails::Named(vec!["eth0".into(), "eth1".into()]);
        assert_eq!(parse("rails = [\"eth0\", \"eth1\"]").unwrap().rails, named);
    }

    #[test]
    fn bad_values_are_refused_with_file_line_found_and_expected() {
        for (text, words) in [
            ("\nrails = \"all\"", "\"all\""),
            ("\nrails = 0", "number from 1 to 16"),
            ("\nrails = 17", "17"),
            ("\nrails = []", "1 to 16 names"),
            ("\nrails = [\"a\", \"a\"]", "twice"),
            ("\nrails = true", "\"auto\", a number"),
            ("\nqueue_depth = 0", "expected 1 to 4096"),
            ("\nqueue_depth = 4097", "found 4097"),
            ("\nproxy_threads = 17", "expected 0 to 16"),
            ("\nflush = \"never\"", "expected `auto` or `always`"),
            ("\nprovder = \"tcp\"", "provider"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains("a.toml:2") && error.contains(words), "{text:?}: {error}");
        }
    }

    #[test]
    fn efa_has_no_choice_of_provider() {
        let table = ComponentTable::from_text("provider = \"tcp\"", "a.toml");
        let error = table.parse::<EfaConfig>("efa").unwrap_err().to_string();
        assert!(error.contains("provider") && error.contains("rails"), "{error}");
    }
}
