//! The table `[topology.auto]`.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use tokenyard_core::abi;

/// The table `[topology.auto]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TopologyConfig {
    /// Identity of the machine, 1 to 63 bytes, in place of the one that tokenyard finds. Ranks with
    /// equal identities must be able to share memory. Default: found.
    pub host: Option<String>,
    /// NICs that ranks of this node use. Default: the nearest NICs of the fastest model.
    pub nics: Option<NicChoice>,
    /// The traffic that the fabric lets pass between rails. Equal on all nodes. Default: none.
    pub rails: Rails,
}

/// The key `rails`: the NICs of different nodes that reach each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rails {
    /// NICs of the same name: each rail may be a network of its own.
    #[default]
    Equal,
    /// NICs of all names.
    Any,
}

/// The key `nics`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NicChoice {
    /// A list: each rank uses the nearest of these, and ranks divide them.
    Among(Vec<String>),
    /// A table: the NICs of each local rank, used unchanged.
    ByLocalRank(BTreeMap<u32, Vec<String>>),
}

impl<'de> Deserialize<'de> for NicChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NicVisitor)
    }
}

struct NicVisitor;

impl<'de> Visitor<'de> for NicVisitor {
    type Value = NicChoice;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of names of NICs, or a table from local ranks to lists of names")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<NicChoice, A::Error> {
        let mut names: Vec<String> = Vec::new();
        while let Some(name) = seq.next_element()? {
            names.push(name);
        }
        match names.as_slice() {
            [] => Err(de::Error::invalid_length(0, &"at least one name")),
            _ if names.iter().any(String::is_empty) => {
                Err(de::Error::invalid_value(de::Unexpected::Str(""), &"names of NICs"))
            }
            _ => Ok(NicChoice::Among(names)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<NicChoice, A::Error> {
        let mut ranks = BTreeMap::new();
        while let Some((key, names)) = map.next_entry::<String, Vec<String>>()? {
            let rank = key.parse::<u32>().map_err(|_| {
                de::Error::invalid_value(de::Unexpected::Str(&key), &"a local rank: 0, 1, ...")
            })?;
            let most = abi::TY_PLACE_NICS;
            if names.is_empty() || names.len() > most || names.iter().any(String::is_empty) {
                let expected = format!("1 to {most} names of NICs");
                return Err(de::Error::invalid_length(names.len(), &expected.as_str()));
            }
            ranks.insert(rank, names);
        }
        Ok(NicChoice::ByLocalRank(ranks))
    }
}
