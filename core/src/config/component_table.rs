//! A component's own table, in the form in which it reaches the component.
//!
//! The table crosses the plugin ABI as text, and the component, which may be in another library and
//! another language, parses it. So that the component's errors name lines of the operator's file, the
//! text is a TOML document in which every key stands **on its line of the file**:
//!
//! ```toml
//! # in the file, line 7:            # what the component gets, line 7:
//! [transport.scale_out.efa]         # [transport.scale_out.efa]
//! rails = "auto"                    rails = "auto"
//!
//! [transport.scale_out.efa.retry]
//! limit = 7                         retry.limit = 7
//! ```
//!
//! Lines of other sections are blank. Values are copied unchanged; keys of sub-tables become dotted keys;
//! comments are dropped. If several keys of an inline table share a line, TOML cannot express that without
//! the table. Then a comment line `#line N` states, as in C, that the next line is line N of the file. A
//! component may ignore these comments: then its line numbers are a few too high after such a table.

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::READ;
use super::source::{Item, Source, not_toml, offset};
use super::wording::{bounded, plain, shown, unknown_key, unquoted};
use crate::{Error, ErrorKind, Result};

/// The longest dotted key in a component's table, in bytes. It bounds the text, in which every key
/// includes the keys of its tables, and limits the nesting to less than the limit of `toml` (80
/// levels).
const MAX_KEY: usize = 128;

/// Starts a line with the number in the file of the next line.
const LINE_DIRECTIVE: &str = "#line ";

/// The most characters of a component's own message that an error repeats.
const MAX_MESSAGE: usize = 400;

/// A component's own table as text, with the line numbers of its file.
///
/// The text is a TOML document that holds the table's keys at its top. Every key stands on its line of the
/// file. Keys of an inline table that share a line cannot: before such a key, a comment line `#line N` states
/// that the next line is line N of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentTable {
    text: String,
    file: String,
}

impl ComponentTable {
    /// The table of a component that is chosen without a file.
    pub fn empty() -> Self {
        Self::from_text("", "no config file")
    }

    /// The table whose [`ComponentTable::text`] was `text`, from the file named `file`. The other side
    /// of the plugin ABI restores its table with it, and reports the same errors.
    pub fn from_text(text: &str, file: &str) -> Self {
        Self { text: text.to_owned(), file: file.to_owned() }
    }

    /// The text that crosses the plugin ABI; empty if the file has no table for the component.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The file's name in messages.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Reads the table into the component's own type. `component` is the component's name, for messages. Give
    /// the type `#[serde(deny_unknown_fields)]`, so that a misspelt key is an error.
    ///
    /// # Errors
    /// [`ErrorKind::Config`], with file, line, key, the value found and the value expected; for an
    /// unknown key also the available keys.
    pub fn parse<T: DeserializeOwned>(&self, component: &str) -> Result<T> {
        toml::from_str(&self.text).map_err(|error| self.explain(component, &error))
    }

    /// The error for a value of the right type that is wrong. `key` is the key in the component's
    /// table, dotted for sub-tables; `message` states the values found and expected, such as `"is 0;
    /// expected 1 to 64"`.
    pub fn invalid(&self, component: &str, key: &str, message: &str) -> Error {
        let table = DeTable::parse(&self.text).map(Spanned::into_inner).unwrap_or_default();
        let at = key_offset(&table, key).unwrap_or(0);
        self.error(at, &format!("`{}` {} {message}", shown(key), place(component, &[])))
    }

    /// Adds file and line to a component's error about its table: those of the key that the error names
    /// ([`Error::with_key`]), else those of the table. Errors of [`ComponentTable::parse`] have them
    /// already.
    pub(crate) fn locate(&self, error: Error) -> Error {
        let is_placed = error.message().contains(&format!("{}:", self.file));
        if error.kind() != ErrorKind::Config || is_placed {
            return error;
        }
        let table = DeTable::parse(&self.text).map(Spanned::into_inner).unwrap_or_default();
        let offset = error.key().and_then(|key| key_offset(&table, key)).unwrap_or(0);
        match file_line(&self.text, offset) {
            Some(line) => error.at(&format!("{}:{line}", self.file)),
            None => error,
        }
    }

