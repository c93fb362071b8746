//! `docs/environment.md` has every variable that the sources read, and no other; the examples of this page and
//! of `docs/several-nodes.md` are well formed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

use saphyr::{LoadableYamlNode, Yaml};

use crate::product;

/// Variables of one word, which look like any other word in capitals.
const OF_ONE_WORD: [&str; 3] = ["HOME", "RANK", "TMPDIR"];
/// Words that look like variables.
const OTHERS: [&str; 13] = [
    "CAP_IPC_LOCK",
    "CARGO_MANIFEST_DIR",
    "CARGO_PKG_VERSION",
    // A name of mpi4py.
    "COMM_WORLD",
    "CONFIG_DMABUF_MOVE_NOTIFY",
    "CONFIG_PCI_P2PDMA",
    "PCI_BUS_ID",
    // Set by the build script of the command, and read by the compiler.
    "TOKENYARD_BUILD_COMMIT",
    "TOKENYARD_BUILD_PROFILE",
    "TOKENYARD_BUILD_RUSTC",
    "TOKENYARD_BUILD_TARGET",
    "TY_CAP_GET",
    "TY_CAP_LOAD_STORE",
];
/// Network namespaces that stand in for hosts: this code sets the variables that launchers set, and
/// reads none of them.
const NOT_READ: &str = "launch/src/hosts/";

/// The page of variables, and the page of jobs that launchers start.
const PAGES: [&str; 2] = ["docs/environment.md", "docs/several-nodes.md"];

fn page(path: &str) -> String {
    std::fs::read_to_string(product::root().join(path)).unwrap()
}

/// A word that may name a variable: `A_B`, or `A_` for all variables with this prefix.
fn is_name(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    word.starts_with(|c: char| c.is_ascii_uppercase())
        && word.chars().all(plain)
        && (word.contains('_') || OF_ONE_WORD.contains(&word))
}

/// The names in the strings of a source. A string that is a name has no quotes in it, so the test takes each
/// piece between two quotes.
fn names_in(text: &str) -> BTreeSet<String> {
    let pieces = product::lines(text).flat_map(|line| line.split('"').skip(1));
    pieces.filter(|word| is_name(word) && !OTHERS.contains(word)).map(str::to_owned).collect()
}

/// The names in the first column of the page's tables of variables; a star stands for all variables with
/// this prefix.
fn names_on(page: &str) -> BTreeSet<String> {
    let tables = page.split("\n| variable |").skip(1);
    let rows =
        tables.flat_map(|table| table.lines().skip(2).take_while(|line| line.starts_with('|')));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let names = cells.flat_map(|cell| cell.split(',')).map(|name| name.trim().trim_matches('`'));
    names.map(|name| name.strip_suffix('*').unwrap_or(name).to_owned()).collect()
}

/// The names in the strings of the Python packages. Comments are left out, and so are docstrings, which have
/// names between backticks.
fn names_in_python(text: &str) -> BTreeSet<String> {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let pieces = lines.flat_map(|line| line.split('"').skip(1));
    pieces.filter(|word| is_name(word)).map(str::to_owned).collect()
}

#[test]
fn the_page_has_every_variable_that_the_sources_read_and_no_other() {
    let sources = product::sources().into_iter().filter(|(name, _)| !name.starts_with(NOT_READ));
    let mut read: BTreeSet<String> = sources.flat_map(|(_, text)| names_in(&text)).collect();
    let python = product::files(&["python/tokenyard", "python/deep_ep"], &["py"]);
    assert!(python.len() > 10, "found {} sources of Python; the search misses some", python.len());
    read.extend(python.iter().flat_map(|(_, text)| names_in_python(text)));
    let on_page = names_on(&page(PAGES[0]));
    let missing: Vec<_> = read.difference(&on_page).collect();
    let needless: Vec<_> = on_page.difference(&read).collect();
    assert!(
        missing.is_empty() && needless.is_empty(),
        "docs/environment.md lacks {missing:?}, and has {needless:?}, which no source reads. Words \
         that are not variables are listed in this test"
    );
    assert!(read.len() > 50, "found {} variables; the search misses some", read.len());
}

#[test]
fn variables_are_seen_in_sources_and_on_the_page() {
    let source = "const A: &str = \"TOKENYARD_A\";\nlet b = [\"RANK\", \"GPU\", \"FI_\", \"a_b\"];\n\
                  // env(\"NOT_THIS\")\n#[cfg(test)]\nmod tests { env(\"NOR_THIS\") }";
    assert_eq!(names_in(source).into_iter().collect::<Vec<_>>(), ["FI_", "RANK", "TOKENYARD_A"]);
    let source = "A = \"TOKENYARD_A\"\n# os.environ[\"NO_A\"]\n\"\"\"`NO_B` is none.\"\"\"\nget(\"RANK\", \"0\")";
    assert_eq!(names_in_python(source).into_iter().collect::<Vec<_>>(), ["RANK", "TOKENYARD_A"]);
    let page = "| port |\n|---|\n| `NO` |\n\n| variable | what |\n|---|---|\n\
                | `A_B`, `C` | `D_E` |\n| `F_*` | |\n\n`G_H`\n";
    assert_eq!(names_on(page).into_iter().collect::<Vec<_>>(), ["A_B", "C", "F_"]);
}

/// The blocks of a language.
fn examples(page: &str, language: &str) -> Vec<String> {
    let start = format!("\n```{language}\n");
    page.split(&start).skip(1).map(|rest| rest.split("\n```").next().unwrap().to_owned()).collect()
}

/// Words with the prefix of tokenyard's variables.
fn own_variables(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("TOKENYARD_"))
}

