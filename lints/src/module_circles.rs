//! Modules build on each other, and not in large circles: where files all import each other, none of them
//! can be understood, tested or changed alone. At most two circles of the workspace have more than eight
//! files. The test counts `use` lines, re-exports included, and paths that are written out in code.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, Meta, UseTree};

/// Most files of a circle that needs no reason.
const FREE: usize = 8;

/// Circles with more files: the crate's folder, and the reason. Two at most.
const ALLOWED: &[(&str, &str)] = &[
    (
        "bench",
        "a job is one of all scenarios and an output that of one of them, and each scenario takes its \
         sizes from a job and its figures out of an output",
    ),
    (
        "core",
        "`host` drives components through tables, and `export` makes these tables. Both write and read errors \
         and the log in the same way, components that wrap others reach the host's tables again, and links read \
         the status of a call as the host does",
    ),
];

/// Folders that hold no crates of the workspace.
const NO_CRATES: [&str; 4] = ["target", "fuzz", "docs", "configs"];

/// A module's path in its crate; the root's is empty.
type Name = Vec<String>;

/// A module: its file, and what it imports.
#[derive(Default)]
struct Module {
    file: PathBuf,
    /// Names that a `use` line defines, and the path of each; `*` stands for all names of a module. The name of
    /// a path in code is empty.
    names: Vec<(String, Name)>,
}

/// The modules of one crate, without its tests.
#[derive(Default)]
struct Crate(BTreeMap<Name, Module>);

/// True if an item is compiled for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) => {
            list.path.is_ident("cfg") && list.tokens.to_string().split(' ').next() == Some("test")
        }
        Meta::Path(path) => path.is_ident("test"),
        Meta::NameValue(_) => false,
    })
}

/// All paths in a `use` line, each with the name that it defines.
fn leaves(tree: &UseTree, before: &[String], found: &mut Vec<(String, Name)>) {
    let on = |segment: &syn::Ident| [before, &[segment.to_string()]].concat();
    match tree {
        UseTree::Path(path) => leaves(&path.tree, &on(&path.ident), found),
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, before, found)),
        UseTree::Glob(_) => found.push(("*".into(), before.to_vec())),
        UseTree::Name(name) if name.ident == "self" => {
            found.push((before.last().cloned().unwrap_or_default(), before.to_vec()));
        }
        UseTree::Name(name) => found.push((name.ident.to_string(), on(&name.ident))),
        UseTree::Rename(rename) => found.push((rename.rename.to_string(), on(&rename.ident))),
    }
}

/// Reads the modules of a file, and of the files that it declares as modules.
struct Reader<'c> {
    modules: &'c mut Crate,
    /// The module that the reader is in.
    at: Name,
    /// Where the files of its child modules are.
    folder: PathBuf,
}

impl Reader<'_> {
    /// Reads a module in a file of its own.
    fn read(&mut self, file: PathBuf) {
        let text = std::fs::read_to_string(&file).unwrap();
        let syntax = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        self.modules.0.insert(self.at.clone(), Module { file, ..Module::default() });
        self.visit_file(&syntax);
    }
}

