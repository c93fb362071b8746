//! Wrong files, each with the exact message.

use super::*;

#[test]
fn every_error_says_where_what_was_found_and_what_was_expected() {
    for (left_out, extra, expected) in BAD {
        let found = message_of(&minimal(left_out, extra));
        assert_eq!(found, format!("read config: a.toml{expected}"), "for {extra:?}");
    }
}

/// (section left out of the shortest valid file, text added to it, the message). The added text starts
/// at line 5; at line 3 where a section is left out, and at line 1 where all are.
const BAD: &[(&str, &str, &str)] = &[
    (
        "",
        "[wrold]",
        ":5: unknown key `wrold` at the top level; expected one of world, kernels, transport, topology, plugins; did you mean world?",
    ),
    (
        "",
        "foo = 1\n",
        ":5: unknown key `foo` in [transport.scale_up]; expected use. Fix: a component's own keys belong in its own table, [transport.scale_up.NAME] with NAME as in `use`",
    ),
    (
        "",
        "[world]\ndeadine_ms = 1",
        ":6: unknown key `deadine_ms` in [world]; expected one of bootstrap, interface, deadline_ms, late_ms, on_failure, reports; did you mean deadline_ms?",
    ),
    (
        "",
        "[world]\non_failure = \"shrink\"",
        r#":6: world.on_failure = "shrink" is not known; expected "stop" or "mask""#,
    ),
    (
        "",
        "[world]\non_failure = true",
        r#":6: world.on_failure = true is a boolean; expected "stop" or "mask""#,
    ),
    (
        "",
        "[world]\ndeadline_ms = \"30s\"",
        r#":6: world.deadline_ms = "30s" is a string; expected an integer from 100 to 3600000 (milliseconds). Fix: write deadline_ms = 30000"#,
    ),
    (
        "",
        "[world]\ndeadline_ms = 30.0",
        ":6: world.deadline_ms = 30.0 is a float; expected an integer from 100 to 3600000 (milliseconds). Fix: write a whole number of milliseconds, without quotes",
    ),
    (
        "",
        "[world]\ndeadline_ms = 99",
        ":6: world.deadline_ms = 99 is out of range; expected an integer from 100 to 3600000 (milliseconds)",
    ),
    (
        "",
        "[world]\ndeadline_ms = 3_600_001",
        ":6: world.deadline_ms = 3_600_001 is out of range; expected an integer from 100 to 3600000 (milliseconds)",
    ),
    (
        "",
        "[world]\ndeadline_ms = -1",
        ":6: world.deadline_ms = -1 is out of range; expected an integer from 100 to 3600000 (milliseconds)",
    ),
    (
        "",
        "[world]\ndeadline_ms = 99999999999999999999999",
        ":6: world.deadline_ms = 99999999999999999999999 is out of range; expected an integer from 100 to 3600000 (milliseconds)",
    ),
    (
        "",
        "[world]\nlate_ms = 20000",
        ":6: world.late_ms = 20000 is too short; expected at least world.deadline_ms, which is 30000",
    ),
    (
        "",
        "[world]\nlate_ms = 604800001",
        ":6: world.late_ms = 604800001 is out of range; expected an integer from 100 to 604800000 (milliseconds)",
    ),
    (
        "",
        "[world]\nbootstrap = \"udp://a\"",
        r#":6: world.bootstrap = "udp://a" is not a rendezvous: it is neither tcp:// nor file://; expected "env", "tcp://host:port" or "file:///path""#,
    ),
    (
        "",
        "[world]\nbootstrap = true",
        r#":6: world.bootstrap = true is a boolean; expected "env", "tcp://host:port" or "file:///path""#,
    ),
    (
        "",
        "[world]\ninterface = 0",
        ":6: world.interface = 0 is an integer; expected the name of a network interface: 1 to 15 characters, no / and no white space",
    ),
    (
        "",
        "[world]\ninterface = \"\"",
        r#":6: world.interface = "" is not the name of an interface; expected the name of a network interface: 1 to 15 characters, no / and no white space"#,
    ),
    (
        "",
        "[world]\ninterface = \"sixteencharacter\"",
        r#":6: world.interface = "sixteencharacter" is not the name of an interface; expected the name of a network interface: 1 to 15 characters, no / and no white space"#,
    ),
    (
        "",
        "[world]\ninterface = \"eth 0\"",
        r#":6: world.interface = "eth 0" is not the name of an interface; expected the name of a network interface: 1 to 15 characters, no / and no white space"#,
    ),
    (
        "",
        "[world.more]\na = 1",
        ":5: unknown key `more` in [world]; expected one of bootstrap, interface, deadline_ms, late_ms, on_failure, reports",
    ),
    (
        "kernels",
        "",
        r#": missing section [kernels]; expected a kernel set. Fix: add [kernels] with, for example, use = "cpu""#,
    ),
    ("all", r#"kernels = "cpu""#, r#":1: kernels = "cpu" is a string; expected a table"#),
    (
        "all",
        "top = 1",
        ":1: unknown key `top` at the top level; expected one of world, kernels, transport, topology, plugins",
    ),
    (
        "",
        "[transport.scale_out]\nuse = \"none\"\n[transport.scale_out.none]",
        ":7: transport.scale_out.none is not named after a component; expected a component's name: 1 to 64 characters of a-z, 0-9, _ and -",
    ),
    (
        "kernels",
        "[kernels]\nuses = \"cpu\"",
        r#":3: missing key `use` in [kernels]; expected the name of a kernel set, such as "cpu""#,
    ),
    (
        "kernels",
        "[kernels]\nuse = [\"cpu\"]",
        r#":4: kernels.use = ["cpu"] is an array; expected a component's name: 1 to 64 characters of a-z, 0-9, _ and -"#,
    ),
    (
        "kernels",
        "[kernels]\nuse = \"CPU\"",
        r#":4: kernels.use = "CPU" is not the name of a component; expected a component's name: 1 to 64 characters of a-z, 0-9, _ and -"#,
    ),
    (
        "kernels",
        "[kernels]\nuse = \"none\"",
        r#":4: kernels.use = "none" is a reserved word; expected the name of a component"#,
    ),
    (
        "kernels",
        "[kernels]\nuse = \"\"",
        r#":4: kernels.use = "" is not the name of a component; expected a component's name: 1 to 64 characters of a-z, 0-9, _ and -"#,
    ),
    (
        "kernels",
        "[kernels]\nuse = \"cpu\"\nthreads = 1",
        ":5: unknown key `threads` in [kernels]; expected use. Fix: a component's own keys belong in its own table, [kernels.NAME] with NAME as in `use`",
    ),
    (
        "kernels",
        "[kernels]\nuse = \"cpu\"\ncpu = 1",
        ":5: kernels.cpu = 1 is an integer; expected a table of the component's own keys",
    ),
    (
        "",
        r#"[kernels."c p u"]"#,
        r#":5: kernels."c p u" is not named after a component; expected a component's name: 1 to 64 characters of a-z, 0-9, _ and -"#,
    ),
    (
        "",
        "[[kernels.cpu]]\na = 1",
        ":5: kernels.cpu = [[kernels.cpu]] is an array; expected a table of the component's own keys",
    ),
    (
        "",
        "[kernels.cpu]\n[[kernels.cpu.rail]]\na = 1",
        ":6: kernels.cpu.rail is an array of [[tables]]; expected an array of inline tables",
    ),
    (
        "transport",
        "",
        ": missing section [transport]; expected a transport for at least one level. Fix: name a transport in [transport.scale_up] or [transport.scale_out]",
    ),
    (
        "transport",
        "[transport]\nuse = \"shm\"",
        ":4: unknown key `use` in [transport]; expected one of scale_up, scale_out",
    ),
    (
        "transport",
        "[transport.efa]\nrails = 1",
        ":3: unknown key `efa` in [transport]; expected one of scale_up, scale_out",
    ),
    (
        "transport",
        "[transport.scale_up]\nuse = \"none\"",
        ":3: no transport: scale_up and scale_out are both none; expected at least one. Fix: name a transport in [transport.scale_up] or [transport.scale_out]",
    ),
    (
        "transport",
        "\n[transport.scale_up]\nuse = \"none\"\n[transport.scale_out]\nuse = \"none\"",
        ":4: no transport: scale_up and scale_out are both none; expected at least one. Fix: name a transport in [transport.scale_up] or [transport.scale_out]",
    ),
    (
        "transport",
        "[transport.scale_up.shm]\na = 1",
        r#":3: missing key `use` in [transport.scale_up]; expected the name of a transport, or "none""#,
    ),
    (
        "transport",
        "[transport.scale_up]\nuse = [\"shm\"]",
        r#":4: transport.scale_up.use = ["shm"] is an array; expected the name of a transport, or "none""#,
    ),
    (
        "",
        "[transport.scale_out]\nuse = 3",
        r#":6: transport.scale_out.use = 3 is an integer; expected the name of a transport, a list of names, or "none""#,
    ),
    (
        "",
        "[transport.scale_out]\nuse = []",
        r#":6: transport.scale_out.use = [] has 0 names; expected 1 to 16 names; "none" stands for no transport"#,
    ),
    (
        "",
        "[transport.scale_out]\nuse = [\"efa\", \"none\"]",
        r#":6: transport.scale_out.use[1] = "none" is a reserved word; expected the name of a component"#,
    ),
    (
        "",
        "[transport.scale_out]\nuse = [\"efa\",\n\"tcp\", \"efa\"]",
        r#":7: transport.scale_out.use[2] = "efa" repeats transport.scale_out.use[0]; expected each name once"#,
    ),
    (
        "",
        "[transport.scale_out]\nuse = [\"efa\", 1]",
        ":6: transport.scale_out.use[1] = 1 is an integer; expected a component's name: 1 to 64 characters of a-z, 0-9, _ and -",
    ),
    (
        "",
        "[topology]\ndomains = \"2\"",
        r#":6: topology.domains = "2" is a string; expected an integer from 1 to 65536 (domains). Fix: write domains = 2"#,
    ),
    (
        "",
        "[topology]\nuse = \"none\"",
        r#":6: topology.use = "none" is a reserved word; expected the name of a component"#,
    ),
    (
        "",
        "[topology]\nuse = \"auto\"\ndomain = 2",
        ":7: unknown key `domain` in [topology]; expected one of use, domains; did you mean domains?. Fix: a component's own keys belong in its own table, [topology.NAME] with NAME as in `use`",
    ),
    ("", "[plugins]", ":5: missing key `paths` in [plugins]; expected an array of absolute paths"),
    (
        "",
        "[plugins]\npaths = \"/a.so\"",
        r#":6: plugins.paths = "/a.so" is a string; expected an array of absolute paths"#,
    ),
    (
        "",
        "[plugins]\npath = [\"/a.so\"]",
        ":6: unknown key `path` in [plugins]; expected paths; did you mean paths?",
    ),
    (
        "",
        "[plugins]\npaths = [\"/a.so\",\n\"./x.so\"]",
        r#":7: plugins.paths[1] = "./x.so" is relative; expected an absolute path to a file or folder. Fix: write the path from / on; ~ and variables are not expanded"#,
    ),
    (
        "",
        "[plugins]\npaths = [\"$HOME/x.so\"]",
        r#":6: plugins.paths[0] = "$HOME/x.so" is relative; expected an absolute path to a file or folder. Fix: write the path from / on; ~ and variables are not expanded"#,
    ),
    (
        "",
        "[plugins]\npaths = [\"/a.so\", \"/b.so\", \"/./a.so\"]",
        r#":6: plugins.paths[2] = "/./a.so" repeats plugins.paths[0]; expected each path once"#,
    ),
    (
        "",
        "[plugins]\npaths = [1]",
        ":6: plugins.paths[0] = 1 is an integer; expected an absolute path to a file or folder",
    ),
    (
        "",
        "[plugins]\npaths = [\"/a\\u0000\"]",
        r#":6: plugins.paths[0] = "/a\u0000" contains a NUL character; expected an absolute path to a file or folder"#,
    ),
    ("", "[world]\ndeadline_ms 5", ":6: not valid TOML: key with no value, expected `=`"),
    (
        "",
        "[world]\ndeadline_ms = 500\ndeadline_ms = 600",
        ":7: not valid TOML: duplicate key; found `deadline_ms`; expected each key once. Fix: remove one of them",
    ),
    ("", "[world", ":5: not valid TOML: unclosed table, expected `]`"),
    ("", "[world]\nbootstrap = \"env", r#":6: not valid TOML: invalid basic string, expected `"`"#),
];
