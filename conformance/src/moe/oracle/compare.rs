//! Expected arrays, and their comparison with found ones.

use std::collections::BTreeSet;
use std::fmt;

use super::number::Elem;

/// One expected array: rows of equal width, of which some are specified and the others are not.
///
/// Only specified rows are stored, so an unspecified row cannot be compared by mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// The name, as in the field that holds it.
    pub name: &'static str,
    /// The type of the elements.
    pub elem: Elem,
    /// Elements of one row.
    pub width: usize,
    /// All rows, specified or not. A shape `[El, R*M, H]` has El*R*M rows of width H.
    pub rows: usize,
    /// The array may be longer than `rows`; rows after them are unspecified.
    pub open_ended: bool,
    /// Any NaN equals any NaN: the rules define which sums are NaN, never their bits.
    pub any_nan: bool,
    specified: Vec<(usize, Origin)>,
    data: Vec<u8>,
}

/// The origin of a row's content. Shown in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A token.
    Token {
        /// Its source rank.
        rank: usize,
        /// Its number there.
        token: usize,
    },
    /// The copy of a token for one of its experts.
    Copy {
        /// The token's source rank.
        rank: usize,
        /// Its number there.
        token: usize,
        /// The global number of the expert.
        expert: usize,
    },
    /// Padding after the rows of an expert (its global number).
    Padding(usize),
    /// A place behind the rows of a source rank.
    Behind(usize),
    /// An entry of a table such as the expert counts.
    Entry,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token { rank, token } => write!(f, "token {token} of rank {rank}"),
            Self::Copy { rank, token, expert } => {
                write!(f, "token {token} of rank {rank} for expert {expert}")
            }
            Self::Padding(expert) => write!(f, "padding of expert {expert}"),
            Self::Behind(rank) => write!(f, "a place behind the rows of rank {rank}"),
            Self::Entry => f.write_str("table entry"),
        }
    }
}

/// How a found array differs from the expected one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The array is not there.
    Missing {
        /// Its name.
        array: &'static str,
    },
    /// It has the wrong size.
    Size {
        /// Its name.
        array: &'static str,
        /// Its bytes.
        found: usize,
        /// The bytes that it should have, or the least number of bytes.
        expected: usize,
        /// Whether it may have more.
        open_ended: bool,
    },
    /// Its size is right and its content is not.
    Content(Box<Difference>),
}

/// The first difference of two arrays, and how many there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The array's name.
    pub array: &'static str,
    /// The first row that differs.
    pub row: usize,
    /// The first element of that row that differs.
    pub column: usize,
    /// The origin of that row.
    pub origin: Origin,
    /// The element found: value and bits.
    pub found: String,
    /// The element expected: value and bits.
    pub expected: String,
    /// The expected row whose content was found here instead, if there is one.
    pub belongs_at: Option<(usize, Origin)>,
    /// Elements that differ.
    pub elements: usize,
    /// Rows that differ.
    pub rows: usize,
    /// Rows that were compared.
    pub compared: usize,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { array } => write!(f, "{array}: found no such array; expected one"),
            Self::Size { array, found, expected, open_ended } => {
                let least = if *open_ended { "at least " } else { "" };
                write!(f, "{array}: found {found} bytes; expected {least}{expected}")
            }
            Self::Content(difference) => difference.fmt(f),
        }
    }
}

impl std::error::Error for Mismatch {}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { array, row, column, origin, found, expected, .. } = self;
        write!(f, "{array}: row {row}, column {column} ({origin}): ")?;
        write!(f, "found {found}; expected {expected}; ")?;
        if let Some((row, origin)) = self.belongs_at {
            write!(f, "the row found belongs at row {row} ({origin}); ")?;
        }
        write!(f, "{} elements in {} of {} rows differ", self.elements, self.rows, self.compared)
    }
}

/// Rows shorter than this many bytes are too alike to say where one belongs.
const TELLING_ROW_BYTES: usize = 16;

impl Array {
    /// An array of `rows` rows, none of them specified yet.
    pub fn new(name: &'static str, elem: Elem, width: usize, rows: usize) -> Self {
        Self {
            name,
            elem,
            width,
            rows,
            open_ended: false,
            any_nan: false,
            specified: Vec::new(),
            data: Vec::new(),
        }
    }

    /// A table whose entries, `width` to a row, are all specified.
    pub fn table(name: &'static str, elem: Elem, width: usize, data: Vec<u8>) -> Self {
        let rows = data.len() / (width * elem.bytes());
        let specified = (0..rows).map(|row| (row, Origin::Entry)).collect();
        Self { specified, data, ..Self::new(name, elem, width, rows) }
    }