impl<'a> Visit<'a> for Reader<'_> {
    fn visit_item(&mut self, item: &'a Item) {
        let attributes = match item {
            Item::Mod(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Const(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'a ItemMod) {
        let name = item.ident.to_string();
        let (at, folder) = (self.at.clone(), self.folder.clone());
        self.at.push(name.clone());
        self.folder.push(&name);
        if item.content.is_some() {
            let file = self.modules.0[&at].file.clone();
            self.modules.0.insert(self.at.clone(), Module { file, ..Module::default() });
            visit::visit_item_mod(self, item);
        } else {
            let files = [folder.join(format!("{name}.rs")), folder.join(&name).join("mod.rs")];
            if let Some(file) = files.into_iter().find(|file| file.exists()) {
                self.read(file);
            }
        }
        (self.at, self.folder) = (at, folder);
    }

    fn visit_visibility(&mut self, _: &'a syn::Visibility) {
        // `pub(in super::super)` says who may use an item, and imports nothing.
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        if names.len() > 1 && ["crate", "super", "self"].contains(&names[0].as_str()) {
            self.modules.0.get_mut(&self.at).unwrap().names.push((String::new(), names));
        }
        visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        let mut found = Vec::new();
        leaves(&item.tree, &[], &mut found);
        let module = self.modules.0.get_mut(&self.at).unwrap();
        module.names.extend(found);
    }
}

impl Crate {
    /// Reads a crate from its root, `src/lib.rs` or `src/main.rs`.
    fn read(root: PathBuf) -> Self {
        let mut modules = Self::default();
        let folder = root.parent().unwrap().to_path_buf();
        Reader { modules: &mut modules, at: Vec::new(), folder }.read(root);
        modules
    }

    /// The module that defines what a path names, as seen in a module; none for a path of another
    /// crate. Re-exported names are followed to their definition.
    fn find(&self, module: &Name, path: &[String], depth: usize) -> Option<&Module> {
        let mut at = module.clone();
        for (i, segment) in path.iter().enumerate() {
            match (segment.as_str(), i) {
                ("crate", 0) => at.clear(),
                ("self", 0) => {}
                ("super", _) => drop(at.pop()),
                _ => {
                    at.push(segment.clone());
                    if self.0.contains_key(&at) {
                        continue;
                    }
                    at.pop();
                    let handed_on = self.find_name(&at, segment, &path[i + 1..], depth);
                    let is_local = matches!(path[0].as_str(), "crate" | "self" | "super") || i > 0;
                    return handed_on.or_else(|| is_local.then(|| self.0.get(&at)).flatten());
                }
            }
        }
        self.0.get(&at)
    }

    /// Follows a name through the `use` lines of a module.
    fn find_name(&self, at: &Name, name: &str, rest: &[String], depth: usize) -> Option<&Module> {
        let depth = depth.checked_sub(1)?;
        let uses = self.0.get(at)?.names.iter().filter(|(known, _)| known == name);
        uses.filter(|(_, path)| path != &[name])
            .find_map(|(_, path)| self.find(at, &[path.as_slice(), rest].concat(), depth))
    }

    /// By file, the files that it imports from.
    fn imports(&self) -> BTreeMap<&Path, BTreeSet<&Path>> {
        let mut imports: BTreeMap<&Path, BTreeSet<&Path>> = BTreeMap::new();
        for (name, module) in &self.0 {
            let of_file = imports.entry(&module.file).or_default();
            let found = module.names.iter().filter_map(|(_, path)| self.find(name, path, 8));
            of_file.extend(found.map(|other| other.file.as_path()));
            of_file.remove(module.file.as_path());
        }
        imports
    }

    /// Files that all import each other, directly or not; the largest circle first.
    fn circles(&self) -> Vec<BTreeSet<&Path>> {
        let imports = self.imports();
        let reached = |from: &Path| {
            let mut found = BTreeSet::new();
            let mut left: Vec<&Path> = imports[from].iter().copied().collect();
            while let Some(file) = left.pop() {
                if found.insert(file) {
                    left.extend(&imports[file]);
                }
            }
            found
        };
        let reach: BTreeMap<&Path, BTreeSet<&Path>> =
            imports.keys().map(|file| (*file, reached(file))).collect();
        let circle = |file: &&Path| -> BTreeSet<&Path> {
            reach[file].iter().copied().filter(|other| reach[other].contains(file)).collect()
        };
        let found: BTreeSet<_> = reach.keys().map(circle).filter(|files| files.len() > 1).collect();
        let mut found: Vec<_> = found.into_iter().collect();
        found.sort_by_key(|files| std::cmp::Reverse(files.len()));
        found
    }
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// The roots of all crates below a folder.
fn roots(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !path.is_dir() || name.starts_with('.') || NO_CRATES.contains(&name) {
            continue;
        }
        if name == "src" {
            let roots = ["lib.rs", "main.rs"].map(|root| path.join(root));
            found.extend(roots.into_iter().filter(|root| root.exists()));
        } else {
            roots(&path, found);
        }
    }
}

/// Circles of more than `most` files, by the folder of their crate.
fn circles_of_more_than(most: usize) -> Vec<(String, Vec<String>)> {
    let root = workspace();
    let mut crates = Vec::new();
    roots(&root, &mut crates);
    crates.sort();
    assert!(crates.len() > 25, "found {} crates; the search misses some", crates.len());
    let mut found = Vec::new();
    for path in crates {
        let source = path.parent().unwrap();
        let folder = source.parent().unwrap().strip_prefix(&root).unwrap();
        let modules = Crate::read(path.clone());
        for circle in modules.circles().into_iter().filter(|circle| circle.len() > most) {
            let names = circle.iter().map(|file| file.strip_prefix(source).unwrap());
            let names = names.map(|name| name.to_str().unwrap().to_owned()).collect();
            found.push((folder.to_str().unwrap().to_owned(), names));
        }
    }
    found
}

#[test]
fn at_most_two_circles_of_modules_are_large_and_each_is_argued() {
    assert!(ALLOWED.len() <= 2, "{} large circles are allowed; two at most", ALLOWED.len());
    let found = circles_of_more_than(FREE);
    let folders: Vec<&str> = found.iter().map(|(folder, _)| folder.as_str()).collect();
    let allowed: Vec<&str> = ALLOWED.iter().map(|(folder, _)| *folder).collect();
    let text: Vec<String> = found
        .iter()
        .map(|(folder, files)| format!("{folder}: {} files: {}", files.len(), files.join(", ")))
        .collect();
    assert_eq!(
        folders,
        allowed,
        "crates with a circle of more than {FREE} files that import each other, and crates that may \
         have one (ALLOWED in this test, with the reason). Move the items that several files share to \
         a file that imports none of them:\n{}",
        text.join("\n")
    );
}

/// The circles of a crate of these files.
fn circles_in(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let modules = Crate::read(folder.path().join("lib.rs"));
    let name = |file: &&Path| file.strip_prefix(folder.path()).unwrap().display().to_string();
    modules.circles().iter().map(|circle| circle.iter().map(name).collect()).collect()
}

#[test]
fn a_circle_through_super_through_crate_and_through_a_name_that_is_handed_on_is_seen() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "use super::b::B; pub struct A;"),
        ("b/mod.rs", "mod inner; pub use inner::B;"),
        ("b/inner.rs", "fn f() { use crate::c::g; g(); } pub struct B;"),
        ("c.rs", "pub fn g() { use crate::a::{self, A}; }"),
    ];
    assert_eq!(circles_in(&files), [["a.rs", "b/inner.rs", "c.rs"]]);
}