#[test]
fn the_shell_reads_every_script_of_the_pages_and_their_variables_exist() {
    let known = names_on(&page(PAGES[0]));
    let page = PAGES.map(page).concat();
    let scripts: Vec<_> = ["sh", "bash"].iter().flat_map(|name| examples(&page, name)).collect();
    assert!(scripts.iter().any(|script| script.contains("#SBATCH")), "no script of Slurm");
    for script in scripts {
        expect_shell_reads(&script);
        for name in own_variables(&script) {
            assert!(known.contains(name), "{name} is no variable: {script}");
        }
    }
}

fn expect_shell_reads(script: &str) {
    let mut shell = Command::new("bash");
    shell.arg("-n").stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = shell.spawn().unwrap();
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}\n{script}");
}

/// The value below these keys: a number is a place in a list, `~` stands for `/`.
fn at<'a>(yaml: &'a Yaml<'a>, path: &str) -> &'a Yaml<'a> {
    path.split('/').fold(yaml, |yaml, key| {
        let found = match key.parse::<usize>() {
            Ok(index) => yaml.as_sequence().and_then(|list| list.get(index)),
            Err(_) => yaml.as_mapping_get(&key.replace('~', "/")),
        };
        found.unwrap_or_else(|| panic!("no {key} of {path}: {yaml:?}"))
    })
}

fn text<'a>(yaml: &'a Yaml<'a>, path: &str) -> &'a str {
    at(yaml, path).as_str().unwrap_or_else(|| panic!("no text at {path}"))
}

fn number(yaml: &Yaml<'_>, path: &str) -> i64 {
    at(yaml, path).as_integer().unwrap_or_else(|| panic!("no number at {path}"))
}

#[test]
fn the_manifest_is_yaml_and_its_names_fit_together() {
    let page = page(PAGES[1]);
    let blocks = examples(&page, "yaml");
    assert_eq!(blocks.len(), 1);
    let documents = Yaml::load_from_str(&blocks[0]).unwrap();
    let [service, job] = &documents[..] else { panic!("found {} documents", documents.len()) };
    assert_eq!((text(service, "kind"), text(service, "spec/clusterIP")), ("Service", "None"));
    assert_eq!((text(job, "kind"), text(job, "spec/completionMode")), ("Job", "Indexed"));
    let (service_name, job_name) = (text(service, "metadata/name"), text(job, "metadata/name"));
    assert_eq!(text(service, "spec/selector/job-name"), job_name);
    let pod = at(job, "spec/template/spec");
    assert_eq!(text(pod, "subdomain"), service_name);

    let (nodes, container) = (number(job, "spec/completions"), at(pod, "containers/0"));
    assert_eq!(number(job, "spec/parallelism"), nodes);
    let script = text(container, "args/0");
    expect_shell_reads(script);
    let gpus = number(container, "resources/limits/nvidia.com~gpu");
    for words in [
        format!("--nnodes {nodes} --nproc-per-node {gpus} "),
        format!("--master-addr {job_name}-0.{service_name} "),
        "--master-port 29500 ".to_owned(),
    ] {
        assert!(script.contains(&words), "{words}: {script}");
    }
    // Rank 0 listens on the port after torch's.
    let ports = ["spec/ports/0/port", "spec/ports/1/port"].map(|path| number(service, path));
    assert_eq!(ports, [29500, 29501]);

    let secret = at(container, "env/0/valueFrom/secretKeyRef");
    assert_eq!(text(container, "env/0/name"), "TOKENYARD_SECRET");
    let (name, key) = (text(secret, "name"), text(secret, "key"));
    assert!(page.contains(&format!("kubectl create secret generic {name} --from-literal={key}=")));
    let config = text(pod, "volumes/0/configMap/name");
    assert!(page.contains(&format!("kubectl create configmap {config} --from-file=config.toml")));
    let folder = text(container, "volumeMounts/0/mountPath");
    assert!(script.contains(&format!(" {folder}/config.toml ")), "{script}");
}

/// Lines of the blocks of a page; a line that ends with a backslash goes on.
fn commands(page: &str) -> Vec<String> {
    let blocks = page.split("```").skip(1).step_by(2);
    blocks
        .flat_map(|block| block.replace("\\\n", " ").lines().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

/// Whether a launcher starts this command, or its variables stand before it, and it makes ranks of its own.
fn starts_ranks_of_its_own(command: &str) -> bool {
    let launched = ["RANK=", "torchrun ", "srun "].iter().any(|word| command.contains(word));
    launched && command.contains("tokenyard run ") && !command.contains("--as-rank")
}

#[test]
fn a_command_of_the_pages_that_a_launcher_starts_is_one_rank() {
    let pages = product::files(&["docs", "backends", "configs", "plugins"], &["md", "toml"]);
    assert!(pages.len() > 20, "found {} pages; the search misses some", pages.len());
    let mut ranks = 0;
    for (path, text) in &pages {
        for command in commands(text) {
            assert!(!starts_ranks_of_its_own(&command), "{path}: add --as-rank: {command}");
            ranks += usize::from(command.contains("--as-rank"));
        }
    }
    assert!(ranks >= 4, "found {ranks} commands of ranks; the search misses some");
}

#[test]
fn a_rank_that_starts_ranks_is_noticed() {
    let page = "text\n```sh\nRANK=0 WORLD_SIZE=2 \\\n    tokenyard run a.toml\n```\n`srun tokenyard run a`\n";
    let found = commands(page);
    assert_eq!(found.iter().filter(|command| starts_ranks_of_its_own(command)).count(), 1);
    assert!(!starts_ranks_of_its_own("srun tokenyard run a.toml --as-rank"));
    assert!(!starts_ranks_of_its_own("mpirun -n 2 -x RANK tokenyard run a.toml"));
}
