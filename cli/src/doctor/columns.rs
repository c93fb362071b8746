//! Text in columns that fit a terminal of 80.

use crate::output::{Cell, People, Table};

/// Columns of a terminal.
pub(super) const WIDTH: usize = 80;

/// Breaks a text into lines of at most so many characters: at blanks, after commas, else anywhere.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_inclusive([' ', ',']).flat_map(|word| chunks(word, width)) {
        let has = lines.last().map_or(0, |line| line.chars().count());
        // A blank at the end of a line takes no room.
        if has > 0 && has + word.trim_end().chars().count() > width {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            line.push_str(&word);
        }
    }
    lines.iter().map(|line| line.trim_end().to_owned()).collect()
}

fn chunks(word: &str, width: usize) -> Vec<String> {
    let all: Vec<char> = word.chars().collect();
    all.chunks(width.max(1)).map(|piece| piece.iter().collect()).collect()
}

/// A text of a table's row, and the most characters of it on one line.
pub(super) struct Wrapped<'a>(pub(super) &'a str, pub(super) usize);

/// Adds a line to a table, and more below it where its last two texts are wider than one.
pub(super) fn wrapped_row(table: &mut Table, first: Vec<Cell>, last: [Wrapped<'_>; 2]) {
    let [a, b] = last.map(|Wrapped(text, width)| wrap(text, width));
    let mut first = Some(first);
    for line in 0..a.len().max(b.len()) {
        let heads = first.take().unwrap_or_default();
        let blank = Vec::from_iter((heads.len()..table.columns() - 2).map(|_| Cell::from("")));
        let text = |lines: &[String]| Cell::from(lines.get(line).map_or("", String::as_str));
        table.row(heads.into_iter().chain(blank).chain([text(&a), text(&b)]));
    }
}

/// The contents of a matrix: a line for each of `rows`, whose first cells are theirs, and a column for each of
/// `columns`.
pub(super) struct Matrix<'a> {
    /// Titles of the cells that stand before the matrix.
    pub(super) heads: &'a [&'a str],
    /// These cells, by line.
    pub(super) rows: Vec<Vec<String>>,
    /// Titles of the columns.
    pub(super) columns: Vec<String>,
    /// The cell of a line and column.
    pub(super) word: &'a dyn Fn(usize, usize) -> String,
}

impl Matrix<'_> {
    /// Prints blocks of columns below each other, each as wide as a terminal.
    pub(super) fn print(&self, people: People) {
        let own = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            let title = self.heads.get(column).map_or(0, |head| head.chars().count());
            cells.map(|cell| cell.chars().count()).fold(title, usize::max) + 2
        };
        let heads: usize = (0..self.heads.len()).map(own).sum();
        let of_column = |column: usize| {
            let words = (0..self.rows.len()).map(|row| (self.word)(row, column).chars().count());
            words.fold(self.columns[column].chars().count(), usize::max) + 2
        };
        let widest = (0..self.columns.len()).map(of_column).max().unwrap_or(1);
        // The last column needs no gap behind it.
        let fit = ((WIDTH + 2).saturating_sub(heads) / widest).max(1);
        let all: Vec<usize> = (0..self.columns.len()).collect();
        for block in all.chunks(fit) {
            let titles = self.heads.iter().copied();
            let titles: Vec<&str> =
                titles.chain(block.iter().map(|column| self.columns[*column].as_str())).collect();
            let mut table = Table::new(&titles);
            for (row, cells) in self.rows.iter().enumerate() {
                let words = block.iter().map(|column| (self.word)(row, *column));
                table.row(cells.iter().cloned().chain(words).map(Cell::from));
            }
            people.say(format_args!("\n{}", table.render(people)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_at_blanks_and_commas_and_nothing_is_lost() {
        assert_eq!(wrap("a bc def", 4), ["a bc", "def"]);
        assert_eq!(wrap("0-55,112-167", 6), ["0-55,", "112-16", "7"]);
        assert_eq!(wrap("", 4), [""]);
        assert_eq!(wrap("abcdefgh i", 3), ["abc", "def", "gh", "i"]);
    }
}