    /// Specifies the content of `row`. Rows come in ascending order, each at most once.
    pub(super) fn push(&mut self, row: usize, origin: Origin, bytes: &[u8]) {
        debug_assert!(row < self.rows && bytes.len() == self.row_bytes());
        debug_assert!(self.specified.last().is_none_or(|(last, _)| *last < row));
        self.specified.push((row, origin));
        self.data.extend_from_slice(bytes);
    }

    /// Specifies a row of equal bytes.
    pub(super) fn fill(&mut self, row: usize, origin: Origin, byte: u8) {
        self.push(row, origin, &vec![byte; self.row_bytes()]);
    }

    /// Sets every byte of the rows that came from `ranks`.
    pub(super) fn clear_rows_of(&mut self, ranks: &[usize], byte: u8) {
        let width = self.row_bytes().max(1);
        for ((_, origin), row) in self.specified.iter().zip(self.data.chunks_mut(width)) {
            if let Origin::Token { rank, .. } | Origin::Copy { rank, .. } = origin
                && ranks.contains(rank)
            {
                row.fill(byte);
            }
        }
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.width * self.elem.bytes()
    }

    /// The specified rows, ascending: number, origin, content.
    pub fn specified(&self) -> impl Iterator<Item = (usize, Origin, &[u8])> {
        let rows = self.data.chunks(self.row_bytes().max(1));
        self.specified.iter().zip(rows).map(|((row, origin), bytes)| (*row, *origin, bytes))
    }

    /// The whole array, with every byte of unspecified rows set to `fill`.
    pub fn dense(&self, fill: u8) -> Vec<u8> {
        let mut bytes = vec![fill; self.rows * self.row_bytes()];
        for (row, _, content) in self.specified() {
            bytes[row * self.row_bytes()..][..content.len()].copy_from_slice(content);
        }
        bytes
    }

    /// Whether every specified row of `found` is as expected, bit for bit.
    ///
    /// # Errors
    /// The wrong size, or the first difference and how many there are.
    pub fn compare(&self, found: &[u8]) -> Result<(), Mismatch> {
        let expected = self.rows * self.row_bytes();
        if found.len() < expected || (found.len() > expected && !self.open_ended) {
            let (array, open_ended) = (self.name, self.open_ended);
            return Err(Mismatch::Size { array, found: found.len(), expected, open_ended });
        }
        let mut first = None;
        let (mut elements, mut rows) = (0, 0);
        for (row, origin, expected) in self.specified() {
            let found = &found[row * self.row_bytes()..][..self.row_bytes()];
            if found == expected {
                continue;
            }
            let columns = self.differing_columns(found, expected);
            if let Some(column) = columns.first() {
                rows += 1;
                elements += columns.len();
                first.get_or_insert((row, *column, origin, found, expected));
            }
        }
        let Some((row, column, origin, found, expected)) = first else { return Ok(()) };
        Err(Mismatch::Content(Box::new(Difference {
            array: self.name,
            row,
            column,
            origin,
            found: self.show(found, column),
            expected: self.show(expected, column),
            belongs_at: self.find_row(found),
            elements,
            rows,
            compared: self.specified.len(),
        })))
    }

    fn differing_columns(&self, found: &[u8], expected: &[u8]) -> BTreeSet<usize> {
        let size = self.elem.bytes();
        let pairs = found.chunks(size).zip(expected.chunks(size)).enumerate();
        let both_nan =
            |a: &[u8], b: &[u8]| self.any_nan && self.elem.is_nan(a) && self.elem.is_nan(b);
        pairs.filter(|(_, (a, b))| a != b && !both_nan(a, b)).map(|(column, _)| column).collect()
    }

    fn find_row(&self, content: &[u8]) -> Option<(usize, Origin)> {
        let telling = content.len() >= TELLING_ROW_BYTES && content.iter().any(|b| *b != 0);
        self.specified()
            .find(|(_, _, expected)| telling && *expected == content)
            .map(|(row, origin, _)| (row, origin))
    }

    /// The value and the bits of one element of a row.
    fn show(&self, row: &[u8], column: usize) -> String {
        let bytes = &row[column * self.elem.bytes()..][..self.elem.bytes()];
        let bits: String = bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect();
        format!("{} (0x{bits})", self.elem.show(bytes))
    }
}
