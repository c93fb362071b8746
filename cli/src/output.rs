//! Output of the commands, for people and for programs.
//!
//! Without `--json`, results for people go to standard output. With it, they go to standard error,
//! and the last line of standard output is one JSON document.

use std::fmt::{Display, Write as _};
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use serde::Serialize;
use tokenyard_core::Error;
use tokenyard_core::bootstrap::{environment, is_rank_of_mpirun};
use tracing_subscriber::filter::{LevelFilter, Targets, dynamic_filter_fn};
use tracing_subscriber::layer::Layer as _;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::warnings::{self, ToPeople};

/// Version of the JSON documents; grows when a field changes its meaning or goes away.
///
/// - 2: what ranks agree on (`config.agreed` of `run`) and `conditions.load` are numbers, no longer texts.
/// - 3: keys have the words `communicator`, `components` and `queues`.
/// - 4: findings have `expected` and `impact` in place of `wanted` and `cost`.
pub(crate) const SCHEMA_VERSION: u32 = 5;

/// Chooses what of the log is shown.
pub(crate) const LOG_VARIABLE: &str = "TOKENYARD_LOG";

/// Sends the log to standard error; `TOKENYARD_LOG` chooses what (default: warnings).
pub(crate) fn init_log() {
    let asked = std::env::var(LOG_VARIABLE).ok().filter(|text| !text.trim().is_empty());
    let asked = asked.as_deref().unwrap_or("warn");
    for word in asked.split(',').map(str::trim).filter(|word| is_no_filter(word)) {
        People::errors().prose(format_args!(
            "warning: found {word:?} in {LOG_VARIABLE}, expected a level (error, warn, info, debug, trace, off) or \
             target=level, such as tokenyard_core=debug; it chooses nothing"
        ));
    }
    let filter = asked.parse::<Targets>().unwrap_or_else(|error| {
        People::errors().prose(format_args!(
            "warning: found {LOG_VARIABLE}={asked:?} ({error}), expected levels such as info or \
             warn,tokenyard_core=debug; warnings are shown"
        ));
        Targets::new().with_default(LevelFilter::WARN)
    });
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(colours(std::io::stderr().is_terminal()))
        .with_filter(dynamic_filter_fn(|metadata, _| warnings::is_in_log(metadata)));
    tracing_subscriber::registry().with(filter).with(lines).with(ToPeople).init();
}

/// Whether a part of the filter is neither a level, nor a target of this program, nor one with a level.
fn is_no_filter(word: &str) -> bool {
    let is_level = word.parse::<LevelFilter>().is_ok();
    !is_level && !word.contains('=') && !word.starts_with("tokenyard")
}

/// Whether to use colours, as <https://no-color.org> asks. mpirun gives its ranks a terminal of its own, and writes
/// what they print into logs.
fn colours(terminal: bool) -> bool {
    let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    terminal && wanted && !is_rank_of_mpirun(&environment)
}

/// The ending of a noun behind a number of things.
pub(crate) fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// How a piece of text stands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Plain,
    Good,
    Warn,
    Bad,
    Strong,
}

impl Style {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Good => "\x1b[32m",
            Self::Warn => "\x1b[33m",
            Self::Bad => "\x1b[31m",
            Self::Strong => "\x1b[1m",
        }
    }
}

/// Where people read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct People {
    to_stderr: bool,
    colours: bool,
    /// A terminal reads. Elsewhere a sentence is one line, for programs that search logs.
    is_terminal: bool,
}

impl People {
    /// Standard output, or standard error where a program reads standard output.
    pub(crate) fn new(json: bool) -> Self {
        let terminal =
            if json { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
        Self { to_stderr: json, colours: colours(terminal), is_terminal: terminal }
    }

    /// Standard error.
    pub(crate) fn errors() -> Self {
        Self::new(true)
    }

    /// Writes a line. A failed write to standard output shows in the exit code ([`exit_code`]).
    pub(crate) fn say(self, text: impl Display) {
        if self.to_stderr {
            // There is no other place to report it.
            let _ = writeln!(std::io::stderr(), "{text}");
        } else {
            note(writeln!(std::io::stdout(), "{text}"));
        }
    }

    /// Writes sentences: on a terminal in lines of 80 columns, as tables have.
    pub(crate) fn prose(self, text: impl Display) {
        let text = text.to_string();
        match self.is_terminal {
            true => self.say(wrapped(&text)),
            false => self.say(text),
        }
    }

    /// Says what went wrong.
    pub(crate) fn error(self, text: impl Display) {
        self.prose(format_args!("{} {text}", self.paint(Style::Bad, "error:")));
    }

    /// `text` in a style, where colours are shown.
    pub(crate) fn paint(self, style: Style, text: impl Display) -> String {
        if self.colours && style != Style::Plain {
            format!("{}{text}\x1b[0m", style.code())
        } else {
            text.to_string()
        }
    }
}

/// A command's document of `--json`.
#[derive(Serialize)]
struct Document<'a, T> {
    schema_version: u32,
    command: &'static str,
    #[serde(flatten)]
    fields: &'a T,
}

