//! A component's table, in the form in which it reaches the component.

use serde::Deserialize;

use super::*;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "read for its errors")]
struct Efa {
    threads: u32,
    #[serde(default)]
    rails: Mode,
    #[serde(default)]
    retry: Option<Retry>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    #[default]
    Auto,
    Single,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "read for its errors")]
struct Retry {
    limit: u8,
}

/// The table of the component `efa` of a file that ends in `text`, which starts at line 7.
fn table_of(text: &str) -> ComponentTable {
    let file = minimal("", &format!("[transport.scale_out]\nuse = \"efa\"\n{text}"));
    Config::parse(&file, "a.toml").unwrap().scale_out.remove(0).table
}

#[test]
fn a_header_table_keeps_every_key_on_its_line() {
    let table = table_of(
        r#"
[transport.scale_out.efa.retry]
limit = 7 # a comment

[transport.scale_out.efa]
rails = "single"
nics = [
    "a",
    "b",
]

[transport.scale_out.tcp]
port = 1
[transport.scale_out.efa."quoted key".empty]
"#,
    );
    let expected = r#"retry.limit = 7


rails = "single"
nics = [
    "a",
    "b",
]



"quoted key".empty = {}
"#;
    assert_eq!(table.text(), format!("{}{expected}", "\n".repeat(8)));
    assert_eq!(table.file(), "a.toml");
}

#[test]
fn the_text_starts_where_the_table_starts() {
    let table = table_of("\n[transport.scale_out.efa]\n\nthreads = 1");
    assert_eq!(table.text(), "\n\n\n\n\n\n\n# [transport.scale_out.efa]\n\nthreads = 1\n");
}

#[test]
fn keys_of_an_inline_table_on_one_line_get_line_directives() {
    let table = table_of("efa = { threads = 1, retry = { limit = 2 }, a.b = 3 }\n");
    let expected = "threads = 1\n#line 7\nretry = { limit = 2 }\n#line 7\na.b = 3\n";
    assert_eq!(table.text(), format!("{}{expected}", "\n".repeat(6)));
}

#[test]
fn errors_name_the_line_of_the_file_in_every_form() {
    for (text, line) in [
        ("[transport.scale_out.efa]\n\nthreads = 1\nretry.limit = 256", 10),
        (
            "[transport.scale_out.efa]\nthreads = 1\n[transport.scale_out.efa.retry]\n\nlimit = 256",
            11,
        ),
        ("efa.threads = 1\n\nefa.retry.limit = 256", 9),
        ("efa.threads = 1\nefa.retry = { limit = 256 }", 8),
        ("efa = { threads = 1, rails = \"auto\", retry = { limit = 256 } }", 7),
        ("efa = { threads = 1, retry = {\n\n limit = 256 } }", 9),
        ("efa = {\n threads = 1,\n rails = \"auto\",\n\n retry.limit = 256\n}", 11),
        ("efa = {\n threads = 1, rails = \"auto\",\n retry.limit = 256\n}", 9),
    ] {
        let error = table_of(text).parse::<Efa>("efa").unwrap_err();
        let expected = format!(
            "read config: a.toml:{line}: `limit` in `retry` in the table of component `efa`: \
             found integer `256`; expected an integer from 0 to 255"
        );
        assert_eq!(error.to_string(), expected, "for {text}");
    }
}

#[test]
fn every_mistake_in_a_table_is_explained() {
    for (text, expected) in [
        (
            "threads = 1\nthraeds = 1",
            ":9: unknown key `thraeds` in the table of component `efa`; \
             expected one of threads, rails, retry; did you mean threads?",
        ),
        (
            "threads = 1\nretry = { limit = 1, pause = 2 }",
            ":9: unknown key `pause` in `retry` in the table of component `efa`; expected limit",
        ),
        ("rails = \"auto\"", ":7: missing key `threads` in the table of component `efa`"),
        ("", ":7: missing key `threads` in the table of component `efa`"),
        (
            "threads = 1\n\nretry = {}",
            ":10: missing key `limit` in `retry` in the table of component `efa`",
        ),
        (
            "threads = \"many\"",
            ":8: `threads` in the table of component `efa`: \
             found string \"many\"; expected an integer from 0 to 4294967295",
        ),
        (
            "threads = \"4\"",
            ":8: `threads` in the table of component `efa`: \
             found string \"4\"; expected an integer from 0 to 4294967295. Fix: write threads = 4",
        ),
        (
            "threads = -1",
            ":8: `threads` in the table of component `efa`: \
             found integer `-1`; expected an integer from 0 to 4294967295",
        ),
        (
            "threads = 1\nrails = \"both\"",
            ":9: `rails` in the table of component `efa`: \
             unknown variant `both`; expected `auto` or `single`",
        ),
    ] {
        let table = table_of(&format!("[transport.scale_out.efa]\n{text}"));
        let found = table.parse::<Efa>("efa").unwrap_err();
        assert_eq!(found.kind(), ErrorKind::Config);
        assert_eq!(found.to_string(), format!("read config: a.toml{expected}"), "for {text}");

        let far_side = ComponentTable::from_text(table.text(), table.file());
        let far_error = far_side.parse::<Efa>("efa").unwrap_err();
        assert_eq!(far_error.to_string(), found.to_string());
    }
}

