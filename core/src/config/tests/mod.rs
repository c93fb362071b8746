//! Valid and invalid contents of the whole file.

mod bad_files;
mod component_table;

use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::*;

const VALID: &str = r#"
[world]
bootstrap = "tcp://node0:4000"
deadline_ms = 5000
late_ms = 60_000
on_failure = "mask"

[kernels]
use = "cuda"
[kernels.cuda]
sms = "auto"
[kernels.cpu]
threads = 2

[transport.scale_up]
use = "nvlink"

[transport.scale_out]
use = ["ibgda", "efa"]
efa = { rails = "auto", proxy_threads = 4 }

[topology]
use = "declared"
declared.domains = [[0, 1], [2, 3]]

[plugins]
paths = ["/usr/lib/tokenyard/libtokenyard_efa.so", "/opt/vendor"]
"#;

/// The shortest valid file, without its section `left_out`, and with `extra` at its end.
fn minimal(left_out: &str, extra: &str) -> String {
    let sections = [
        ("kernels", "[kernels]\nuse = \"cpu\"\n"),
        ("transport", "[transport.scale_up]\nuse = \"shm\"\n"),
    ];
    let kept = sections.iter().filter(|(name, _)| ![name, "all"].contains(&left_out));
    kept.map(|(_, text)| *text).chain([extra]).collect()
}

fn message_of(text: &str) -> String {
    let error = Config::parse(text, "a.toml").expect_err(text);
    assert_eq!(error.kind(), ErrorKind::Config);
    error.to_string()
}

#[test]
fn a_full_file_is_read() {
    let config = Config::parse(VALID, "full.toml").unwrap();
    assert_eq!(config.name, "full.toml");
    let world = WorldConfig {
        bootstrap: "tcp://node0:4000".to_owned(),
        interface: None,
        deadline: Duration::from_secs(5),
        late: Duration::from_secs(60),
        on_failure: OnFailure::Mask,
    };
    assert_eq!(config.world, world);
    assert_eq!(config.reports, Reports::Temporary);
    assert_eq!((config.kernels.name.as_str(), config.kernels.line), ("cuda", 9));
    assert_eq!(config.scale_up.map(|choice| choice.name).as_deref(), Some("nvlink"));
    let scale_out: Vec<_> = config.scale_out.iter().map(|c| (c.name.as_str(), c.line)).collect();
    assert_eq!(scale_out, [("ibgda", 19), ("efa", 19)]);
    assert_eq!(config.scale_out[0].table.text(), "");
    assert!(config.scale_out[1].table.text().contains("proxy_threads = 4"));
    assert_eq!(config.topology.name, "declared");
    let plugins = ["/usr/lib/tokenyard/libtokenyard_efa.so", "/opt/vendor"];
    assert_eq!(config.plugins, plugins.map(PathBuf::from));
    let unused =
        UnusedTable { section: "kernels".to_owned(), component: "cpu".to_owned(), line: 12 };
    assert_eq!(config.unused_tables, [unused]);
}

#[test]
fn an_interface_is_read_and_is_not_compared_among_ranks() {
    for name in ["eth0", "enp175s0f1np1", "bond0.1234:vip7"] {
        let text = minimal("", &format!("[world]\ninterface = \"{name}\""));
        let config = Config::parse(&text, "a.toml").unwrap();
        assert_eq!(config.world.interface.as_deref(), Some(name));
        let without = Config::parse(&minimal("", ""), "a.toml").unwrap();
        assert_eq!(config.agreement(), without.agreement());
    }
}

#[test]
fn reports_go_to_a_folder_or_nowhere_and_ranks_need_not_agree() {
    let with = |value: &str| minimal("", &format!("[world]\nreports = {value}"));
    let reports = |value: &str| Config::parse(&with(value), "a.toml").unwrap().reports;
    assert_eq!(reports("\"/var/reports\""), Reports::Folder("/var/reports".into()));
    assert_eq!(reports("\"none\""), Reports::Nowhere);
    for bad in ["\"reports\"", "\"\"", "7"] {
        let message = message_of(&with(bad));
        assert!(
            message.contains("expected an absolute path to a folder, or \"none\""),
            "{message}"
        );
    }
    let elsewhere = Config::parse(&with("\"/a\""), "a.toml").unwrap();
    assert_eq!(
        elsewhere.agreement(),
        Config::parse(&with("\"/b\""), "b.toml").unwrap().agreement()
    );
}

