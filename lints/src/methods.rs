//! A type is understood where it stands: its methods are in few files. A type with more of them is several types.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::collections::{BTreeMap, BTreeSet};

use crate::product;

/// Files with methods of one type.
const MOST_FILES: usize = 3;

/// Where types are defined, and where they have methods, in one crate: files by name of the type.
#[derive(Debug, Default)]
struct Found {
    definitions: BTreeMap<String, Vec<String>>,
    methods: BTreeMap<String, BTreeSet<String>>,
}

/// An item that begins at a line of a formatted source.
#[derive(Debug, PartialEq, Eq)]
enum Begins<'a> {
    Definition(&'a str),
    /// Methods of a type itself. Those of a trait belong to the trait, which may stand anywhere.
    Methods(&'a str),
}

/// The name at the start of a text, without a path before it and generics behind it.
fn name_of(text: &str) -> Option<&str> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let path = text.split(|c| !is_part(c)).next().unwrap_or_default();
    path.rsplit("::").next().filter(|name| !name.is_empty())
}

/// A text behind the generics that it starts with.
fn behind_generics(text: &str) -> &str {
    let mut depth = 0;
    let end = text.char_indices().find(|(at, c)| {
        let is_arrow = *c == '>' && text[..*at].ends_with('-');
        depth += i32::from(*c == '<') - i32::from(*c == '>' && !is_arrow);
        depth == 0
    });
    end.map_or("", |(at, c)| text[at + usize::from(c == '>')..].trim_start())
}

fn begins(line: &str) -> Option<Begins<'_>> {
    let line = line.trim_start();
    if let Some(rest) = line.strip_prefix("impl").filter(|rest| rest.starts_with([' ', '<'])) {
        let of = behind_generics(rest.trim_start());
        let has_methods = !line.contains(" for ") && !line.ends_with("{}");
        return name_of(of).filter(|_| has_methods).map(Begins::Methods);
    }
    let open = line.strip_prefix("pub").map_or(line, |rest| match rest.strip_prefix('(') {
        Some(inside) => inside.split_once(") ").map_or("", |(_, rest)| rest),
        None => rest.trim_start(),
    });
    let kinds = ["struct ", "enum ", "union "];
    let name = kinds.iter().find_map(|kind| open.strip_prefix(kind)).and_then(name_of);
    name.map(Begins::Definition)
}

impl Found {
    fn read(&mut self, file: &str, text: &str) {
        let mut is_test = false;
        for line in product::lines(text) {
            match begins(line).filter(|_| !is_test) {
                Some(Begins::Definition(name)) => {
                    self.definitions.entry(name.to_owned()).or_default().push(file.to_owned());
                }
                Some(Begins::Methods(name)) => {
                    self.methods.entry(name.to_owned()).or_default().insert(file.to_owned());
                }
                None => {}
            }
            is_test = line.trim() == "#[cfg(test)]";
        }
    }

    /// The files with methods of each type, by its name and the file of its definition. Of several types of one name,
    /// methods belong to the one that is defined nearest to them.
    fn by_type(&self) -> BTreeMap<(String, String), BTreeSet<String>> {
        let mut all: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
        for (name, files) in &self.methods {
            let Some(definitions) = self.definitions.get(name) else { continue };
            for file in files {
                let near = |definition: &&String| shared(definition, file);
                let nearest = definitions.iter().max_by_key(near).unwrap();
                let key = (nearest.clone(), name.clone());
                all.entry(key).or_default().insert(file.clone());
            }
        }
        all
    }
}

/// Letters that two paths have in common at their start.
fn shared(a: &str, b: &str) -> usize {
    a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count()
}

/// The folder of a source's crate.
fn crate_of(file: &str) -> &str {
    file.split_once("/src/").map_or(file, |(folder, _)| folder)
}

#[test]
fn no_type_has_methods_in_more_than_a_few_files() {
    let mut crates: BTreeMap<String, Found> = BTreeMap::new();
    let sources = product::sources().into_iter().chain(product::files(&["standins"], &["rs"]));
    for (file, text) in sources {
        crates.entry(crate_of(&file).to_owned()).or_default().read(&file, &text);
    }
    let mut found: Vec<_> = Vec::new();
    for ((file, name), files) in crates.values().flat_map(Found::by_type) {
        if files.len() > MOST_FILES {
            found.push((file, name, files.len()));
        }
    }
    assert!(
        found.is_empty(),
        "types with methods in more than {MOST_FILES} files: {found:?}. Move what belongs together to a type of its \
         own"
    );
}

#[test]
fn methods_belong_to_the_nearest_type_of_their_name_and_tests_and_traits_do_not_count() {
    let mut found = Found::default();
    let mut read = |file, text| found.read(file, text);
    read("a/src/order/mod.rs", "pub(crate) struct Order<'a> {\nimpl<'a> Order<'a> {");
    read("a/src/order/slots.rs", "impl<F: Fn() -> u8> super::order::Order<F> {");
    read("a/src/order/empty.rs", "impl Order {}");
    read("a/src/order/drop.rs", "impl Drop for Order {\n    fn drop(&mut self) {}\n}");
    read("a/src/order/test.rs", "#[cfg(test)]\nimpl Order {");
    read("a/src/queue.rs", "enum Order {\nmod inside {\n    impl Order {");
    read("a/src/border.rs", "impl Border {\nimplement!();");
    let of = |file: &str| found.by_type().get(&(file.to_owned(), "Order".to_owned())).cloned();
    let files = |files: &[&str]| Some(files.iter().map(|file| (*file).to_owned()).collect());
    assert_eq!(of("a/src/order/mod.rs"), files(&["a/src/order/mod.rs", "a/src/order/slots.rs"]));
    assert_eq!(of("a/src/queue.rs"), files(&["a/src/queue.rs"]));
}