#[test]
fn a_child_that_uses_what_its_parent_defines_and_the_other_way_round_is_a_circle() {
    let files = [
        ("lib.rs", "mod a; use a::A; pub struct Root;"),
        ("a.rs", "use crate::Root; pub struct A;"),
    ];
    assert_eq!(circles_in(&files), [["a.rs", "lib.rs"]]);
}

#[test]
fn a_path_in_code_counts_and_that_of_a_visibility_does_not() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "pub fn f() -> crate::b::B { crate::b::B }"),
        ("b.rs", "pub struct B; fn g() { super::a::f(); }"),
        ("c.rs", "pub(in crate::c) fn h() { crate::a::f(); }"),
    ];
    assert_eq!(circles_in(&files), [["a.rs", "b.rs"]]);
    // `a` may be used by its parent alone, and uses nothing of it.
    let files = [("lib.rs", "mod a; use a::A;"), ("a.rs", "pub(in super) struct A;")];
    assert!(circles_in(&files).is_empty(), "{:?}", circles_in(&files));
}

#[test]
fn tests_other_crates_and_modules_that_are_only_declared_make_no_circle() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use super::b::B; use serde::b; pub struct A;"),
        ("b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::a::A; }"),
    ];
    assert!(circles_in(&files).is_empty(), "{:?}", circles_in(&files));
}