#[test]
fn the_error_about_a_component_without_a_table_names_the_file() {
    let error = table_of("").parse::<Efa>("efa").unwrap_err();
    let expected = "read config: a.toml: missing key `threads` in the table of component `efa`";
    assert_eq!(error.to_string(), expected);
    let error = ComponentTable::empty().parse::<Efa>("efa").unwrap_err();
    let expected =
        "read config: no config file: missing key `threads` in the table of component `efa`";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_component_can_refuse_a_value_by_its_key() {
    let table = table_of("efa = { threads = 0, retry = { limit = 0 } }");
    let error = table.invalid("efa", "threads", "is 0; expected 1 to 64");
    assert_eq!(
        error.to_string(),
        "read config: a.toml:7: `threads` in the table of component `efa` is 0; expected 1 to 64"
    );
    let error = table.invalid("efa", "retry.limit", "is 0; expected 1 to 7");
    assert_eq!(
        error.to_string(),
        "read config: a.toml:7: `retry.limit` in the table of component `efa` is 0; expected 1 to 7"
    );
}

#[test]
fn a_key_that_is_too_long_is_refused_at_its_line() {
    let error = message_of(&minimal("", &format!("[kernels.cpu]\n{} = 1", "x".repeat(128))));
    let shown = "x".repeat(60);
    assert_eq!(
        error,
        format!(
            "read config: a.toml:6: kernels.cpu.{shown}... is too long a key; \
             expected less than 128 bytes"
        )
    );
}

#[test]
fn text_that_is_not_toml_is_an_error_with_its_line() {
    let error = ComponentTable::from_text("\n\na = [", "b.toml").parse::<Efa>("efa").unwrap_err();
    assert_eq!(
        error.to_string(),
        "read config: b.toml:3: not valid TOML: unclosed array, expected `]`"
    );
    for text in ["#line 18446744073709551615\na\n\n", "#line 99999999999999999999999\na", "#line"] {
        ComponentTable::from_text(text, "b.toml").parse::<Efa>("efa").unwrap_err();
    }
}

/// One key of a generated table: its form, and the text between it and the next.
#[derive(Clone, Debug)]
struct Piece {
    sub_table: bool,
    value: &'static str,
    blank_lines: usize,
}

fn piece() -> impl Strategy<Value = Piece> {
    let values = ["1", "[\n1,\n\n2]", "'''\n\n'''", "{ a = 1 }", "\"# no comment\""];
    (any::<bool>(), prop::sample::select(values.to_vec()), 0..3usize)
        .prop_map(|(sub_table, value, blank_lines)| Piece { sub_table, value, blank_lines })
}

/// Writes `pieces` in one of the three forms. The keys are `key0`, `key1` and so on.
fn document(form: usize, pieces: &[Piece]) -> String {
    let mut text = match form {
        0 => "[transport.scale_out.efa]\n".to_owned(),
        1 => String::new(),
        _ => "efa = {".to_owned(),
    };
    for (i, Piece { sub_table, value, blank_lines }) in pieces.iter().enumerate() {
        let prefix = if *sub_table { format!("sub{i}.") } else { String::new() };
        let blank = "\n".repeat(*blank_lines);
        match form {
            0 => text.push_str(&format!("{blank}{prefix}key{i} = {value}\n")),
            1 => text.push_str(&format!("{blank}efa.{prefix}key{i} = {value}\n")),
            _ => text.push_str(&format!("{blank}{prefix}key{i} = {value}, ")),
        }
    }
    if form == 2 {
        text.push('}');
    }
    text
}

proptest! {
    #[test]
    fn every_key_keeps_its_line(
        form in 0..3usize,
        pieces in prop::collection::vec(piece(), 1..8),
    ) {
        let text = document(form, &pieces);
        let table = table_of(&text);
        for (i, piece) in pieces.iter().enumerate() {
            let before = text.split(&format!("key{i}")).next().unwrap();
            let line = 7 + before.matches('\n').count();
            let key = if piece.sub_table { format!("sub{i}.key{i}") } else { format!("key{i}") };
            let message = table.invalid("efa", &key, "is odd").to_string();
            prop_assert!(message.contains(&format!("a.toml:{line}: ")), "{message}\n{text}");
        }
    }
}

#[test]
fn a_table_split_off_for_another_component_keeps_its_lines_and_so_does_the_rest() {
    let table = table_of(
        r#"[transport.scale_out.efa]
threads = 1
[transport.scale_out.efa.tcp]
port = 1
[transport.scale_out.efa.tcp.retry]
limit = 7
[transport.scale_out.efa.retry]
limit = 8
"#,
    );
    let (rest, taken) = table.split("tcp").unwrap();
    let line = |table: &ComponentTable, text: &str| table.text().lines().position(|l| l == text);
    assert_eq!(line(&rest, "threads = 1"), line(&table, "threads = 1"));
    assert_eq!(line(&rest, "retry.limit = 8"), line(&table, "retry.limit = 8"));
    assert_eq!(line(&taken, "port = 1"), line(&table, "tcp.port = 1"));
    assert_eq!(line(&taken, "retry.limit = 7"), line(&table, "tcp.retry.limit = 7"));
    assert!(!rest.text().contains("port") && !taken.text().contains("threads"));
    rest.parse::<Efa>("efa").unwrap();
    assert_eq!(taken.file(), "a.toml");
}

#[test]
fn inline_and_empty_and_missing_tables_are_split_off_too() {
    let text = "[transport.scale_out.efa]\nthreads = 1\ntcp = { a = 1, b = 2 }\n";
    let (rest, taken) = table_of(text).split("tcp").unwrap();
    assert!(!rest.text().contains("tcp"));
    let number = taken.text().lines().filter(|l| l.contains("= ")).count();
    assert_eq!(number, 2, "{}", taken.text());
    let wrong = taken.invalid("tcp", "b", "is 2; expected 3").to_string();
    assert!(wrong.contains("a.toml:9: `b`"), "{wrong}");
    for text in ["threads = 1\ntcp = {}\n", "threads = 1\n"] {
        let table = table_of(&format!("[transport.scale_out.efa]\n{text}"));
        let (rest, taken) = table.split("tcp").unwrap();
        assert!(!rest.text().contains("tcp") && taken.text().is_empty(), "{}", taken.text());
    }
}

#[test]
fn a_value_where_a_table_is_split_off_is_refused_with_its_line() {
    let error = table_of("[transport.scale_out.efa]\ntcp = 5\n").split("tcp").unwrap_err();
    assert!(error.to_string().contains("a.toml:8: `tcp` is no table"), "{error}");
}

#[test]
fn an_error_that_names_a_key_gets_its_line_on_both_sides_of_the_plugin_abi() {
    let table = ComponentTable::from_text("\n\n\nthreads = 0\nretry.limit = 9\n", "a.toml");
    let wrong = || Error::new(ErrorKind::Config, "check", "found 0; expected 1 to 256");
    let text = table.locate(wrong().with_key("threads")).to_string();
    assert_eq!(text, "check: a.toml:4: found 0; expected 1 to 256 [key: threads]");
    // An error crosses the ABI as text, from a plugin in any language.
    let crossed = Error::new(ErrorKind::Config, "open", "found 9 [device: 0, key: retry.limit]");
    assert!(table.locate(crossed).to_string().starts_with("open: a.toml:5: found 9"));
    // Without a key, or with one that is not in the file, the table itself is named.
    assert!(table.locate(wrong()).to_string().starts_with("check: a.toml:4: "));
    assert!(table.locate(wrong().with_key("none")).to_string().starts_with("check: a.toml:4: "));
    // Errors that have their place already, and errors that are not about the config, stay unchanged.
    let placed = table.invalid("cpu", "threads", "is 0; expected 1 to 256");
    assert_eq!(table.locate(placed).to_string().matches("a.toml:").count(), 1);
    let other = Error::new(ErrorKind::Unavailable, "open", "no device [key: threads]");
    assert!(!table.locate(other).to_string().contains("a.toml"));
}
