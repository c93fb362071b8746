//! What the commands share in talking to people and to programs.
//!
//! Without `--json`, results for people go to standard output. With it, they go to standard error,
//! and the last line of standard output is one JSON document.

use std::fmt::{Display, Write as _};
use std::io::{IsTerminal, Write};

use anyhow::{Context, Result};
use serde::Serialize;

/// Version of the JSON documents; grows when a field changes its meaning or goes away.
pub(crate) const SCHEMA_VERSION: u32 = 1;

/// Chooses what of the log is shown.
pub(crate) const LOG_VARIABLE: &str = "TOKENYARD_LOG";

/// Sends the log to standard error; `TOKENYARD_LOG` chooses what (default: warnings).
pub(crate) fn init_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env(LOG_VARIABLE)
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colours(std::io::stderr().is_terminal()))
        .init();
}

/// Whether to use colours, as <https://no-color.org> asks.
fn colours(terminal: bool) -> bool {
    terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
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
}

impl People {
    /// Standard output, or standard error where a program reads standard output.
    pub(crate) fn new(json: bool) -> Self {
        let terminal =
            if json { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
        Self { to_stderr: json, colours: colours(terminal) }
    }

    /// Standard error.
    pub(crate) fn errors() -> Self {
        Self::new(true)
    }

    /// Writes a line. A reader that went away (`| head`) is no error.
    pub(crate) fn say(self, text: impl Display) {
        let _ = if self.to_stderr {
            writeln!(std::io::stderr(), "{text}")
        } else {
            writeln!(std::io::stdout(), "{text}")
        };
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

/// Writes one JSON document as the last line of standard output.
pub(crate) fn print_json<T: Serialize>(document: &T) -> Result<()> {
    let text = serde_json::to_string(document).context("write JSON")?;
    writeln!(std::io::stdout(), "{text}").context("write to standard output")
}

/// The contexts and the error itself in one line. An error of core already says its sources.
pub(crate) fn error_text(error: &anyhow::Error) -> String {
    let mut parts = Vec::new();
    for cause in error.chain() {
        parts.push(cause.to_string());
        if cause.is::<tokenyard_core::Error>() {
            break;
        }
    }
    parts.join(": ")
}

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
}

impl Table {
    pub(crate) fn new(header: &[&str]) -> Self {
        Self { header: header.iter().map(|h| (*h).to_owned()).collect(), rows: Vec::new() }
    }

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
        let header = self.header.iter().map(|h| Cell::styled(Style::Strong, h)).collect();
        for row in std::iter::once(&header).chain(&self.rows) {
            let mut line = String::new();
            let mut blanks = 0;
            for (column, title) in self.header.iter().enumerate() {
                let cell = row.get(column).cloned().unwrap_or_else(|| "".into());
                let width = self.width(column, title);
                let pad = width - cell.text.chars().count();
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
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text.trim_end_matches('\n').to_owned()
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

    const PLAIN: People = People { to_stderr: false, colours: false };

    #[test]
    fn columns_are_aligned_numbers_right_and_words_left() {
        let mut table = Table::new(&["part", "bytes", "note"]);
        table.row(["cpu".into(), 7.into(), "a".into()]);
        table.row(["kernel set".into(), 12345.into()]);
        let expected = "part        bytes  note\ncpu             7  a\nkernel set  12345";
        assert_eq!(table.render(PLAIN), expected);
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