/// Writes the document of a command, with these fields behind its version and the command's name.
pub(crate) fn print_document<T: Serialize>(command: &'static str, fields: &T) -> Result<()> {
    print_json(&Document { schema_version: SCHEMA_VERSION, command, fields })
}

/// Writes one JSON document as the last line of standard output. A failed write shows in the exit
/// code ([`exit_code`]).
pub(crate) fn print_json<T: Serialize>(document: &T) -> Result<()> {
    let text = serde_json::to_string(document).context("write JSON")?;
    note(writeln!(std::io::stdout(), "{text}"));
    Ok(())
}

/// Why standard output did not take what was written to it, the first time; nothing to say where the reader
/// went away.
static LOST: OnceLock<Option<String>> = OnceLock::new();

/// Remembers how writing to standard output went.
pub(crate) fn note(written: std::io::Result<()>) {
    let Err(error) = written else { return };
    LOST.get_or_init(|| match error.kind() {
        std::io::ErrorKind::BrokenPipe => None,
        _ => Some(Error::system("write to standard output", "it takes no more", error).to_string()),
    });
}

/// The exit code of a command that ends with `code`. If standard output did not take all that was written,
/// success becomes [`lost_code`].
pub(crate) fn exit_code(code: ExitCode) -> ExitCode {
    match lost_code() {
        Some(lost) if code == ExitCode::SUCCESS => ExitCode::from(lost),
        _ => code,
    }
}

/// The exit code if standard output did not take all that was written; none if it did. A failure gives 1 and
/// a message. If the reader has closed its end (`| head`), the code is 141 without a message, as for a
/// process that SIGPIPE has ended.
pub(crate) fn lost_code() -> Option<u8> {
    note(std::io::stdout().flush());
    let Some(why) = LOST.get()? else { return Some(141) };
    People::errors().error(why);
    Some(1)
}

/// The contexts and the error itself in one line. An error of core already says its sources.
pub(crate) fn error_text(error: &anyhow::Error) -> String {
    let mut parts = Vec::new();
    for cause in error.chain() {
        parts.push(cause.to_string());
        if cause.is::<Error>() {
            break;
        }
    }
    parts.join(": ")
}

/// Characters of a line of a table.
const LINE: usize = 80;
/// Before the lines below the first one of a sentence.
const INDENT: &str = "    ";
/// The least that a last column is folded to.
const NARROWEST: usize = 16;

/// One field of a table.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    pub(crate) fn styled(style: Style, text: impl Display) -> Self {
        Self { text: text.to_string(), style }
    }
}

impl<T: Display> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::styled(Style::Plain, text)
    }
}

/// Lines of cells in aligned columns: numbers to the right, the rest to the left.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    header: Vec<String>,
    rows: Vec<Vec<Cell>>,
    /// Words of the last column that do not fit into a line go on below.
    is_folded: bool,
}

impl Table {
    pub(crate) fn new(header: &[&str]) -> Self {
        let header = header.iter().map(|h| (*h).to_owned()).collect();
        Self { header, rows: Vec::new(), is_folded: false }
    }

    /// A table whose last column is text of any length: words that do not fit into 80 columns go on below.
    pub(crate) fn folded(header: &[&str]) -> Self {
        Self { is_folded: true, ..Self::new(header) }
    }

    #[cfg(feature = "full")]
    pub(crate) fn columns(&self) -> usize {
        self.header.len()
    }

    /// Adds a line; missing cells are empty.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The whole table, without a newline at its end.
    pub(crate) fn render(&self, people: People) -> String {
        let mut text = String::new();
        let header: Vec<Cell> =
            self.header.iter().map(|h| Cell::styled(Style::Strong, h)).collect();
        for row in std::iter::once(&header).chain(&self.rows) {
            let (first, more) = self.wrapped(row);
            for row in std::iter::once(&first).chain(&more) {
                text.push_str(&self.line(row, people));
                text.push('\n');
            }
        }
        text.trim_end_matches('\n').to_owned()
    }

    fn line(&self, row: &[Cell], people: People) -> String {
        let mut line = String::new();
        let mut blanks = 0;
        for (column, title) in self.header.iter().enumerate() {
            let cell = row.get(column).cloned().unwrap_or_else(|| "".into());
            let pad = self.width(column, title).saturating_sub(cell.text.chars().count());
            let (before, after) = if self.is_numeric(column) { (pad, 0) } else { (0, pad) };
            let _ = write!(
                line,
                "{:blanks$}{}",
                "",
                people.paint(cell.style, &cell.text),
                blanks = blanks + before
            );
            // Blanks are written only before something, so that no line ends in them.
            blanks = after + 2;
        }
        line.trim_end().to_owned()
    }

