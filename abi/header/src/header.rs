//! The C header of the plugin ABI, generated from the crate `abi`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use cbindgen::Config;

const ABI: &str = "abi";
const HEADER: &str = "abi/include/tokenyard_plugin.h";

/// Writes the header.
pub(crate) fn write(root: &Path) -> Result<()> {
    let path = root.join(HEADER);
    let text = generate(&root.join(ABI))?;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    }
    fs::write(&path, text).with_context(|| format!("write {HEADER}"))?;
    println!("wrote {HEADER}");
    Ok(())
}

/// Checks that the header equals the text that [`write()`] would write.
pub(crate) fn check(root: &Path) -> Result<()> {
    let found = fs::read_to_string(root.join(HEADER))
        .with_context(|| format!("read {HEADER}; `cargo xtask header` writes it"))?;
    let expected = generate(&root.join(ABI))?;
    if let Some(difference) = first_difference(&found, &expected) {
        anyhow::bail!("{HEADER} is out of date; run `cargo xtask header`. {difference}");
    }
    println!("{HEADER} is up to date");
    Ok(())
}

fn first_difference(found: &str, expected: &str) -> Option<String> {
    let (mut have, mut want) = (found.split('\n'), expected.split('\n'));
    for number in 1.. {
        let (found, expected) = (have.next(), want.next());
        if found != expected {
            let show =
                |line: Option<&str>| line.map_or("the end".into(), |line| format!("`{line}`"));
            let (found, expected) = (show(found), show(expected));
            return Some(format!("Line {number}: found {found}, expected {expected}"));
        }
        found?;
    }
    None
}

fn generate(abi: &Path) -> Result<String> {
    let names = public_names(&abi.join("src"))?;
    let types = names.iter().filter(|name| !is_constant(name)).cloned().collect();
    let mut bytes = Vec::new();
    cbindgen::Builder::new()
        .with_config(config(abi, types)?)
        .with_crate(abi)
        .generate()
        .with_context(|| format!("generate the C header from {}", abi.display()))?
        .write(&mut bytes);
    let text = String::from_utf8(bytes).context("generate the C header: it is not UTF-8")?;
    // cbindgen silently leaves out items that it cannot express.
    for name in &names {
        ensure!(
            defines(&text, name),
            "generate the C header: `{name}` of {} is not in it; write it so that C can say it \
             (a literal, a repr(C) structure of plain fields)",
            abi.display()
        );
    }
    Ok(text)
}

/// The settings that `cbindgen --config` would use too, with the name of every public type.
fn config(abi: &Path, types: Vec<String>) -> Result<Config> {
    let path = abi.join("cbindgen.toml");
    let mut config = Config::from_file(&path)
        .map_err(|error| anyhow::anyhow!("read {}: {error}", path.display()))?;
    // Only plugins use the types, so cbindgen would find none in use.
    config.export.include = types;
    Ok(config)
}

/// Names of the public types and constants in the files of a folder.
fn public_names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let files = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
    for file in files {
        let path = file.with_context(|| format!("read {}", folder.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let text =
                fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            names.extend(text.lines().filter_map(public_name).map(str::to_string));
        }
    }
    // The order of a folder's files differs between machines.
    names.sort_unstable();
    Ok(names)
}

/// The name in a line that starts a public item of a module; nested items are indented.
fn public_name(line: &str) -> Option<&str> {
    let item = line.strip_prefix("pub ")?;
    let rest = ["struct ", "enum ", "union ", "type ", "const "]
        .iter()
        .find_map(|keyword| item.strip_prefix(keyword))?;
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    // `pub const fn name` is code, not a constant.
    (!name.is_empty() && name != "fn").then_some(name)
}

fn is_constant(name: &str) -> bool {
    !name.contains(|c: char| c.is_lowercase())
}

