//! The items of the header, `abi/include/tokenyard_plugin.h`, that transports see: constants, structures and fields.
//!
//! Transports see the structures that are reached from `TyTransportExport`, by the types of fields and of slots. They
//! see all constants but those of other components. A constant is of others if it has their name (`TY_KERNELS_`,
//! `TY_TOPOLOGY_`), if its comment names one of their structures, or if a comment or an array of theirs names it.
//! It is not of others if a structure that transports see names it as well, or an example in C uses it. The
//! statuses in [`OF_ALL`] are of all components.

use std::collections::{BTreeMap, BTreeSet};

const HEADER: &str = include_str!("../../../abi/include/tokenyard_plugin.h");
/// The sources of the examples: of `shm.c`, then of `sockets.c` and its files.
pub(crate) const EXAMPLES: [&str; 4] = [
    include_str!("../../../plugins/example-c/shm.c"),
    include_str!("../../../plugins/example-c/sockets.h"),
    include_str!("../../../plugins/example-c/sockets_io.c"),
    include_str!("../../../plugins/example-c/sockets.c"),
];
/// The structure from which a transport sees all others.
const ROOT: &str = "TyTransportExport";
/// The beginnings of constants of the other kinds of components.
const OTHER_KINDS: [&str; 2] = ["TY_KERNELS_", "TY_TOPOLOGY_"];

/// Statuses that comments of other components name, and that transports return.
const OF_ALL: [&str; 2] = ["TY_REFUSED", "TY_MISMATCH"];

/// A constant, a structure, or a field.
pub(crate) struct Item {
    pub(crate) name: String,
    pub(crate) comment: String,
    kind: Kind,
    /// Its line of code; the first one of a slot.
    pub(crate) code: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Constant,
    Structure,
    Field,
}

impl Item {
    pub(crate) fn is_structure(&self) -> bool {
        self.kind == Kind::Structure
    }

    /// The structure that it is, or is a field of.
    fn structure(&self) -> &str {
        self.name.split('.').next().unwrap()
    }
}

/// The comment in front of all items, which has the rules for every slot.
pub(crate) fn rules() -> &'static str {
    let (_, rules) = HEADER.split_once("Rules that hold for every slot:").unwrap();
    rules.split("*/").next().unwrap()
}

/// The items that transports see.
pub(crate) fn items() -> Vec<Item> {
    let (items, bodies) = read();
    let seen = reached(&bodies);
    let sees = |item: &Item| seen.contains(item.structure());
    let (mut ours, mut theirs) = (BTreeSet::new(), BTreeSet::new());
    for item in items.iter().filter(|item| item.kind != Kind::Constant) {
        let named = [&item.comment, &item.code].map(|text| constants_in(text));
        if sees(item) { &mut ours } else { &mut theirs }.extend(named.concat());
    }
    ours.extend(EXAMPLES.iter().flat_map(|code| constants_in(code)));
    let is_of_others = |item: &Item| {
        let of_kind = OTHER_KINDS.iter().any(|start| item.name.starts_with(start));
        let mut structures = words(&item.comment).filter(|word| bodies.contains_key(*word));
        let named = of_kind || structures.any(|word| !seen.contains(word));
        (named || is_named(&item.name, &theirs))
            && !is_named(&item.name, &ours)
            && !OF_ALL.contains(&item.name.as_str())
    };
    let kept =
        |item: &Item| if item.kind == Kind::Constant { !is_of_others(item) } else { sees(item) };
    let kept: Vec<bool> = items.iter().map(kept).collect();
    items.into_iter().zip(kept).filter_map(|(item, kept)| kept.then_some(item)).collect()
}

/// The structures that are reached from the root.
fn reached(bodies: &BTreeMap<String, String>) -> BTreeSet<&str> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![ROOT]);
    while let Some(name) = next.pop() {
        if let Some((name, body)) = bodies.get_key_value(name)
            && seen.insert(name.as_str())
        {
            next.extend(words(body));
        }
    }
    seen
}

/// All items, and the code of each structure.
fn read() -> (Vec<Item>, BTreeMap<String, String>) {
    let (mut items, mut bodies) = (Vec::new(), BTreeMap::<String, String>::new());
    let (mut comment, mut in_comment, mut structure) = (String::new(), false, None);
    for line in HEADER.lines() {
        let text = line.trim();
        if text.starts_with("/*") {
            comment.clear();
            in_comment = true;
        }
        if in_comment {
            in_comment = !text.ends_with("*/");
            comment += text.trim_end_matches("*/").trim_start_matches(['/', '*']);
            comment += " ";
            continue;
        }
        if line.starts_with('}') {
            structure = None;
        }
        let opened = line.strip_prefix("typedef struct ").and_then(|rest| rest.strip_suffix(" {"));
        let found = if let Some(name) = opened {
            structure = Some(name);
            Some((name.to_owned(), Kind::Structure))
        } else if let Some(structure) = structure {
            *bodies.entry(structure.to_owned()).or_default() += &format!("{line}\n");
            field(line).map(|field| (format!("{structure}.{field}"), Kind::Field))
        } else {
            constant(line).map(|name| (name.to_owned(), Kind::Constant))
        };
        if let Some((name, kind)) = found {
            let code = line.to_owned();
            items.push(Item { name, comment: std::mem::take(&mut comment), kind, code });
        }
    }
    (items, bodies)
}

/// The constant that a line defines. Macros without a number are none.
fn constant(line: &str) -> Option<&str> {
    let (name, value) = line.strip_prefix("#define ")?.split_once(' ')?;
    value.starts_with(|c: char| c.is_ascii_digit() || "-(U".contains(c)).then_some(name)
}

/// The field that a line declares: it stands two spaces in. Deeper lines are arguments of a slot, or a comment.
fn field(line: &str) -> Option<&str> {
    let declares = |rest: &&str| rest.starts_with(|c: char| c.is_ascii_lowercase() || c == 'T');
    let field = line.strip_prefix("  ").filter(declares)?;
    let name = match field.split_once("(*") {
        Some((_, slot)) => slot.split(')').next(),
        None => field.trim_end_matches(';').split([' ', '*']).next_back(),
    };
    name?.split('[').next()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

/// The constants that a text names; those that end with `*` are beginnings.
fn constants_in(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && !"_*".contains(c));
    words.filter(|word| word.starts_with("TY_")).map(str::to_owned).collect()
}

fn is_named(name: &str, named: &BTreeSet<String>) -> bool {
    named.iter().any(|one| match one.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == one,
    })
}

#[test]
fn transports_see_what_their_export_reaches_and_no_constant_of_others() {
    let names: BTreeSet<String> = items().into_iter().map(|item| item.name).collect();
    for seen in [
        "TyTransportTable.commit",
        "TyGpuRingCommand.sequence",
        "TyPeerCounters.posted",
        "TyStr.data",
        "TY_CAP_GET",
        "TY_DIALECT_HIP",
        "TY_COMPILER_NVCC",
        "TY_DEVICE_API_LOAD_STORE",
        "TY_MAX_WINDOWS",
        "TY_LOG_WARN",
    ] {
        assert!(names.contains(seen), "{seen}: {names:#?}");
    }
    for other in
        ["TyKernelsTable.plan", "TyPlace.host", "TY_CAST_FP8", "TY_PHASE_ROWS", "TY_EXCHANGE_RAIL"]
    {
        assert!(!names.contains(other), "{other}");
    }
}