    /// Splits off the table under `key`, for a component that passes it to another component. Returns the
    /// rest, and that table (empty if there is none). Keys stay on their lines.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the value of `key` is no table.
    pub fn split(&self, key: &str) -> Result<(Self, Self)> {
        let source = Source::new(&self.text, &self.file);
        let document = DeTable::parse(&self.text)
            .map_err(|error| self.error(offset(&error), &not_toml(&error, &self.text)))?
            .into_inner();
        let mut rest = Vec::new();
        collect(&source, "the table", &document, &mut Vec::new(), &mut rest)?;
        let mut taken = Vec::new();
        if let Some((name, value)) = document.get_key_value(key) {
            let Some(table) = value.get_ref().as_table() else {
                let message = format!("`{}` is no table; expected one", shown(key));
                return Err(self.error(name.span().start, &message));
            };
            collect(&source, key, table, &mut Vec::new(), &mut taken)?;
            // An inline or empty table is one entry of the whole.
            rest.retain(|entry| entry.start != name.span().start);
        }
        rest.retain(|entry| !taken.iter().any(|other| other.start == entry.start));
        let write = |mut entries: Vec<TableKey<'_>>| {
            for entry in &mut entries {
                entry.line = file_line(&self.text, entry.start).unwrap_or(entry.line);
            }
            let mut writer = Writer::new();
            writer.put_all(entries);
            Self::from_text(&writer.text, &self.file)
        };
        Ok((write(rest), write(taken)))
    }

    /// Extracts the table of `item` from its file.
    pub(super) fn extract(item: &Item<'_>) -> Result<Self> {
        let table =
            item.table().ok_or_else(|| item.wrong_type("a table of the component's own keys"))?;
        let mut entries = Vec::new();
        collect(item.source(), item.path(), table, &mut Vec::new(), &mut entries)?;

        let mut writer = Writer::new();
        // Marks the start of the table, for a table without a key too.
        let first = entries.iter().map(|entry| entry.line).min();
        if first.is_none_or(|first| item.line() < first) {
            writer.put(item.line(), &format!("# [{}]", item.path()));
        }
        writer.put_all(entries);
        Ok(Self { text: writer.text, file: item.source().name().to_owned() })
    }

    /// Rewrites serde's `error` in the wording of all config errors.
    fn explain(&self, component: &str, error: &toml::de::Error) -> Error {
        let at = offset(error);
        let Ok(table) = DeTable::parse(&self.text) else {
            return self.error(at, &not_toml(error, &self.text));
        };
        let mut path = path_at(table.get_ref(), at);
        let message = error.message();
        let names: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
        if let (true, Some((found, known))) =
            (message.starts_with("unknown field `"), names.split_first())
        {
            path.pop_if(|last| last == found);
            return self.error(at, &unknown_key(found, &place(component, &path), known));
        }
        if let (true, [key]) = (message.starts_with("missing field `"), names.as_slice()) {
            let place = place(component, &path);
            return self.error(at, &format!("missing key `{key}` {place}"));
        }
        let message = bounded(message, MAX_MESSAGE);
        let message = match message.rsplit_once(", expected ") {
            Some((found, expected)) => format!("{}; expected {}", fault(found), plain(expected)),
            None => message,
        };
        let Some(key) = path.pop() else {
            return self.error(at, &format!("{}: {message}", place(component, &path)));
        };
        let explained = self.error(at, &format!("`{key}` {}: {message}", place(component, &path)));
        // Serde shows a string that it found in quotes.
        let string = error.message().strip_prefix("invalid type: string \"");
        match string.and_then(|rest| unquoted(rest.split('"').next()?)) {
            Some(value) => explained.with_fix(format!("write {key} = {value}")),
            None => explained,
        }
    }

    fn error(&self, offset: usize, message: &str) -> Error {
        let place = match file_line(&self.text, offset) {
            Some(line) => format!("{}:{line}", self.file),
            None => self.file.clone(),
        };
        Error::new(ErrorKind::Config, READ, format!("{place}: {message}"))
    }
}

/// One key of the table, with its line in the file.
struct TableKey<'a> {
    start: usize,
    line: usize,
    key: String,
    value: &'a str,
}

