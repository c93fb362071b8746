//! A parsed document whose values know their path and their line.

use std::ops::{Range, RangeInclusive};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::READ;
use super::wording::{milliseconds, shown, unknown_key, unquoted};
use crate::{Error, ErrorKind, Result};

/// The unit of integers that are times.
pub(super) const MILLISECONDS: &str = "milliseconds";

/// The text of a config file, and the starts of its lines.
pub(super) struct Source<'a> {
    text: &'a str,
    name: &'a str,
    line_starts: Vec<usize>,
}

impl<'a> Source<'a> {
    pub(super) fn new(text: &'a str, name: &'a str) -> Self {
        let after_breaks = text.match_indices('\n').map(|(at, _)| at + 1);
        Self { text, name, line_starts: std::iter::once(0).chain(after_breaks).collect() }
    }

    /// The first 16 digits of the SHA-256 of the text.
    pub(super) fn digest(&self) -> String {
        use sha2::Digest;
        let digest = sha2::Sha256::digest(self.text.as_bytes());
        digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    pub(super) fn name(&self) -> &'a str {
        self.name
    }

    /// The line of a byte, counted from 1.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= offset)
    }

    /// The text of a span, unchanged.
    pub(super) fn slice(&self, span: Range<usize>) -> &'a str {
        self.text.get(span).unwrap_or_default()
    }

    /// Parses the text as TOML.
    pub(super) fn parse(&self) -> Result<DeTable<'a>> {
        let table = DeTable::parse(self.text)
            .map_err(|error| self.error_at(offset(&error), not_toml(&error, self.text)))?;
        Ok(table.into_inner())
    }

    /// An error about the byte at `offset`.
    pub(super) fn error_at(&self, offset: usize, message: impl AsRef<str>) -> Error {
        let place = format!("{}:{}", self.name, self.line(offset));
        Error::new(ErrorKind::Config, READ, format!("{place}: {}", message.as_ref()))
    }

    /// An error about a missing entry, which has no line.
    pub(super) fn error(&self, message: impl AsRef<str>) -> Error {
        Error::new(ErrorKind::Config, READ, format!("{}: {}", self.name, message.as_ref()))
    }
}

/// Where a TOML error starts.
pub(super) fn offset(error: &toml::de::Error) -> usize {
    error.span().map_or(0, |span| span.start)
}

/// The reason why `text` is not TOML.
pub(super) fn not_toml(error: &toml::de::Error, text: &str) -> String {
    let found = error.span().and_then(|span| text.get(span)).unwrap_or_default();
    let found =
        if found.trim().is_empty() { String::new() } else { format!("; found `{}`", shown(found)) };
    let fix = match error.message() {
        "duplicate key" => "; expected each key once. Fix: remove one of them",
        _ => "",
    };
    format!("not valid TOML: {}{found}{fix}", error.message())
}

/// A table of the file whose keys belong to core.
pub(super) struct Section<'a> {
    source: &'a Source<'a>,
    /// The dotted path from the top of the file; empty for the top itself.
    path: String,
    table: &'a DeTable<'a>,
    offset: usize,
}

impl<'a> Section<'a> {
    /// The whole file.
    pub(super) fn root(source: &'a Source<'a>, table: &'a DeTable<'a>) -> Self {
        Self { source, path: String::new(), table, offset: 0 }
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    pub(super) fn source(&self) -> &'a Source<'a> {
        self.source
    }

    /// An error about the section as a whole.
    pub(super) fn error(&self, message: &str) -> Error {
        self.source.error_at(self.offset, message)
    }

    /// All entries as (key, value), in the order of the file.
    pub(super) fn entries(&self) -> Vec<(&'a str, Item<'a>)> {
        let mut entries: Vec<_> = self
            .table
            .iter()
            .map(|(key, value)| (key.span().start, key.get_ref().as_ref(), value))
            .collect();
        entries.sort_by_key(|(start, ..)| *start);
        entries.into_iter().map(|(_, key, value)| (key, self.item(key, value))).collect()
    }

    /// An error for every key but those of `known`.
    pub(super) fn unknown_keys(&self, known: &[&str]) -> Vec<Error> {
        let entries = self.entries().into_iter().filter(|(key, _)| !known.contains(key));
        entries.map(|(key, item)| self.unknown(key, &item, known)).collect()
    }

    /// The error for a key that has no meaning in this section.
    pub(super) fn unknown(&self, key: &str, item: &Item<'_>, known: &[&str]) -> Error {
        self.source.error_at(item.span.start, unknown_key(key, &self.place(), known))
    }

    pub(super) fn get(&self, key: &str) -> Option<Item<'a>> {
        self.table.get(key).map(|value| self.item(key, value))
    }

