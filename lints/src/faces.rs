//! Core has two faces, and its page lists the modules of each: those for callers, and those for authors of components.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::collections::BTreeSet;

use crate::product;

/// How the list of each face begins in the documentation of core.
const FACES: [&str; 2] = ["- **Callers**", "- **Authors of components**"];

/// The modules that others may use.
fn public(text: &str) -> BTreeSet<&str> {
    let modules = text.lines().filter_map(|line| line.strip_prefix("pub mod "));
    modules.map(|rest| rest.trim_end_matches([';', ' ', '{'])).collect()
}

/// The modules that a list names, in order.
fn listed<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    let lines = text.lines().map_while(|line| line.strip_prefix("//!").map(str::trim));
    let of_list = lines.skip_while(|line| !line.starts_with(start));
    let of_list = of_list
        .take_while(|line| line.starts_with(start) || !(line.is_empty() || line.starts_with("- ")));
    let names = of_list.flat_map(|line| line.split("[`").skip(1));
    names.filter_map(|rest| rest.split_once("`]").map(|(name, _)| name)).collect()
}

#[test]
fn each_public_module_of_core_belongs_to_one_of_its_two_faces() {
    let text = std::fs::read_to_string(product::root().join("core/src/lib.rs")).unwrap();
    let lists = FACES.map(|start| listed(&text, start));
    let named: Vec<&str> = lists.iter().flatten().copied().collect();
    let of_core = public(&text);
    assert!(of_core.len() > 20, "found {} modules; the search misses some", of_core.len());
    for module in &of_core {
        let times = named.iter().filter(|name| *name == module).count();
        assert_eq!(
            times, 1,
            "`{module}` is in {times} places of the lists in core/src/lib.rs; expected one"
        );
    }
    let reexported = |name: &str| text.contains(&format!(" as {name};"));
    let gone: Vec<_> =
        named.iter().filter(|name| !of_core.contains(*name) && !reexported(name)).collect();
    assert!(gone.is_empty(), "modules in the lists that core does not have: {gone:?}");
}

#[test]
fn lists_end_at_the_next_item_and_modules_are_seen() {
    let text = "//! - **Callers** use [`a`], with [`b`]\n//!   and [`c`].\n//! - **Others** [`d`].\n//!\n//! [`e`]\n\n\
                pub mod a;\nmod b;\npub mod c {\n// pub mod d;\n";
    assert_eq!(listed(text, "- **Callers**"), ["a", "b", "c"]);
    assert_eq!(listed(text, "- **Others**"), ["d"]);
    assert_eq!(public(text), BTreeSet::from(["a", "c"]));
}