#[test]
fn files_with_another_text_have_another_digest() {
    let digest = |text: &str| Config::parse(text, "a.toml").unwrap().digest;
    let text = minimal("", "");
    assert_eq!(digest(&text).len(), 16);
    assert_eq!(digest(&text), digest(&text.clone()));
    assert_ne!(digest(&text), digest(&format!("{text}# a comment\n")));
}

#[test]
fn what_a_file_leaves_out_has_its_default() {
    let config = Config::parse(&minimal("", ""), "a.toml").unwrap();
    assert_eq!(config.world.bootstrap, "env");
    assert_eq!(config.world.interface, None);
    assert_eq!(config.world.deadline, Duration::from_secs(30));
    assert_eq!(config.world.late, Duration::from_secs(30 * 60));
    assert_eq!(config.world.on_failure, OnFailure::Stop);
    assert_eq!(config.scale_out, []);
    assert_eq!((config.topology.name.as_str(), config.topology.line), ("auto", 0));
    assert_eq!(config.topology.table.file(), "a.toml");
    assert!(config.plugins.is_empty());
}

#[test]
fn the_default_of_late_follows_a_longer_deadline() {
    let config = Config::parse(&minimal("", "[world]\ndeadline_ms = 3_600_000"), "a.toml").unwrap();
    assert_eq!(config.world.late, Duration::from_secs(3600));
}

#[test]
fn the_default_topology_gets_its_own_table() {
    let config = Config::parse(&minimal("", "[topology.auto]\ndomain = 8"), "a.toml").unwrap();
    assert_eq!(config.topology.table.text(), "\n\n\n\n# [topology.auto]\ndomain = 8\n");
    assert_eq!(config.unused_tables, []);
}

#[test]
fn ranks_agree_on_components_and_deadlines_but_not_on_paths_and_tables() {
    let pairs = Config::parse(VALID, "full.toml").unwrap().agreement();
    let pairs: Vec<_> = pairs.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let expected = [
        ("world.deadline_ms", "5000"),
        ("world.late_ms", "60000"),
        ("world.on_failure", "mask"),
        ("kernels.use", "cuda"),
        ("transport.scale_up.use", "nvlink"),
        ("transport.scale_out.use", "ibgda, efa"),
        ("topology.use", "declared"),
        ("topology.domains", "auto"),
    ];
    assert_eq!(pairs, expected);
    let pairs = Config::parse(&minimal("", ""), "a.toml").unwrap().agreement();
    assert!(pairs.contains(&("transport.scale_out.use".to_owned(), "none".to_owned())));
}

#[test]
fn every_config_that_is_shipped_loads() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(path.extension().unwrap(), "toml", "{}", path.display());
        Config::load(&path).unwrap();
        names.push(path.file_name().unwrap().to_owned());
    }
    assert!(names.iter().any(|name| name == "cpu.toml"));
}

