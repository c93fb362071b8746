//! Expected failures: data with a reason. A test that is expected to fail and passes is a failure,
//! so that the list never outlives its reasons. A test that fails by chance has an entry with `sometimes`: it proves
//! nothing where it passes, and the report says so.

use anyhow::{Result, ensure};
use serde::Deserialize;
use tokenyard_core::config::{ComponentChoice, Config};

/// The list that ships with the suite.
const SHIPPED: &str = include_str!("../expected.toml");

/// One expected failure.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// It holds where the config uses a component of this name.
    pub component: String,
    /// It holds where that component's table has these values.
    #[serde(default)]
    pub options: toml::Table,
    /// The tests: a name, with `*` for any characters.
    pub test: String,
    /// A part of the failure's message: a failure without it was not expected.
    #[serde(default)]
    pub found: String,
    /// They fail by chance: they may pass.
    #[serde(default)]
    pub sometimes: bool,
    /// Why they fail.
    pub reason: String,
    /// A link to the follow-up.
    pub link: String,
}

impl Entry {
    fn holds_for(&self, choice: &ComponentChoice) -> bool {
        if self.component != choice.name {
            return false;
        }
        // A table that cannot be read has no values; who loads the component says why.
        let table = choice.table.parse::<toml::Table>(&choice.name).unwrap_or_default();
        self.options.iter().all(|(key, value)| table.get(key) == Some(value))
    }
}

/// The expected failures that hold for one config.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    entries: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    expected: Vec<Entry>,
}

impl Expected {
    /// The entries that ship with the suite.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn shipped(config: &Config) -> Result<Self> {
        Self::parse(SHIPPED, config)
    }

    /// Reads entries from TOML and takes those whose component `config` uses.
    ///
    /// # Errors
    /// Text that is not a list of entries; an entry without a reason or a link.
    pub fn parse(text: &str, config: &Config) -> Result<Self> {
        let mut entries = toml::from_str::<File>(text)?.expected;
        for entry in &entries {
            ensure!(
                !entry.reason.trim().is_empty() && !entry.link.trim().is_empty(),
                "expected failure of `{}`: found no reason or no link; expected both",
                entry.test
            );
        }
        let choices = || {
            let transports = config.scale_up.iter().chain(&config.scale_out);
            transports.chain([&config.kernels, &config.topology])
        };
        entries.retain(|entry| choices().any(|choice| entry.holds_for(choice)));
        Ok(Self { entries })
    }

    /// The entry for this test, if it is expected to fail.
    pub fn entry(&self, test: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| matches(&entry.test, test))
    }
}

/// Whether `pattern` matches `name`. With `*`, which stands for any characters, it must match the whole
/// name; without, it must be a part of the name.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(last) = pieces.next_back() else { return name.contains(pattern) };
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    for piece in pieces {
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_with_a_star_fit_the_whole_name_and_others_a_part_of_it() {
        for (pattern, name, fits) in [
            ("flat", "l1/types/flat.bf16", true),
            ("flat", "l1/types/packed", false),
            ("l1/*", "l1/types/flat", true),
            ("l1/*", "l2/l1/flat", false),
            ("*flat", "l1/types/flat", true),
            ("*flat", "l1/types/flat.bf16", false),
            ("l*/types/*t", "l1/types/flat", true),
            ("*", "", true),
            ("a*a", "a", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    fn config() -> Config {
        let text = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
        Config::parse(text, "test").expect("a valid config")
    }

    const ENTRY: &str =
        "[[expected]]\ncomponent = \"shm\"\ntest = \"l2/*\"\nreason = \"slow\"\nlink = \"#7\"\n";

    #[test]
    fn an_entry_holds_for_configs_that_use_its_component() {
        let expected = Expected::parse(ENTRY, &config()).expect("valid");
        assert_eq!(expected.entry("l2/x").map(|e| e.reason.as_str()), Some("slow"));
        assert!(expected.entry("l1/x").is_none());
        let other = ENTRY.replace("shm", "efa");
        assert!(Expected::parse(&other, &config()).expect("valid").entry("l2/x").is_none());
    }

    #[test]
    fn an_entry_with_options_holds_where_the_components_table_has_them() {
        let config = |table: &str| {
            let text = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
            Config::parse(&format!("{text}{table}"), "test").expect("a valid config")
        };
        let entry = format!("{ENTRY}options = {{ window_mib = 7 }}\n");
        let holds = |table: &str| {
            Expected::parse(&entry, &config(table)).expect("valid").entry("l2/x").is_some()
        };
        assert!(holds("[transport.scale_up.shm]\nwindow_mib = 7\n"));
        assert!(!holds("[transport.scale_up.shm]\nwindow_mib = 8\n"));
        assert!(!holds(""));
    }

    #[test]
    fn an_entry_needs_a_reason_and_a_link() {
        assert!(Expected::parse(&ENTRY.replace("slow", " "), &config()).is_err());
        assert!(Expected::parse(&ENTRY.replace("link = \"#7\"\n", ""), &config()).is_err());
        assert!(Expected::parse(&ENTRY.replace("test", "tests"), &config()).is_err());
    }

    #[test]
    fn the_shipped_list_is_valid() {
        Expected::shipped(&config()).expect("valid");
    }
}
