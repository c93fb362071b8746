//! Recorded trees: a node's files as one text.

use std::collections::{BTreeMap, BTreeSet};

use super::{Lookup, follow};
use crate::Fact;

/// Most files and links of a tree, and most bytes of them together: a repetition cannot fill the
/// memory.
const MOST_NODES: usize = 1 << 16;
pub(super) const MOST_TOTAL: usize = 1 << 24;
/// Deepest nesting of repetitions.
const MOST_NESTING: usize = 4;
/// Most lines that are read, with those of each repetition: nested ones multiply.
const MOST_LINES: usize = 1 << 19;
/// Removing a path visits all nodes; this many nodes count as one line.
const NODES_OF_A_LINE: usize = 4;
/// Most bytes that the expansion of variables may produce, over all lines and repetitions.
const MOST_FILLED: usize = 4 * MOST_TOTAL;

/// A parsed tree.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    nodes: BTreeMap<String, Node>,
    folders: BTreeMap<String, BTreeSet<String>>,
    bytes: usize,
    lines: usize,
    filled: usize,
    /// A path that occurs again replaces its earlier entry.
    changes: bool,
}

#[derive(Debug)]
enum Node {
    File(Vec<u8>),
    Link(String),
    Denied,
}

/// Variables of a repetition: names and what they stand for.
type Row<'a> = Vec<(&'a str, String)>;