#[test]
fn files_that_are_no_config_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("large.toml"), vec![b'\n'; MAX_BYTES + 1]).unwrap();
    std::fs::write(path("bytes.toml"), b"[world]\n# \xff\n").unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    for (name, expected) in [
        (
            "absent.toml",
            ": the file cannot be read: No such file or directory (os error 2). Fix: correct the path",
        ),
        (
            "pipe",
            ": found a FIFO, expected a regular file. Fix: save the output of the \
             pipe to a file, and name that file",
        ),
        (
            "large.toml",
            ": found 1048577 bytes or more, expected at most 1048576. Fix: name the right \
             file; this one is too large",
        ),
        ("bytes.toml", ":2: found byte 0xff, not UTF-8; expected UTF-8 text"),
    ] {
        let error = Config::load(&path(name)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        let expected = format!("read config: {}{expected}", path(name).display());
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn lines_are_counted_with_any_line_ending_and_a_byte_order_mark() {
    let text = minimal("", "[world]\nlate = 1");
    for text in [text.replace('\n', "\r\n"), format!("\u{feff}{text}")] {
        assert!(message_of(&text).starts_with("read config: a.toml:6: unknown key `late`"));
    }
}

#[test]
fn a_message_stays_short_whatever_the_file_holds() {
    let long = "x".repeat(100_000);
    for extra in [
        format!("[{long}]"),
        format!("[world]\n{long} = 1"),
        format!("[world]\nbootstrap = \"{long}\""),
        format!("[plugins]\npaths = [\"{long}\"]"),
        format!("[kernels.{long}]"),
        format!("[kernels.cpu]\n[[kernels.cpu.{long}]]"),
        format!("[world]\n{long}"),
    ] {
        let message = message_of(&minimal("", &extra));
        assert!(message.len() < 700, "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn deep_documents_are_errors_not_crashes() {
    for extra in [
        format!("[kernels.cpu]\na = {}1{}", "[".repeat(100_000), "]".repeat(100_000)),
        format!("[kernels.cpu]\na = {}", "{a=".repeat(100_000)),
        format!("[kernels.cpu]\n{}b = 1", "a.".repeat(100_000)),
        format!("[kernels.cpu.{}b]", "a.".repeat(100_000)),
        format!("[kernels.cpu.{}b]\nc = 1", "a.".repeat(64)),
        format!("[kernels.cpu.{}b]\n{}c = 1", "a.".repeat(40), "a.".repeat(40)),
    ] {
        message_of(&minimal("", &extra));
    }
}

/// Checks the property of any bytes: an error of the right kind, or a config whose tables equal those
/// of the file.
fn check(bytes: &[u8]) {
    let config = match Config::parse_bytes(bytes, "any.toml") {
        Err(error) => return assert_eq!(error.kind(), ErrorKind::Config),
        Ok(config) => config,
    };
    let file = DeTable::parse(std::str::from_utf8(bytes).unwrap()).unwrap().into_inner();
    let levels = [
        (vec!["kernels"], std::slice::from_ref(&config.kernels)),
        (vec!["transport", "scale_up"], config.scale_up.as_slice()),
        (vec!["transport", "scale_out"], &config.scale_out),
        (vec!["topology"], std::slice::from_ref(&config.topology)),
    ];
    for (path, choices) in levels {
        for choice in choices {
            let mut path = path.iter().copied().chain([choice.name.as_str()]);
            let expected = path.try_fold(&file, |table, key| table.get(key)?.as_ref().as_table());
            let found = DeTable::parse(choice.table.text()).unwrap();
            assert_eq!(plain(found.get_ref()), expected.map_or(String::new(), plain));
        }
    }
}

/// A table without its spans.
fn plain(table: &DeTable<'_>) -> String {
    fn value(spanned: &Spanned<DeValue<'_>>) -> String {
        match spanned.get_ref() {
            DeValue::Table(table) => format!("{{{}}}", plain(table)),
            DeValue::Array(array) => format!("{:?}", array.iter().map(value).collect::<Vec<_>>()),
            scalar => format!("{scalar:?}"),
        }
    }
    table.iter().map(|(key, of_key)| format!("{:?}={};", key.get_ref(), value(of_key))).collect()
}

proptest! {
    #[test]
    fn any_bytes_are_a_config_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check(&bytes);
    }

    #[test]
    fn any_words_of_a_config_are_a_config_or_an_error(
        words in prop::collection::vec(prop::sample::select(WORDS), 0..7),
    ) {
        check(minimal("", &words.concat()).as_bytes());
    }

    #[test]
    fn a_changed_config_is_a_config_or_an_error(
        changes in prop::collection::vec((0..VALID.len(), any::<u8>(), 0..4usize), 1..4),
    ) {
        let mut bytes = VALID.as_bytes().to_vec();
        for (at, byte, removed) in changes {
            let at = at.min(bytes.len());
            let end = (at + removed).min(bytes.len());
            bytes.splice(at..end, [byte]);
        }
        check(&bytes);
    }
}

/// Pieces that make many valid files, and many in which the pieces do not fit.
const WORDS: &[&str] = &[
    "[transport.scale_out]\nuse = [\"efa\"]\n",
    "[kernels.cpu]\n",
    "[kernels.cpu.deep]\n",
    "[[kernels.cpu.many]]\n",
    "[topology.auto]\n",
    "[plugins]\n",
    "[world]\n",
    "cpu.deep.er = 1\n",
    "\"a b\" = '''\n\n'''\n",
    "x = { y = 1, z = [\n1,\n2], w.v = 3 }\n",
    "cpu = { a = 1, b = 2 }\n",
    "[transport.scale_up.shm]\n",
    "efa = { nested.deep = 1, nested.er = { x = 2 } }\n",
    "use = \"none\"\n",
    "threads = 1\n",
    "kernels.cpu.a = 1\n",
    "deadline_ms = 1e9\n",
    "late_ms = 99999999999999999999\n",
    "paths = [\"/a\"]\n",
    "#line 9\n",
    "\n",
];