/// Collects the entries of `table`, whose path in the table `owner` is `path`.
fn collect<'a>(
    source: &Source<'a>,
    owner: &str,
    table: &'a DeTable<'a>,
    path: &mut Vec<&'a str>,
    entries: &mut Vec<TableKey<'a>>,
) -> Result<()> {
    for (key, value) in table {
        path.push(source.slice(key.span()));
        let text = source.slice(value.span());
        let refuse = |problem: &str, expected: &str| {
            let inner = shown(&path.join("."));
            let message = format!("{owner}.{inner} {problem}; expected {expected}");
            Err(source.error_at(key.span().start, message))
        };
        if path.iter().map(|key| key.len() + 1).sum::<usize>() > MAX_KEY {
            return refuse("is too long a key", &format!("less than {MAX_KEY} bytes"));
        }
        match value.get_ref() {
            // The text of a table with a header or dotted keys is not one piece of the file.
            DeValue::Table(inner) if !text.starts_with('{') && !inner.is_empty() => {
                collect(source, owner, inner, path, entries)?;
            }
            DeValue::Array(array) if array.iter().any(|element| has_header(source, element)) => {
                return refuse("is an array of [[tables]]", "an array of inline tables");
            }
            other => {
                let empty = other.is_table() && !text.starts_with('{');
                entries.push(TableKey {
                    start: key.span().start,
                    line: source.line(key.span().start),
                    key: path.join("."),
                    value: if empty { "{}" } else { text },
                });
            }
        }
        path.pop();
    }
    Ok(())
}

/// True if an array's element was written with a `[[header]]`.
fn has_header(source: &Source<'_>, element: &Spanned<DeValue<'_>>) -> bool {
    element.get_ref().is_table() && source.slice(element.span()).starts_with('[')
}

/// Writes lines of the component's text, each at its line of the file.
struct Writer {
    text: String,
    /// The line of the file that the end of `text` stands for.
    line: usize,
}

impl Writer {
    fn new() -> Self {
        Self { text: String::new(), line: 1 }
    }

    fn put_all(&mut self, mut entries: Vec<TableKey<'_>>) {
        entries.sort_by_key(|entry| entry.start);
        for entry in &entries {
            self.put(entry.line, &format!("{} = {}", entry.key, entry.value));
        }
    }

    fn put(&mut self, line: usize, text: &str) {
        if self.line > line {
            self.text.push_str(&format!("{LINE_DIRECTIVE}{line}\n"));
        }
        for _ in self.line..line {
            self.text.push('\n');
        }
        self.text.push_str(text);
        self.text.push('\n');
        self.line = line + 1 + text.matches('\n').count();
    }
}

/// The line of the file for a byte of a component's text. It is the line of the first written line at the
/// byte or after it, so the top of the text gives the start of the table. `None` if the text has no written
/// line.
fn file_line(text: &str, offset: usize) -> Option<usize> {
    let mut next: usize = 1;
    let mut end = 0;
    let mut last_written = None;
    for line in text.split_inclusive('\n') {
        end += line.len();
        let directive = line.trim_end().strip_prefix(LINE_DIRECTIVE);
        if let Some(number) = directive.and_then(|number| number.parse().ok()) {
            next = number;
            continue;
        }
        if !line.trim().is_empty() {
            last_written = Some(next);
            if offset < end {
                break;
            }
        }
        next = next.saturating_add(1);
    }
    last_written
}

/// The path of the key that a byte of the text belongs to, as far as tables reach.
fn path_at<'a>(table: &'a DeTable<'_>, offset: usize) -> Vec<&'a str> {
    for (key, value) in table {
        let mut path = match value.get_ref() {
            DeValue::Table(inner) => path_at(inner, offset),
            _ => Vec::new(),
        };
        if !path.is_empty() || key.span().contains(&offset) || value.span().contains(&offset) {
            path.insert(0, key.get_ref().as_ref());
            return path;
        }
    }
    Vec::new()
}

/// The position in the text of the key with that dotted path.
fn key_offset(table: &DeTable<'_>, path: &str) -> Option<usize> {
    let (key, rest) = match path.split_once('.') {
        Some((key, rest)) => (key, Some(rest)),
        None => (path, None),
    };
    let (found, value) = table.get_key_value(key)?;
    match rest {
        Some(rest) => key_offset(value.get_ref().as_table()?, rest),
        None => Some(found.span().start),
    }
}

/// Serde's words for what it found, in the wording of all config errors.
fn fault(message: &str) -> String {
    let found = ["invalid type: ", "invalid value: "];
    let found = found.iter().find_map(|prefix| message.strip_prefix(prefix));
    found.map_or_else(|| message.to_owned(), |found| format!("found {found}"))
}

fn place(component: &str, path: &[&str]) -> String {
    match path {
        [] => format!("in the table of component `{component}`"),
        path => format!("in `{}` in the table of component `{component}`", shown(&path.join("."))),
    }
}