impl Recorded {
    /// Reads the format that `node/machine/trees/README.md` describes.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let lines: Vec<(usize, &str)> =
            text.lines().enumerate().map(|(n, line)| (n + 1, line)).collect();
        let mut tree = Self::default();
        tree.block(&lines, &Vec::new(), 0)?;
        Ok(tree)
    }

    /// Applies a text of the same format on top: a path that occurs again is replaced, and `path
    /// !gone` removes a file, a link or a whole folder.
    pub(super) fn change(&mut self, text: &str) -> Result<(), String> {
        let lines: Vec<(usize, &str)> =
            text.lines().enumerate().map(|(n, line)| (n + 1, line)).collect();
        self.changes = true;
        self.block(&lines, &Vec::new(), 0)
    }

    /// The tree that a text is written on top of: its line `@base FILE`.
    pub(super) fn base(text: &str) -> Option<&str> {
        text.lines().find_map(|line| line.trim().strip_prefix("@base ")).map(str::trim)
    }

    fn block(
        &mut self,
        lines: &[(usize, &str)],
        row: &Row<'_>,
        depth: usize,
    ) -> Result<(), String> {
        let mut at = 0;
        while let Some(&(number, line)) = lines.get(at) {
            at += 1;
            self.count(1).map_err(|why| on_line(number, &why))?;
            let trimmed = line.trim();
            if trimmed.is_empty() || trimmed.starts_with('#') {
                continue;
            }
            if self.changes && depth == 0 && trimmed.starts_with("@base ") {
                continue;
            }
            if let Some(header) = trimmed.strip_prefix("@each ") {
                let end = end_of_block(&lines[at..])
                    .ok_or(format!("line {number}: `@each` without `@end`"))?;
                if depth == MOST_NESTING {
                    return Err(format!("line {number}: `@each` nested too deeply"));
                }
                let body = &lines[at..at + end];
                self.count(end).map_err(|why| on_line(number, &why))?;
                let header = self.fill(header, row).map_err(|why| on_line(number, &why))?;
                for own in rows(&header).map_err(|why| on_line(number, &why))? {
                    self.count(1).map_err(|why| on_line(number, &why))?;
                    let own = own.iter().map(|(k, v)| (k.as_str(), v.clone()));
                    let row: Row<'_> = row.iter().cloned().chain(own).collect();
                    let bytes = row.iter().map(|(_, value)| value.len()).sum();
                    self.count_filled(bytes).map_err(|why| on_line(number, &why))?;
                    self.block(body, &row, depth + 1)?;
                }
                at += end + 1;
            } else if let Some((path, mark)) = trimmed.split_once(" << ") {
                let rest = &lines[at..];
                let end = rest
                    .iter()
                    .position(|(_, line)| line.trim() == mark)
                    .ok_or(format!("line {number}: no line `{mark}`"))?;
                let text: Vec<&str> = rest[..end].iter().map(|(_, line)| *line).collect();
                self.heredoc(path, &text.join("\n"), row).map_err(|why| on_line(number, &why))?;
                at += end + 1;
            } else {
                let line = self.fill(trimmed, row).map_err(|why| on_line(number, &why))?;
                self.line(&line).map_err(|why| on_line(number, &why))?;
            }
        }
        Ok(())
    }

    /// A file of several lines.
    fn heredoc(&mut self, path: &str, text: &str, row: &Row<'_>) -> Result<(), String> {
        let bytes = self.fill(text, row)?.into_bytes();
        let path = self.fill(path, row)?;
        self.add(&path, Node::File(bytes))
    }

    fn count(&mut self, lines: usize) -> Result<(), String> {
        self.lines = self.lines.saturating_add(lines);
        match self.lines > MOST_LINES {
            true => Err(format!("more than {MOST_LINES} lines, with those of repetitions")),
            false => Ok(()),
        }
    }

    fn count_filled(&mut self, bytes: usize) -> Result<(), String> {
        self.filled = self.filled.saturating_add(bytes);
        match self.filled > MOST_FILLED {
            true => Err(format!("variables make more than {MOST_FILLED} bytes")),
            false => Ok(()),
        }
    }

    /// Replaces each `{name}` by the row's value. The length of the result is checked before it is
    /// built.
    fn fill(&mut self, text: &str, row: &Row<'_>) -> Result<String, String> {
        let mut filled = text.to_owned();
        self.count_filled(text.len())?;
        for (name, value) in row {
            let variable = format!("{{{name}}}");
            let count = filled.matches(&variable).count();
            if count > 0 {
                self.count_filled(filled.len().saturating_add(count.saturating_mul(value.len())))?;
                filled = filled.replace(&variable, value);
            }
        }
        Ok(filled)
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        if let (Some(path), true) = (line.strip_suffix(" !gone"), self.changes) {
            return self.remove(path.trim());
        }
        if let Some(path) = line.strip_suffix(" !denied") {
            return self.add(path, Node::Denied);
        }
        if let Some(path) = line.strip_suffix(" =") {
            return self.add(path, Node::File(Vec::new()));
        }
        if let Some((path, target)) = line.split_once(" -> ") {
            return self.add(path, Node::Link(target.trim().to_owned()));
        }
        if let Some((path, bytes)) = line.split_once(" x= ") {
            return self.add(path, Node::File(sparse(bytes)?));
        }
        match line.split_once(" = ") {
            Some((path, text)) => self.add(path, Node::File(unescaped(text).into_bytes())),
            None => Err("expected `path = text`, `path -> target`, `path << MARK`, \
                         `path x= length offset:hex ...`, `path !denied` or `@each`"
                .into()),
        }
    }

    fn add(&mut self, path: &str, node: Node) -> Result<(), String> {
        let given = path.trim();
        if given.len() > 1024 || given.split('/').any(|step| matches!(step, "" | "." | "..")) {
            return Err(format!("`{given}` is no path from the root"));
        }
        let path = self.through_links(given)?;
        let steps: Vec<&str> = path.split('/').collect();
        self.bytes += path.len()
            + match &node {
                Node::File(bytes) => bytes.len(),
                Node::Link(target) => target.len(),
                Node::Denied => 0,
            };
        if self.nodes.len() >= MOST_NODES || self.bytes > MOST_TOTAL {
            return Err("the tree is too large".into());
        }
        for (depth, step) in steps.iter().enumerate() {
            let folder = steps[..depth].join("/");
            self.folders.entry(folder).or_default().insert((*step).to_owned());
        }
        match self.nodes.insert(path, node) {
            Some(_) if !self.changes => Err(format!("`{given}` stands there twice")),
            _ => Ok(()),
        }
    }

    fn remove(&mut self, given: &str) -> Result<(), String> {
        self.count(self.nodes.len() / NODES_OF_A_LINE)?;
        let path = self.through_links(given)?;
        let below = format!("{path}/");
        let before = self.nodes.len();
        self.nodes.retain(|node, _| *node != path && !node.starts_with(&below));
        if self.nodes.len() == before {
            return Err(format!("`{given}` is not there, so it cannot be gone"));
        }
        self.folders.clear();
        for node in self.nodes.keys() {
            let steps: Vec<&str> = node.split('/').collect();
            for (depth, step) in steps.iter().enumerate() {
                let folder = steps[..depth].join("/");
                self.folders.entry(folder).or_default().insert((*step).to_owned());
            }
        }
        Ok(())
    }

    /// The target of a path, with the links from earlier lines followed.
    fn through_links(&self, path: &str) -> Result<String, String> {
        let Some((folder, name)) = path.rsplit_once('/') else { return Ok(path.to_owned()) };
        let real = follow(folder, |path| match self.look(path) {
            Lookup::Missing => Lookup::Other,
            found => found,
        });
        match real.get() {
            Some(folder) if folder.is_empty() => Ok(name.to_owned()),
            Some(folder) => Ok(format!("{folder}/{name}")),
            None => Err(format!("the links of `{path}` run in a circle")),
        }
    }

    pub(super) fn look(&self, path: &str) -> Lookup {
        match self.nodes.get(path) {
            Some(Node::Link(target)) => Lookup::Link(target.clone()),
            Some(_) => Lookup::Other,
            None if self.folders.contains_key(path) => Lookup::Other,
            None => Lookup::Missing,
        }
    }

    pub(super) fn bytes(&self, path: &str) -> Fact<Vec<u8>> {
        match self.nodes.get(path) {
            Some(Node::File(bytes)) => Fact::Known(bytes.clone()),
            Some(Node::Denied) => Fact::Denied,
            _ => Fact::Missing,
        }
    }

    pub(super) fn names(&self, path: &str) -> Vec<String> {
        self.folders.get(path).map_or(Vec::new(), |names| names.iter().cloned().collect())
    }
}