/// Whether a C text defines a name: a macro, a structure, a union or another type's name.
/// `typedef struct X X;`, which stands for a structure without `repr(C)`, defines nothing.
fn defines(text: &str, name: &str) -> bool {
    text.lines().any(|line| {
        let mut words = line.trim_end_matches(';').split(' ');
        match words.next() {
            Some("#define") => words.next() == Some(name),
            Some("}") => words.next() == Some(name),
            Some("typedef") => words.next_back() == Some(name) && words.next_back() != Some(name),
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: &str = include_str!("../../cbindgen.toml");

    fn abi(source: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("src")).unwrap();
        let manifest = "[package]\nname = \"abi\"\nversion = \"0.1.0\"\nedition = \"2024\"\n";
        fs::write(folder.path().join("Cargo.toml"), manifest).unwrap();
        fs::write(folder.path().join("cbindgen.toml"), SETTINGS).unwrap();
        let exports = ["TyTransportExport", "TyTopologyExport", "TyKernelsExport"]
            .map(|kind| format!("#[repr(C)]\npub struct {kind} {{ a: u8 }}\n"));
        let text = format!("pub mod more;\n{}", exports.concat());
        fs::write(folder.path().join("src/lib.rs"), text).unwrap();
        fs::write(folder.path().join("src/more.rs"), source).unwrap();
        folder
    }

    #[test]
    fn types_constants_and_documentation_of_every_module_are_in_the_header() {
        let folder = abi(
            "/// Says hello.\n#[repr(C)]\npub struct TyHello {\n    pub n: usize,\n    \
                          pub f: Option<unsafe extern \"C\" fn(x: *const TyHello) -> i32>,\n}\n\
                          pub type TySmall = u8;\npub const TY_BIG: u64 = 0xffff_ffff_ffff_fff0;\n",
        );
        let text = generate(folder.path()).unwrap();
        for part in [
            "* Says hello.",
            "typedef struct TyHello {",
            "size_t n;",
            "int32_t (*f)(const struct TyHello *x);",
            "} TyHello;",
            "typedef uint8_t TySmall;",
            "#define TY_BIG 18446744073709551600ull",
            "extern TY_EXPORT const TyTransportExport tokenyard_transport_v1;",
        ] {
            assert!(text.contains(part), "`{part}` is not in\n{text}");
        }
        assert_eq!(text, generate(folder.path()).unwrap());
    }

    #[test]
    fn what_c_cannot_express_is_refused_by_name() {
        let folder = abi("const fn one() -> u32 { 1 }\npub const TY_ONE: u32 = one();\n");
        let error = generate(folder.path()).unwrap_err().to_string();
        assert!(error.contains("`TY_ONE`"), "{error}");
        let folder = abi("pub struct TyText { pub text: u8 }\n");
        let error = generate(folder.path()).unwrap_err().to_string();
        assert!(error.contains("`TyText`"), "{error}");
    }

    #[test]
    fn an_outdated_header_is_refused_with_the_first_line_that_differs() {
        let folder = tempfile::tempdir().unwrap();
        let error = format!("{:#}", check(folder.path()).unwrap_err());
        assert!(error.contains("`cargo xtask header` writes it"), "{error}");

        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        let found = |text| first_difference(text, "a\nb\n").unwrap();
        assert_eq!(found("a\nB\n"), "Line 2: found `B`, expected `b`");
        assert_eq!(found("a"), "Line 2: found the end, expected `b`");
        assert_eq!(found("a\nb\nc\n"), "Line 3: found `c`, expected ``");
    }

    #[test]
    fn names_are_those_of_public_items_at_the_top_of_a_file() {
        let name = public_name;
        assert_eq!(name("pub struct TyA {"), Some("TyA"));
        assert_eq!(name("pub const TY_B: u32 = 1;"), Some("TY_B"));
        assert_eq!(name("pub type TyC<T> = u8;"), Some("TyC"));
        assert_eq!(name("    pub struct Inner {"), None);
        assert_eq!(name("pub const fn f() {"), None);
        assert_eq!(name("pub(crate) struct D;"), None);
    }
}
