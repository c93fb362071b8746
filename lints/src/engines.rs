//! The engines of the kernel sets are made of four things, each small enough to be understood alone: routing,
//! places, order, launch. A thing has few fields, and its methods are in few files.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::path::{Path, PathBuf};

use syn::{Fields, Item, Type};

/// Fields of a thing, and files with its methods.
const MOST_FIELDS: usize = 12;
const MOST_FILES: usize = 3;

/// The folders of the kernel sets, and their four things.
const THINGS: &[(&str, [&str; 4])] = &[
    ("backends/cpu/src/kernels", ["RoutingTable", "Places", "SlotOrder", "Launcher"]),
    ("backends/gpu/src", ["RoutingTable", "Places", "StreamOrder", "Launcher"]),
];

/// The size of one type, and the files of a folder with methods of it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Thing {
    fields: usize,
    /// Files with an `impl` of it that has methods, by themselves or of a trait.
    files: Vec<String>,
}

/// All sources of a folder, and of those in it.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The last word of a type's path: `Order` of `super::order::Order`.
fn name_of(of: &Type) -> Option<String> {
    match of {
        Type::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
        _ => None,
    }
}

impl Thing {
    /// Adds what one source says of it.
    fn read(&mut self, name: &str, file: &str, text: &str) {
        let syntax = syn::parse_file(text).unwrap_or_else(|e| panic!("{file}: {e}"));
        let mut has_methods = false;
        for item in &syntax.items {
            match item {
                Item::Struct(item) if item.ident == name => {
                    self.fields += match &item.fields {
                        Fields::Named(fields) => fields.named.len(),
                        Fields::Unnamed(fields) => fields.unnamed.len(),
                        Fields::Unit => 0,
                    };
                }
                Item::Impl(item) if name_of(&item.self_ty).as_deref() == Some(name) => {
                    has_methods |= !item.items.is_empty();
                }
                _ => {}
            }
        }
        if has_methods {
            self.files.push(file.to_owned());
        }
    }
}

#[test]
fn each_of_the_four_things_of_an_engine_is_small_and_in_few_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (folder, things) in THINGS {
        let mut found = Vec::new();
        sources(&root.join(folder), &mut found);
        assert!(
            found.len() > 20,
            "{folder}: found {} sources; the search misses some",
            found.len()
        );
        for name in things {
            let mut thing = Thing::default();
            for path in &found {
                let file = path.file_name().unwrap().to_str().unwrap();
                thing.read(name, file, &std::fs::read_to_string(path).unwrap());
            }
            let small = (1..=MOST_FIELDS).contains(&thing.fields);
            let near = (1..=MOST_FILES).contains(&thing.files.len());
            assert!(
                small && near,
                "{folder}: found {name} with {thing:?}; expected at most {MOST_FIELDS} fields, and methods in \
                 at most {MOST_FILES} files. Move what belongs together to a type of its own"
            );
        }
    }
}

#[test]
fn fields_and_methods_of_a_thing_are_seen_and_those_of_others_are_not() {
    let text = "struct Order { a: u8, b: [u8; 2] }\nstruct Other { c: u8 }\nimpl Other { fn d() {} }\n\
                unsafe impl Send for Order {}";
    let mut thing = Thing::default();
    thing.read("Order", "order.rs", text);
    assert_eq!(thing, Thing { fields: 2, files: Vec::new() });
    thing.read("Order", "slots.rs", "impl super::order::Order { fn e() {} }");
    thing.read("Order", "drop.rs", "impl Drop for Order { fn drop(&mut self) {} }");
    thing.read("Order", "none.rs", "impl Border { fn f() {} }");
    assert_eq!(thing.files, ["slots.rs", "drop.rs"]);
}
