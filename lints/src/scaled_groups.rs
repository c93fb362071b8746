//! The number of channels that share a scale stands once on the host, and once in the kernels; Python has the host's.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use crate::product;

/// Where it stands, and the text before it. The oracle and the model of the kernels have it by themselves, so that what
/// they expect does not come from the code that they test.
const PLACES: [(&str, &str); 4] = [
    ("core/src/moe/quant.rs", "\nconst GROUP: u32 = "),
    ("backends/gpu/device/codec/quant.cuh", "\nconstexpr u32 kGroup = "),
    ("conformance/src/moe/oracle/case.rs", "\npub const GROUP: usize = "),
    ("backends/gpu/tests/model/casts.h", "\nconstexpr unsigned kScaled = "),
];

/// The formats of kernels.
const FORMATS: &str = "device/codec/quant.cuh";

/// The number behind a text that occurs once.
fn number_behind(text: &str, before: &str) -> Option<u32> {
    let (_, rest) = text.split_once(before).filter(|(_, rest)| !rest.contains(before))?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[test]
fn as_many_channels_share_a_scale_on_the_host_and_in_kernels() {
    let root = product::root();
    let found = PLACES.map(|(file, before)| {
        (file, number_behind(&std::fs::read_to_string(root.join(file)).unwrap(), before))
    });
    let first = found[0].1;
    assert!(first.is_some() && found.iter().all(|(_, n)| *n == first), "{found:?}");
}

/// The files of `files` that say the number by its name in kernels, which the file of formats alone may.
fn that_name_it(files: Vec<(String, String)>) -> Vec<String> {
    let names_it = |text: &str| {
        text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "kGroup")
    };
    let others = files.into_iter().filter(|(file, _)| !file.ends_with(FORMATS));
    others.filter(|(_, text)| names_it(text)).map(|(file, _)| file).collect()
}

#[test]
fn kernels_take_the_number_from_a_format() {
    let files = product::files(&["backends", "standins"], &["cu", "cuh", "h", "cpp"]);
    assert!(files.iter().any(|(file, _)| file.ends_with(FORMATS)));
    assert_eq!(that_name_it(files), [""; 0]);
    let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let known = vec![file("a.cuh", "at / kGroup;"), file("b.cuh", "kGroupLanes<Q>")];
    assert_eq!(that_name_it(known), ["a.cuh"]);
}

#[test]
fn a_number_that_is_missing_or_stands_twice_is_noticed() {
    assert_eq!(number_behind("\nN = 128;\n", "\nN = "), Some(128));
    assert_eq!(number_behind("\nM = 128;\n", "\nN = "), None);
    assert_eq!(number_behind("\nN = 128;\nN = 64;\n", "\nN = "), None);
}
