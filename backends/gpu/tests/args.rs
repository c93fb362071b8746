//! Host and kernels agree on the arguments of kernels: every field of an `args.rs` is one of an `args.cuh`,
//! with the same name, type and place.

// A test may panic.
#![allow(clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

const HOST: [&str; 5] = [
    include_str!("../src/engine/args.rs"),
    include_str!("../src/moe/args.rs"),
    include_str!("../src/probe/args.rs"),
    include_str!("../src/probe/ring.rs"),
    include_str!("../src/ops/table/args.rs"),
];
const DEVICE: [&str; 8] = [
    include_str!("../device/moe/moe_args.cuh"),
    include_str!("../device/common/args.cuh"),
    include_str!("../device/decode/decode_args.cuh"),
    include_str!("../device/moe/copies.cuh"),
    include_str!("../device/common/transport.cuh"),
    include_str!("../src/probe/probe.cu"),
    include_str!("../src/probe/ring.cu"),
    include_str!("../device/ops/table.cu"),
];

/// A field: its name and its type, a pointer as the number that the host passes.
type Field = (String, String);
type Structs = BTreeMap<String, Vec<Field>>;

/// The words of structures that the two sides name differently.
fn common_name(name: &str) -> &str {
    match name {
        "c" => "common",
        "r" => "routing",
        name => name,
    }
}

/// The structures of Rust source with a C layout.
fn of_rust(text: &str) -> Structs {
    let mut all = Structs::new();
    for scope in text.split("#[repr(C)]").skip(1) {
        let (head, body) = scope.split_once('{').expect("a structure");
        let name = head.split_whitespace().last().expect("a name");
        let (body, _) = body.split_once("\n}").expect("its end");
        let fields = body.lines().filter_map(|line| line.split_once(": "));
        let fields = fields.map(|(name, kind)| {
            let name = name.split_whitespace().last().expect("a name").to_owned();
            (name, kind.trim_end_matches(',').replace("TEXT", "192"))
        });
        all.insert(name.to_owned(), fields.collect());
    }
    all
}

/// The structures of device code, without their functions.
fn of_device(text: &str) -> Structs {
    let mut all = Structs::new();
    for scope in text.split("\nstruct ").skip(1) {
        let Some((name, body)) = scope.split_once(" {\n") else { continue };
        let (body, _) = body.split_once("\n};").expect("its end");
        // Functions follow the fields.
        let lines = body.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code));
        let lines = lines.map(str::trim).filter(|line| !line.is_empty());
        let mut fields = Vec::new();
        for line in lines.take_while(|line| line.ends_with(';')) {
            let line = line.trim_end_matches(';').trim_start_matches("const ");
            let (kind, names) = line.split_once(' ').expect("a type and names");
            for name in names.split(',').map(str::trim) {
                fields.push(field(kind, name));
            }
        }
        all.insert(name.to_owned(), fields);
    }
    all
}

fn field(kind: &str, name: &str) -> Field {
    let kind = match kind {
        // The host passes codes: `region.rs` compares them.
        "Layout" | "Cast" | "DType" => "u32",
        pointer if pointer.ends_with('*') => "u64",
        kind => kind,
    };
    match name.split_once('[') {
        None => (common_name(name).to_owned(), kind.to_owned()),
        Some((name, count)) => {
            let count = count.trim_end_matches(']').replace("kTextBytes", "192");
            (name.to_owned(), format!("[{kind}; {count}]"))
        }
    }
}

#[test]
fn every_field_of_the_host_is_one_of_the_kernels_in_the_same_place() {
    let host: Structs = HOST.iter().flat_map(|text| of_rust(text)).collect();
    let device: Structs = DEVICE.iter().flat_map(|text| of_device(text)).collect();
    assert!(host.len() > 12, "found {} structures; the file has another form", host.len());
    for (name, fields) in &host {
        let theirs = device.get(name).unwrap_or_else(|| panic!("the kernels have no {name}"));
        assert!(!fields.is_empty() && fields == theirs, "{name}: {fields:?} and {theirs:?}");
    }
}

#[test]
fn fields_that_change_places_are_noticed() {
    let moved = DEVICE[0].replace("  u32 stages;           // pieces in flight of one warp\n", "");
    assert_ne!(moved, DEVICE[0]);
    let (before, after) = (of_device(DEVICE[0]), of_device(&moved));
    assert_ne!(before["DispatchArgs"], after["DispatchArgs"]);
}
