//! The prose of the repository: paragraphs of its pages, and of the comments in its sources.

/// One paragraph, list item or cell: the line where it begins, and its text in one line without code.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Paragraph {
    pub(crate) line: usize,
    pub(crate) text: String,
}

/// Paragraphs under construction.
#[derive(Default)]
struct Builder {
    done: Vec<Paragraph>,
    open: Option<Paragraph>,
}

impl Builder {
    fn add(&mut self, line: usize, text: &str) {
        match &mut self.open {
            Some(open) => {
                open.text.push(' ');
                open.text.push_str(text);
            }
            None => self.open = Some(Paragraph { line, text: text.to_owned() }),
        }
    }

    fn end(&mut self) {
        if let Some(mut paragraph) = self.open.take() {
            paragraph.text = without_code(&paragraph.text);
            self.done.push(paragraph);
        }
    }

    fn add_alone(&mut self, line: usize, text: &str) {
        self.end();
        self.add(line, text);
        self.end();
    }

    fn finish(mut self) -> Vec<Paragraph> {
        self.end();
        self.done
    }
}

/// The text with `x` in place of what stands between backticks.
fn without_code(text: &str) -> String {
    let pieces: Vec<&str> = text.split('`').collect();
    let odd =
        |(at, piece): (usize, &&str)| if at % 2 == 1 { "x".into() } else { (*piece).to_owned() };
    pieces.iter().enumerate().map(odd).collect()
}

/// The text behind the mark of a list item, if it is one.
fn item(text: &str) -> Option<&str> {
    let number = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered = (number.len() < text.len()).then(|| number.strip_prefix(". ")).flatten();
    numbered.or_else(|| ["- ", "* ", "> "].iter().find_map(|mark| text.strip_prefix(mark)))
}

/// The paragraphs of a page. Headings and blocks of code are left out.
pub(crate) fn of_page(text: &str) -> Vec<Paragraph> {
    let mut found = Builder::default();
    let mut is_code = false;
    for (line, text) in (1..).zip(text.lines()) {
        let text = text.trim();
        if text.starts_with("```") {
            is_code = !is_code;
            found.end();
        } else if is_code || text.is_empty() || text.starts_with('#') {
            found.end();
        } else if let Some(row) = text.strip_prefix('|') {
            row.split('|').for_each(|cell| found.add_alone(line, cell.trim()));
        } else if let Some(text) = item(text) {
            found.end();
            found.add(line, text);
        } else {
            found.add(line, text);
        }
    }
    found.finish()
}

/// The paragraphs in the comments of a source; `marks` begin a line of comment. Text behind code counts where a
/// blank precedes the mark.
pub(crate) fn of_comments(text: &str, marks: &[&str]) -> Vec<Paragraph> {
    let mut found = Builder::default();
    for (line, text) in (1..).zip(text.lines()) {
        let text = text.trim();
        let whole = marks.iter().find_map(|mark| text.strip_prefix(mark));
        let Some(comment) = whole else {
            found.end();
            if let Some((_, comment)) =
                marks.iter().find_map(|mark| text.split_once(&format!(" {mark} ")))
            {
                found.add_alone(line, comment);
            }
            continue;
        };
        let comment = comment.trim().trim_end_matches("*/").trim_end();
        match item(comment) {
            Some(text) => {
                found.end();
                found.add(line, text);
            }
            None if comment.is_empty() => found.end(),
            None => found.add(line, comment),
        }
    }
    found.finish()
}

/// The paragraphs in the docstrings of a source in Python.
pub(crate) fn of_docstrings(text: &str) -> Vec<Paragraph> {
    let mut found = Builder::default();
    let mut is_inside = false;
    for (line, text) in (1..).zip(text.lines()) {
        for (at, piece) in text.split("\"\"\"").enumerate() {
            if at > 0 {
                is_inside = !is_inside;
                found.end();
            }
            match piece.trim() {
                piece if is_inside && !piece.is_empty() => found.add(line, piece),
                _ if is_inside && at > 0 => {}
                _ => found.end(),
            }
        }
    }
    found.finish()
}
