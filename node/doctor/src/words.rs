//! The words of the rules. They stand in `docs/findings.md`, and the program carries that page.

use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The page: an entry for each rule, under the rule's id.
const PAGE: &str = include_str!("../../../docs/findings.md");

static ENTRIES: LazyLock<BTreeMap<&str, Words>> =
    LazyLock::new(|| PAGE.split("\n### `").skip(1).filter_map(entry).collect());

/// The entry of a check on the page.
#[derive(Debug)]
pub struct Words {
    /// The subject of the check.
    pub title: String,
    /// Why it matters.
    pub why: String,
    /// The expected state, where the finding does not say it in numbers.
    pub expected: String,
    /// The impact if nothing is done.
    pub impact: String,
    /// A command or a setting.
    pub fix: String,
    /// Where the rule comes from.
    pub source: String,
}

/// The words of a rule. A test holds that the page has an entry for each.
pub(crate) fn of(id: &str) -> &'static Words {
    static NONE: Words = Words {
        title: String::new(),
        why: String::new(),
        expected: String::new(),
        impact: String::new(),
        fix: String::new(),
        source: String::new(),
    };
    ENTRIES.get(id).unwrap_or(&NONE)
}

/// The id and the words of an entry; `None` where one of its paragraphs is missing.
fn entry(text: &'static str) -> Option<(&'static str, Words)> {
    let (id, text) = text.split_once('`')?;
    let (_, text) = text.split_once("\n\n**")?;
    let (title, text) = text.split_once(".**")?;
    let (why, text) = text.split_once("\n\n- **Expected:**")?;
    let (expected, text) = text.split_once(".\n- **Impact:**")?;
    let (impact, text) = text.split_once(".\n- **Fix:**")?;
    let (fix, text) = text.split_once(".\n- **Source:**")?;
    let source = text.split("\n\n").next()?.trim_end().strip_suffix('.')?;
    let [title, why, expected, impact, fix, source] =
        [title, why, expected, impact, fix, source].map(on_one_line);
    Some((id, Words { title, why, expected, impact, fix, source }))
}

fn on_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
