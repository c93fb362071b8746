//! The table `[transport.LEVEL.faulty]`. `docs.md` describes each key.

use serde::Deserialize;
use tokenyard_core::Result;
use tokenyard_core::config::ComponentTable;

const COMPONENT: &str = "faulty";

/// Names of keys of this table. An inner transport cannot have one of these names.
const KEYS: [&str; 8] =
    ["inner", "seed", "load_store", "reorder", "delay_us", "back_pressure", "quiet", "fault"];

const MOST_REORDER: u32 = 4096;
const MOST_DELAY_US: u32 = 1_000_000;
const MOST_BACK_PRESSURE: u32 = 90;
const MOST_QUIET: u32 = 1000;

/// The component's own table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultyConfig {
    /// The wrapped transport: any other that is registered in the host.
    #[serde(default = "inner")]
    pub inner: String,
    /// The seed of all random draws, besides rank and queue.
    #[serde(default)]
    pub seed: u64,
    /// Whether the inner transport's load and store access is passed on. Stores are neither delayed
    /// nor lost, but signals are.
    #[serde(default)]
    pub load_store: bool,
    /// Most commands of a queue that are held back; with 0 they stay in order.
    #[serde(default = "reorder")]
    pub reorder: u32,
    /// Longest time that a held command must wait, in microseconds.
    #[serde(default)]
    pub delay_us: u32,
    /// The percentage of posts that accept less than they could.
    #[serde(default = "back_pressure")]
    pub back_pressure: u32,
    /// Most polls in a row that report nothing.
    #[serde(default = "quiet")]
    pub quiet: u32,
    /// The fault.
    #[serde(default)]
    pub fault: Option<Fault>,
    /// The inner transport's own table.
    #[serde(skip, default = "ComponentTable::empty")]
    pub(crate) table: ComponentTable,
}

fn inner() -> String {
    "shm".to_owned()
}

fn reorder() -> u32 {
    16
}

fn back_pressure() -> u32 {
    25
}

fn quiet() -> u32 {
    4
}

/// A fault on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// The kind of fault.
    pub kind: Kind,
    /// World rank on which it happens.
    pub rank: u32,
    /// Commands that this rank's instance accepts before it happens.
    pub at: u64,
    /// World rank at the other end of the link, for faults of a link.
    #[serde(default)]
    pub peer: Option<u32>,
}

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// One command ends as an error; its payload, and its signal, may have moved.
    Fail,
    /// No further command moves or ends, without an error.
    Stop,
    /// Further commands do not end, and move when the instance is dropped.
    Late,
    /// Commands to the peer end as errors.
    LinkError,
    /// Commands to the peer neither move nor end, without an error.
    LinkSilent,
    /// `post`, `poll`, `progress` and `health` do not return any more, which no transport may do
    /// (INV-6).
    Hang,
}

impl Kind {
    pub(crate) fn is_of_a_link(self) -> bool {
        matches!(self, Self::LinkError | Self::LinkSilent)
    }

    /// Whether commands are lost without an error.
    pub(crate) fn is_silent(self) -> bool {
        matches!(self, Self::Stop | Self::Late | Self::LinkSilent | Self::Hang)
    }
}

impl FaultyConfig {
    /// Reads the table, and takes the inner transport's table out of it.
    pub(crate) fn read(table: &ComponentTable) -> Result<Self> {
        // This key is read first: it names the key that holds the inner transport's table.
        #[derive(Deserialize)]
        struct Inner {
            #[serde(default = "inner")]
            inner: String,
        }
        let Inner { inner } = table.parse(COMPONENT)?;
        if inner == COMPONENT || KEYS.contains(&inner.as_str()) {
            let message = format!("is `{inner}`; expected the name of another transport");
            return Err(table.invalid(COMPONENT, "inner", &message));
        }
        let (own, below) = table.split(&inner)?;
        let config = Self { table: below, ..own.parse(COMPONENT)? };
        config.check(&own)?;
        Ok(config)
    }

    fn check(&self, own: &ComponentTable) -> Result<()> {
        for (key, found, most) in [
            ("reorder", self.reorder, MOST_REORDER),
            ("delay_us", self.delay_us, MOST_DELAY_US),
            ("back_pressure", self.back_pressure, MOST_BACK_PRESSURE),
            ("quiet", self.quiet, MOST_QUIET),
        ] {
            if found > most {
                return Err(own.invalid(
                    COMPONENT,
                    key,
                    &format!("is {found}; expected 0 to {most}"),
                ));
            }
        }
        if self.delay_us > 0 && self.reorder == 0 {
            let message = "needs commands that are held back; expected reorder of at least 1";
            return Err(own.invalid(COMPONENT, "delay_us", message));
        }
        let Some(fault) = &self.fault else { return Ok(()) };
        match (fault.kind.is_of_a_link(), fault.peer) {
            (true, None) => {
                Err(own.invalid(COMPONENT, "fault", "is one of a link; expected the key `peer`"))
            }
            (false, Some(_)) => {
                Err(own.invalid(COMPONENT, "fault", "is not one of a link; expected no key `peer`"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<FaultyConfig> {
        FaultyConfig::read(&ComponentTable::from_text(text, "a.toml"))
    }

    #[test]
    fn the_table_of_the_inner_transport_goes_to_it_with_its_lines() {
        let config = read("inner = \"shm\"\nseed = 7\n\nshm.load_store = 3\n").unwrap();
        assert_eq!((config.inner.as_str(), config.seed, config.reorder), ("shm", 7, 16));
        let wrong = config.table.invalid("shm", "load_store", "is 3; expected a boolean");
        assert!(wrong.to_string().contains("a.toml:4: `load_store`"), "{wrong}");
    }

    #[test]
    fn every_mistake_names_its_line_and_what_was_expected() {
        let fault = |keys| format!("inner = \"shm\"\n[fault]\n{keys}");
        for (text, expected) in [
            ("inner = 7", "a.toml:1: `inner`"),
            (
                "inner = \"faulty\"",
                "a.toml:1: `inner` in the table of component `faulty` is `faulty`",
            ),
            ("inner = \"seed\"\nseed = 1", "expected the name of another transport"),
            ("inner = \"shm\"\nshm = 5", "a.toml:2: `shm` is no table"),
            ("inner = \"shm\"\nreorderr = 5", "a.toml:2: unknown key `reorderr`"),
            ("inner = \"shm\"\ntcp.port = 5", "a.toml:2: unknown key `tcp`"),
            ("inner = \"shm\"\nseed = -1", "a.toml:2: `seed`"),
            ("inner = \"shm\"\n\nreorder = 4097", "a.toml:3: `reorder`"),
            ("inner = \"shm\"\nreorder = 4097", "is 4097; expected 0 to 4096"),
            ("inner = \"shm\"\ndelay_us = 1000001", "is 1000001; expected 0 to 1000000"),
            ("inner = \"shm\"\nback_pressure = 91", "is 91; expected 0 to 90"),
            ("inner = \"shm\"\nquiet = 1001", "is 1001; expected 0 to 1000"),
            ("inner = \"shm\"\nreorder = 0\ndelay_us = 1", "a.toml:3: `delay_us`"),
            (&fault("kind = \"melt\"\nrank = 0\nat = 1"), "unknown variant `melt`"),
            (&fault("kind = \"stop\"\nat = 1"), "missing key `rank`"),
            (&fault("kind = \"link_error\"\nrank = 0\nat = 1"), "expected the key `peer`"),
            (&fault("kind = \"stop\"\nrank = 0\nat = 1\npeer = 1"), "expected no key `peer`"),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(expected), "for {text:?}: {error}");
        }
    }
}