    /// The value of a required key; `expected` describes its values.
    pub(super) fn require(&self, key: &str, expected: &str) -> Result<Item<'a>> {
        self.get(key).ok_or_else(|| {
            self.error(&format!("missing key `{key}` {}; expected {expected}", self.place()))
        })
    }

    /// The section of that name, if the file has it.
    pub(super) fn section(&self, key: &str) -> Result<Option<Self>> {
        self.get(key).map(|item| item.section()).transpose()
    }

    fn item(&self, key: &str, value: &'a Spanned<DeValue<'a>>) -> Item<'a> {
        let bare = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        let key = if !key.is_empty() && key.bytes().all(bare) {
            shown(key)
        } else {
            format!("\"{}\"", shown(key))
        };
        let path = match self.path.as_str() {
            "" => key,
            parent => format!("{parent}.{key}"),
        };
        Item { source: self.source, path, value: value.get_ref(), span: value.span() }
    }

    fn place(&self) -> String {
        match self.path.as_str() {
            "" => "at the top level".to_owned(),
            path => format!("in [{path}]"),
        }
    }
}

/// One value of the file.
pub(super) struct Item<'a> {
    source: &'a Source<'a>,
    path: String,
    value: &'a DeValue<'a>,
    span: Range<usize>,
}

impl<'a> Item<'a> {
    pub(super) fn line(&self) -> usize {
        self.source.line(self.span.start)
    }

    /// The dotted path from the top of the file, such as `plugins.paths[1]`.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    pub(super) fn source(&self) -> &'a Source<'a> {
        self.source
    }

    pub(super) fn table(&self) -> Option<&'a DeTable<'a>> {
        self.value.as_table()
    }

    /// An error about this value: `problem` describes the fault of the value found.
    pub(super) fn error(&self, problem: &str, expected: &str) -> Error {
        let found = match self.value {
            // The text at a table's position in the file is its header or its first key.
            DeValue::Table(_) => String::new(),
            _ => format!(" = {}", shown(self.source.slice(self.span.clone()))),
        };
        let message = format!("{}{found} {problem}; expected {expected}", self.path);
        self.source.error_at(self.span.start, message)
    }

    /// This value as a section.
    pub(super) fn section(&self) -> Result<Section<'a>> {
        let table = self.table().ok_or_else(|| self.wrong_type("a table"))?;
        let (source, offset) = (self.source, self.span.start);
        Ok(Section { source, path: self.path.clone(), table, offset })
    }

    /// This value as a string; `expected` describes the allowed strings.
    pub(super) fn string(&self, expected: &str) -> Result<&'a str> {
        self.value.as_str().ok_or_else(|| self.wrong_type(expected))
    }

    /// This value as an integer in `range`, which counts `unit`.
    pub(super) fn integer(&self, range: RangeInclusive<u64>, unit: &str) -> Result<u64> {
        let expected = format!("an integer from {} to {} ({unit})", range.start(), range.end());
        let integer = self.value.as_integer().ok_or_else(|| {
            self.wrong_type(&expected).with_fix(self.integer_to_write(&range, unit))
        })?;
        u64::from_str_radix(integer.as_str(), integer.radix())
            .ok()
            .filter(|value| range.contains(value))
            .ok_or_else(|| self.error("is out of range", &expected))
    }

    /// The fix where this value is no integer: the integer that its text stands for, if there is one.
    fn integer_to_write(&self, range: &RangeInclusive<u64>, unit: &str) -> String {
        let meant = self.value.as_str().and_then(|text| match unit {
            MILLISECONDS => milliseconds(text),
            _ => unquoted(text)?.parse().ok(),
        });
        match meant.filter(|integer| range.contains(integer)) {
            Some(integer) => {
                let key = self.path.rsplit('.').next().unwrap_or_default();
                format!("write {key} = {integer}")
            }
            None => format!("write a whole number of {unit}, without quotes"),
        }
    }

    /// The elements of this value, if it is an array.
    pub(super) fn elements(&self) -> Option<Vec<Self>> {
        let element = |(i, value): (usize, &'a Spanned<DeValue<'a>>)| Self {
            source: self.source,
            path: format!("{}[{i}]", self.path),
            value: value.get_ref(),
            span: value.span(),
        };
        Some(self.value.as_array()?.iter().enumerate().map(element).collect())
    }

    pub(super) fn wrong_type(&self, expected: &str) -> Error {
        let problem = match self.value {
            DeValue::String(_) => "is a string",
            DeValue::Integer(_) => "is an integer",
            DeValue::Float(_) => "is a float",
            DeValue::Boolean(_) => "is a boolean",
            DeValue::Datetime(_) => "is a date",
            DeValue::Array(_) => "is an array",
            DeValue::Table(_) => "is a table",
        };
        self.error(problem, expected)
    }
}
