//! `cargo xtask lines`: the number of lines of Rust code in the product, without tests.
//!
//! It counts the lines of `.rs` files that hold code: neither blank lines nor lines with only a comment. It
//! leaves out tests, benches, examples, modules behind `#[cfg(test)]`, build output, and folders that serve
//! only the makers ([`MAKERS`]).

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

/// Folders of tools that are not shipped to users.
const MAKERS: [&str; 13] = [
    "abi/header",
    "bench/abi",
    "fuzz",
    "lints",
    "standins/device_put",
    "standins/twin",
    "standins/hca",
    "standins/hip_on_cuda",
    "standins/nic",
    "standins/paced",
    "standins/softgin",
    "testkit",
    "xtask",
];

/// Prints the count of every crate, and the sum.
pub(crate) fn print(root: &Path) -> Result<()> {
    let counts = count(root)?;
    for (folder, lines) in &counts {
        println!("{lines:>7}  {folder}");
    }
    println!("{:>7}  in all", counts.values().sum::<usize>());
    Ok(())
}

/// Lines of code by the folder of their crate.
fn count(root: &Path) -> Result<BTreeMap<String, usize>> {
    let sources = sources(root)?;
    let tests: Vec<_> = sources.iter().flat_map(|(path, text)| test_modules(path, text)).collect();
    let is_of_tests = |path: &Path| {
        tests.iter().any(|module| path.starts_with(module) || path.with_extension("") == *module)
    };
    let mut counts = BTreeMap::new();
    for (path, text) in sources.iter().filter(|(path, _)| !is_of_tests(path)) {
        *counts.entry(crate_of(path)).or_default() += code_lines(text);
    }
    Ok(counts)
}

/// The sources below `root`, tests in files of their own left out: paths below it, and texts.
fn sources(root: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut sources = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = folder.read_dir().with_context(|| format!("list {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            let below = path.strip_prefix(root)?;
            if path.is_dir() {
                if is_product(below) {
                    folders.push(path);
                }
            } else if is_source(below) {
                let text = std::fs::read_to_string(&path)
                    .with_context(|| format!("read {}", path.display()))?;
                sources.push((below.to_path_buf(), text));
            }
        }
    }
    Ok(sources)
}

/// The modules in files of their own that a source has behind `#[cfg(test)]`: their paths, without `.rs`.
fn test_modules(source: &Path, text: &str) -> Vec<PathBuf> {
    let name = source.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let folder = match name {
        "lib" | "main" | "mod" => source.parent().unwrap_or(Path::new("")).to_path_buf(),
        _ => source.with_extension(""),
    };
    let mut modules = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if is_for_tests(line) {
            let item = lines.by_ref().find(|line| !line.starts_with("#["));
            let module = item.and_then(|item| item.split_once("mod ")?.1.strip_suffix(';'));
            modules.extend(module.map(|module| folder.join(module)));
        }
    }
    modules
}

/// Whether a line says that the item behind it is one of tests.
fn is_for_tests(line: &str) -> bool {
    ["#[cfg(test)]", "#[cfg(all(test,"].iter().any(|begin| line.starts_with(begin))
}

/// Whether a folder may hold code of the product.
fn is_product(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    !name.starts_with('.')
        && !["target", "tests", "benches", "examples", "dist", "node_modules"].contains(&name)
        && !MAKERS.iter().any(|makers| folder == Path::new(makers))
}

fn is_source(file: &Path) -> bool {
    let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    file.extension().is_some_and(|extension| extension == "rs")
        && stem != "tests"
        && !stem.ends_with("_tests")
}

/// The folder of the crate: the path before `src`, or the file's own folder.
fn crate_of(file: &Path) -> String {
    let parts: Vec<_> = file
        .components()
        .take_while(|part| part.as_os_str() != "src")
        .filter_map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        })
        .filter(|name| !name.ends_with(".rs"))
        .collect();
    parts.join("/")
}

/// Lines that hold code, without test modules.
fn code_lines(text: &str) -> usize {
    let mut count = 0;
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if is_for_tests(line) {
            skip_item(&mut lines);
            continue;
        }
        let line = line.trim();
        if !line.is_empty() && !line.starts_with("//") {
            count += 1;
        }
    }
    count
}

/// Skips the item behind `#[cfg(test)]`: one line (`mod tests;`), or all lines until the brace that closes
/// it.
fn skip_item<'a>(lines: &mut impl Iterator<Item = &'a str>) {
    let Some(head) = lines.by_ref().find(|line| !line.starts_with("#[")) else { return };
    if !head.ends_with(';') {
        lines.by_ref().find(|line| *line == "}");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panic")]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_comments_and_tests_do_not_count() {
        let text = "//! About.\n\nfn a() {\n    // Why.\n    b();\n}\n\n#[cfg(test)]\nmod tests {\n    fn c() {\n        d();\n    }\n}\n";
        assert_eq!(code_lines(text), 3);
        assert_eq!(code_lines("use a;\n#[cfg(test)]\nmod tests;\nfn b() {}\n"), 2);
    }

    #[test]
    fn modules_behind_cfg_test_do_not_count_whatever_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "a/src/lib.rs",
            "mod b;\n#[cfg(test)]\nmod samples;\n#[cfg(all(test, feature = \"loom\"))]\npub mod model;\n",
        );
        write("a/src/samples.rs", "fn c() {}\n");
        write("a/src/model/mod.rs", "fn d() {}\n");
        write("a/src/b.rs", "#[cfg(test)]\n#[allow(dead_code)]\nmod double;\nfn e() {}\n");
        write("a/src/b/double.rs", "fn f() {}\n");
        assert_eq!(count(folder.path()).unwrap(), [("a".to_owned(), 2)].into());
    }

    #[test]
    fn lines_count_for_the_crate_whose_src_they_lie_in() {
        assert_eq!(crate_of(Path::new("sys/mlx5/src/a/b.rs")), "sys/mlx5");
        assert_eq!(crate_of(Path::new("core/src/lib.rs")), "core");
        assert_eq!(crate_of(Path::new("cli/build.rs")), "cli");
    }

    #[test]
    fn tests_and_tools_of_the_makers_are_left_out() {
        let root = crate::root().unwrap();
        let counts = count(&root).unwrap();
        assert!(counts.keys().any(|folder| folder == "core"), "{counts:?}");
        let others = ["xtask", "fuzz", "standins/hca", "testkit", "core/tests"];
        assert!(others.iter().all(|other| !counts.contains_key(*other)), "{counts:?}");
    }
}