fn on_line(number: usize, why: &str) -> String {
    format!("line {number}: {why}")
}

/// Lines until the `@end` of this block.
fn end_of_block(lines: &[(usize, &str)]) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, (_, line)) in lines.iter().enumerate() {
        let line = line.trim();
        if line.starts_with("@each ") {
            depth += 1;
        } else if line == "@end" {
            if depth == 0 {
                return Some(at);
            }
            depth -= 1;
        }
    }
    None
}

/// Rows of a header: `i = 0..7`, or `i bus = 0 18 | 1 2a`.
fn rows(header: &str) -> Result<Vec<Vec<(String, String)>>, String> {
    let (names, values) = header.split_once(" = ").ok_or("expected `@each names = rows`")?;
    let names: Vec<&str> = names.split_whitespace().collect();
    if let [name] = names[..]
        && let Some((first, last)) = values.trim().split_once("..")
    {
        let number = |text: &str| text.parse::<u16>().map_err(|_| format!("`{text}` is no number"));
        let (first, last) = (number(first)?, number(last)?);
        return Ok((first..=last).map(|n| vec![(name.to_owned(), n.to_string())]).collect());
    }
    values
        .split('|')
        .map(|row| {
            let row: Vec<&str> = row.split_whitespace().collect();
            if row.len() != names.len() {
                return Err(format!("{} names and the row `{}`", names.len(), row.join(" ")));
            }
            Ok(names.iter().zip(row).map(|(k, v)| ((*k).to_owned(), v.to_owned())).collect())
        })
        .collect()
}

/// `length offset:hex ...`, all in hexadecimal: bytes that are not given are zero.
fn sparse(text: &str) -> Result<Vec<u8>, String> {
    let number = |text: &str| {
        usize::from_str_radix(text, 16).map_err(|_| format!("`{text}` is no hexadecimal number"))
    };
    let mut words = text.split_whitespace();
    let length = number(words.next().unwrap_or_default())?;
    if length > 4096 {
        return Err("more than 1000 (hexadecimal) bytes".into());
    }
    let mut bytes = vec![0; length];
    for word in words {
        let (offset, digits) = word.split_once(':').ok_or(format!("`{word}` is no offset:hex"))?;
        let offset = number(offset)?;
        for (at, pair) in digits.as_bytes().chunks(2).enumerate() {
            let pair = std::str::from_utf8(pair).unwrap_or_default();
            let value = u8::from_str_radix(pair, 16).map_err(|_| format!("`{pair}` is no byte"))?;
            *bytes.get_mut(offset + at).ok_or(format!("`{word}` is beyond the end"))? = value;
        }
    }
    Ok(bytes)
}

/// `\n`, `\t`, `\0` and `\\` as in Rust.
fn unescaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('n') => out.push('\n'),
            Some('t') => out.push('\t'),
            Some('0') => out.push('\0'),
            Some(other) => out.push(other),
            None => out.push('\\'),
        }
    }
    out
}