    /// A row as the lines that it takes.
    fn wrapped(&self, row: &[Cell]) -> (Vec<Cell>, Vec<Vec<Cell>>) {
        let last = self.header.len().saturating_sub(1);
        let columns = self.header.iter().enumerate().take(last);
        let before: usize = columns.map(|(column, title)| self.width(column, title) + 2).sum();
        let fitting = LINE.saturating_sub(before).max(NARROWEST);
        let room = if self.is_folded { fitting } else { usize::MAX };
        let mut row = row.to_vec();
        let Some(cell) = row.get_mut(last) else { return (row, Vec::new()) };
        let style = cell.style;
        let mut lines = fold(&cell.text, room).into_iter();
        cell.text = lines.next().unwrap_or_default();
        let below = |text| {
            let blank = (0..last).map(|_| Cell::from(""));
            blank.chain([Cell::styled(style, text)]).collect()
        };
        (row, lines.map(below).collect())
    }

    fn width(&self, column: usize, title: &str) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.text.chars().count()).fold(title.chars().count(), usize::max)
    }

    fn is_numeric(&self, column: usize) -> bool {
        let mut cells = self.rows.iter().filter_map(|row| row.get(column)).peekable();
        cells.peek().is_some()
            && cells.all(|cell| cell.text.starts_with(|c: char| c.is_ascii_digit() || c == '-'))
    }
}

/// Each line of a text in lines of at most 80 columns, if no word is longer. Those below the first are indented.
fn wrapped(text: &str) -> String {
    let lines = text.lines().flat_map(|line| {
        fold(line, LINE - INDENT.len()).into_iter().enumerate().map(|(below, line)| match below {
            0 => line,
            _ => format!("{INDENT}{line}"),
        })
    });
    let mut wrapped = lines.collect::<Vec<_>>().join("\n");
    if text.ends_with('\n') {
        wrapped.push('\n');
    }
    wrapped
}

/// The words of a text in lines of at most `room` characters, if no word is longer.
fn fold(text: &str, room: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// A list of ranks as people write it: `0-2, 5`.
pub(crate) fn ranks(list: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in list {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == *rank => *end = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let runs = runs.iter().map(|(start, end)| match start == end {
        true => start.to_string(),
        false => format!("{start}-{end}"),
    });
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: People = People { to_stderr: false, colours: false, is_terminal: false };

    #[test]
    fn sentences_are_wrapped_at_80_columns_and_long_words_stay_whole() {
        let path = format!("/{}", "x".repeat(90));
        let text = format!("error: {} {path} not found\n", "a word ".repeat(20).trim_end());
        let lines = wrapped(&text);
        assert!(lines.ends_with("not found\n"), "{lines}");
        for line in lines.lines() {
            assert!(line.chars().count() <= 80 || line.trim() == path, "{line}");
        }
        assert_eq!(
            lines.split_whitespace().collect::<Vec<_>>(),
            text.split_whitespace().collect::<Vec<_>>()
        );
        assert_eq!(wrapped("short"), "short");
    }

    #[test]
    fn columns_are_aligned_numbers_right_and_words_left() {
        let mut table = Table::new(&["component", "bytes", "note"]);
        table.row(["cpu".into(), 7.into(), "a".into()]);
        table.row(["kernel set".into(), 12345.into()]);
        let expected = "component   bytes  note\ncpu             7  a\nkernel set  12345";
        assert_eq!(table.render(PLAIN), expected);
    }

    #[test]
    fn a_last_column_that_is_too_wide_goes_on_below() {
        let mut table = Table::folded(&["name", "about"]);
        table.row(["x".repeat(50).into(), "words that take more room than a line has".into()]);
        table.row(["y".into(), "few".into()]);
        let text = table.render(PLAIN);
        let below = " ".repeat(52);
        let expected = [
            format!("name{}about", " ".repeat(48)),
            format!("{}  words that take more room", "x".repeat(50)),
            format!("{below}than a line has"),
            format!("y{}few", " ".repeat(51)),
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    }

    #[test]
    fn colours_do_not_count_as_width() {
        let mut table = Table::new(&["a", "b"]);
        table.row([Cell::styled(Style::Good, "ok"), "x".into()]);
        let painted = table.render(People { colours: true, ..PLAIN });
        assert!(painted.contains("\x1b[32mok\x1b[0m  x"), "{painted:?}");
        assert!(!table.render(PLAIN).contains('\x1b'));
    }

    #[test]
    fn lists_of_ranks_read_well() {
        assert_eq!(ranks(&[0, 1, 2, 5]), "0-2, 5");
        assert_eq!(ranks(&[]), "");
    }
}
