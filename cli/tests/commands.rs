//! `tokenyard plugins`, `doctor`, `shape`, and behaviour that all commands share.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::process::{Command, Output, Stdio};

use common::{Config, expect_code, json, stderr, stdout, tokenyard};

fn call(arguments: &[&str]) -> Output {
    tokenyard().args(arguments).output().unwrap()
}

#[test]
fn plugins_lists_the_built_in_parts_with_their_capabilities() {
    let output = call(&["plugins"]);
    expect_code(&output, 0);
    let text = stdout(&output);
    for component in ["kernel set  cpu", "transport   shm", "topology    auto"] {
        assert!(text.contains(component), "{text}");
    }
    assert!(text.contains("yes: load_store"), "{text}");
    let document = json(&call(&["plugins", "--json"]));
    let components = document["components"].as_array().unwrap();
    let shm = components.iter().find(|component| component["name"] == "shm").unwrap();
    let flags = shm["capabilities"]["flags"].as_array().unwrap();
    assert!(flags.contains(&"load_store".into()), "{flags:?}");
    assert_eq!(shm["why_not"], serde_json::Value::Null);
    // No component for tests or measurements is listed.
    let mut names: Vec<_> =
        components.iter().map(|component| component["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["auto", "cpu", "cuda", "nvlink", "rocm", "shm", "xgmi"]);
}

#[test]
fn a_plugin_that_fails_the_handshake_is_listed_with_its_error_and_the_others_too() {
    let folder = tempfile::tempdir().unwrap();
    let (bad, missing) = (folder.path().join("bad.so"), folder.path().join("missing.so"));
    std::fs::write(&bad, "no library").unwrap();
    let paths = format!("[plugins]\npaths = [{bad:?}, {missing:?}]");
    let config = Config::with(&paths);
    let config = config.path();
    let output = call(&["plugins", config.to_str().unwrap(), "--json"]);
    expect_code(&output, 1);
    let document = json(&output);
    assert_eq!(document["broken"].as_array().unwrap().len(), 2);
    let components = document["components"].as_array().unwrap();
    assert!(components.iter().any(|component| component["name"] == "shm"));
    let text = stderr(&output);
    assert!(text.contains("bad.so") && text.contains("not loaded"), "{text}");
    let doctor = call(&["doctor", config.to_str().unwrap()]);
    expect_code(&doctor, 2);
    assert!(stdout(&doctor).contains("missing.so"), "{}", stdout(&doctor));
}

#[test]
fn doctor_says_what_was_tried_and_its_exit_code_is_its_verdict() {
    let config = Config::new();
    let output = call(&["doctor", config.path().to_str().unwrap(), "--ranks", "1", "--json"]);
    let document = json(&output);
    let code = match document["verdict"].as_str().unwrap() {
        "ok" | "unknown" => 0,
        "slow" => 1,
        "broken" => 2,
        other => panic!("{other}"),
    };
    expect_code(&output, code);
    let findings = document["findings"].as_array().unwrap();
    let find = |id: &str, subject: &str| {
        findings.iter().find(|f| f["id"] == id && f["subject"] == subject).unwrap()
    };
    assert_eq!(find("component", "transport shm")["verdict"], "ok");
    assert_eq!(find("shared-memory", "memfd")["found"], "tried, it works");
    assert_eq!(find("open-files", "open files")["expected"], "36 for 1 ranks");
}

#[test]
fn doctor_names_a_component_that_is_not_provided_and_a_port_that_is_held() {
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = held.local_addr().unwrap().port();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    let text = format!(
        "[world]\nbootstrap = \"tcp://127.0.0.1:{port}\"\n[kernels]\nuse = \"cpu\"\n\
         [transport.scale_up]\nuse = \"efa\"\n"
    );
    std::fs::write(&path, text).unwrap();
    let output = call(&["doctor", path.to_str().unwrap()]);
    expect_code(&output, 2);
    let text = stdout(&output);
    assert!(text.contains("transport efa"), "{text}");
    assert!(text.contains(&format!("127.0.0.1:{port}: ")), "{text}");
    assert!(text.contains("it cannot work like this"), "{text}");
}

#[test]
fn shape_adds_up_what_a_rank_and_the_world_need() {
    let arguments = "shape --ranks 2 --experts 8 --topk 2 --hidden 256 --max-tokens 16 --json";
    let output = call(&arguments.split(' ').collect::<Vec<_>>());
    expect_code(&output, 0);
    let document = json(&output);
    let buffers = document["buffers"].as_array().unwrap();
    let x = buffers.iter().find(|b| b["name"] == "flat region: x").unwrap();
    assert_eq!(x["bytes"], 2 * 16 * 512);
    assert!(x["formula"].as_str().unwrap().contains("R*M"));
    let counted = buffers.iter().filter(|b| b["counts"] == true);
    let sum: u64 = counted.map(|b| b["bytes"].as_u64().unwrap()).sum();
    assert_eq!(document["rank_bytes"].as_u64(), Some(sum));
    assert_eq!(document["world_bytes"].as_u64(), Some(2 * sum));
    let refused = call(&arguments.replace("8 --topk", "9 --topk").split(' ').collect::<Vec<_>>());
    expect_code(&refused, 2);
    assert!(stderr(&refused).contains("9 experts on 2 ranks"), "{}", stderr(&refused));
}

#[test]
fn shape_with_a_config_says_which_options_it_takes() {
    let output = call(&["shape", "configs/cpu.toml"]);
    expect_code(&output, 2);
    let text = stderr(&output);
    assert!(text.contains("`shape` reads no config"), "{text}");
    assert!(text.contains("--kernels names the kernel set"), "{text}");
    assert!(text.contains("Fix: tokenyard shape --kernels cuda --ranks 8"), "{text}");
    let text = stderr(&call(&["shape", "--rank", "8"]));
    assert!(!text.contains("reads no config"), "{text}");
}

#[test]
fn shape_says_first_what_a_gpu_takes_and_warns_beyond_a_card() {
    let base =
        "shape --kernels cuda --ranks 8 --experts 256 --topk 8 --hidden 7168 --max-tokens 4096";
    let with = |more: &str| {
        let output = call(&base.split(' ').chain(more.split_whitespace()).collect::<Vec<_>>());
        expect_code(&output, 0);
        stdout(&output).lines().take(4).map(str::to_owned).collect::<Vec<_>>().join("\n")
    };
    let summary = with("");
    assert!(
        summary.starts_with("8 ranks, 4096 tokens of 7168 elements each, top-8 of 256"),
        "{summary}"
    );
    assert!(
        summary.contains("\neach GPU: 16.0 GiB of its memory, 20 % of a card of 80.0 GiB\n"),
        "{summary}"
    );
    assert!(summary.contains("\nit fits"), "{summary}");
    let of_cpus = stdout(&call(&base.replace("cuda", "cpu").split(' ').collect::<Vec<_>>()));
    let of_cpus: Vec<&str> = of_cpus.lines().take(4).collect();
    assert!(of_cpus[2].starts_with("all ranks: 145."), "{of_cpus:#?}");
    assert!(of_cpus[3].contains("available here"), "{of_cpus:#?}");
    assert!(with("--card-memory 24").contains("warning: 66 % of the card is taken"), "{summary}");
    assert!(
        with("--card-memory 12")
            .contains("warning: the windows do not fit into a card of 12.0 GiB")
    );
    assert!(with("--arena-mib 1024").contains("each GPU: 1.0 GiB"));
    assert!(
        with("--domains 2").contains("; and ")
            && with("--domains 2").contains("of pinned host memory")
    );
    assert!(!with("--domains 2 --between gpu").contains("pinned"));
    let document = json(&call(&base.split(' ').chain(["--json"]).collect::<Vec<_>>()));
    assert_eq!(document["gpu"]["bytes"], document["rank_bytes"]);
    assert_eq!((&document["kernels"], &document["gpu"]["fits"]), (&"cuda".into(), &true.into()));
    let refused = call(&base.replace("256", "4096").split(' ').collect::<Vec<_>>());
    expect_code(&refused, 2);
    assert!(stderr(&refused).contains("bytes of shared memory in a block"), "{}", stderr(&refused));
}

#[test]
fn every_config_of_the_folder_can_be_loaded_and_says_whether_gpus_are_used() {
    let tree = common::repository("node/machine/trees/hgx-cx7.tree");
    let mut count = 0;
    for entry in std::fs::read_dir(common::repository("configs")).unwrap() {
        let path = entry.unwrap().path();
        let mut command = tokenyard();
        command.args(["doctor", "--ranks", "8", "--json", "--root"]).arg(&tree).arg(&path);
        let document = json(&command.output().unwrap());
        let findings =
            document["findings"].as_array().unwrap_or_else(|| panic!("{path:?}: {document}"));
        let is_unused = findings.iter().any(|finding| finding["id"] == "gpu-unused");
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(is_unused, text.contains("\nuse = \"cpu\"\n"), "{}", path.display());
        count += 1;
    }
    assert!(count >= 14, "found {count} configs");
}

#[test]
fn without_a_command_it_says_what_the_node_has_and_what_to_try() {
    let output = call(&[]);
    expect_code(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("\nthis node  ") && text.contains(" cores"), "{text}");
    assert!(text.contains("tokenyard run configs/") && text.contains("tokenyard --help"), "{text}");
}

#[test]
fn help_fits_a_terminal_of_eighty_columns() {
    for command in [
        "",
        "run",
        "doctor",
        "bench dispatch",
        "bench gather",
        "conformance",
        "warm",
        "config check",
    ] {
        let words: Vec<&str> = command.split_whitespace().chain(["--help"]).collect();
        let text = stdout(&call(&words));
        // Examples are lines to copy: they stay whole.
        let prose = text.lines().filter(|line| !line.contains("tokenyard "));
        for line in prose {
            assert!(line.chars().count() <= 80, "{command}: {line}");
        }
    }
}

#[test]
fn shape_says_what_several_domains_send_each_other_in_lines_of_80_columns() {
    let arguments = "shape --ranks 16 --domains 2 --experts 256 --topk 8 --hidden 7168 \
                     --max-tokens 4096 --groups 2 --topk-groups 1";
    let words: Vec<&str> = arguments.split_whitespace().collect();
    let output = call(&words);
    expect_code(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("top-8 experts\n(of 1 of 2 groups)"), "{text}");
    let tables = text.lines().skip_while(|line| !line.starts_with("one rank on average"));
    for line in tables {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let document = json(&call(&[&words[..], &["--json"]].concat()));
    let all = document["traffic"].as_array().unwrap();
    let found = all.iter().find(|traffic| traffic["domains"] == 2).unwrap();
    // Half of the tokens stay in their domain, half of them leave it.
    assert_eq!(found["dispatch"]["out"]["rows"], 2048.0);
    assert_eq!(found["dispatch"]["out"]["row_bytes"], 2048.0 * (14336.0 + 8.0 * 8.0 + 4.0));
    assert_eq!(found["combine"]["out"]["row_bytes"], 2048.0 * 14336.0);
    let refused = call(&[&words[..], &["--groups", "3"]].concat());
    expect_code(&refused, 2);
    let refused = call(&[&words[..13], &["--groups", "3"]].concat());
    expect_code(&refused, 2);
    assert!(stderr(&refused).contains("3 groups of 256 experts"), "{}", stderr(&refused));
}

#[test]
fn a_filter_of_the_log_that_is_none_is_named_and_a_good_or_empty_one_is_not() {
    for (filter, warns) in
        [("core=loud", true), ("", false), ("off", false), ("warn,tokenyard_core=debug", false)]
    {
        let output = tokenyard().arg("plugins").env("TOKENYARD_LOG", filter).output().unwrap();
        expect_code(&output, 0);
        let text = stderr(&output);
        assert_eq!(text.contains("warning: found TOKENYARD_LOG=\"core=loud\""), warns, "{text}");
    }
}

#[test]
fn warm_says_where_there_is_nothing_to_compile_and_what_it_cannot_compile_for() {
    let config = Config::new();
    let output = call(&["warm", config.path().to_str().unwrap(), "--json"]);
    expect_code(&output, 0);
    assert!(stderr(&output).contains("kernel set cpu compiles nothing"), "{}", stderr(&output));
    assert_eq!(json(&output)["kernels"], "cpu");
    let text = std::fs::read_to_string(config.path()).unwrap();
    std::fs::write(config.path(), text.replace("\"cpu\"", "\"cuda\"")).unwrap();
    let output = call(&["warm", config.path().to_str().unwrap(), "--capability", "75"]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("found sm_75; expected sm_80"), "{}", stderr(&output));
}

#[test]
fn the_help_of_each_command_has_an_example() {
    for command in [
        "run",
        "plugins",
        "doctor",
        "explain",
        "shape",
        "warm",
        "version",
        "completions",
        "bench",
        "bench dispatch",
        "bench gather",
        "bench pipe",
        "bench table",
        "bench ring",
        "bench nic",
    ] {
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let output = call(&words);
        expect_code(&output, 0);
        let text = stdout(&output);
        assert!(text.contains(&format!("\n  tokenyard {command}")), "{command}: {text}");
    }
}

#[test]
fn figures_of_gpus_need_a_config_of_gpus_and_plots_a_report_of_them() {
    let config = Config::with("");
    let path = config.path();
    let path = path.to_str().unwrap();
    for command in ["dispatch", "combine", "ring", "nic"] {
        let output = call(&["bench", command, path]);
        expect_code(&output, 2);
        let text = stderr(&output);
        assert!(text.contains("found kernels.use = \"cpu\"; expected \"cuda\""), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
    let picture = config.file("a.svg");
    let output = call(&["bench", "plot", path, "--out", picture.to_str().unwrap()]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("config.toml"), "{}", stderr(&output));
    let output = call(&["bench", "link", path, "--plot", "a.svg"]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("expected a config of GPUs"), "{}", stderr(&output));
}

#[test]
fn operations_beside_moe_are_measured_beside_a_plain_copy() {
    let config = Config::with("");
    let path = config.path();
    let path = path.to_str().unwrap();
    for (command, options, expected) in [
        (
            "gather",
            "--bytes 4096,8192",
            &["all-gather", "reduce-scatter", "all-reduce", "all-gather"][..],
        ),
        ("gather", "--ranks 3 --bytes 64", &["all-gather"]),
        ("pipe", "--ranks 3 --bytes 8", &["message", "one way"]),
        ("table", "--entries 100 --entry-bytes 24 --indices 7", &["fetch"]),
    ] {
        let options = options.split(' ').chain(["--samples", "2", "--json"]);
        let words: Vec<&str> = ["bench", command, path].into_iter().chain(options).collect();
        let output = call(&words);
        expect_code(&output, 0);
        let report = common::json(&output)["operations"].take();
        assert_eq!(report["ceiling"], "plain copy", "{report}");
        let rows = report["rows"].as_array().unwrap();
        let found: Vec<_> = rows.iter().filter_map(|row| row["operation"].as_str()).collect();
        assert!(found.starts_with(expected), "{command}: {found:?}");
        let is_measured = |row: &serde_json::Value| row["ms"].as_f64() > Some(0.0);
        assert!(rows.iter().all(|row| row["samples"] == 2 && is_measured(row)), "{report}");
    }
}

#[test]
fn bench_names_the_benchmarks_of_gpus_where_the_config_is_theirs() {
    let config = Config::with("");
    let gpus = config.file("gpus.toml");
    let text = "[kernels]\nuse = \"cuda\"\n[transport.scale_up]\nuse = \"nvlink\"\n";
    std::fs::write(&gpus, text).unwrap();
    let path = gpus.to_str().unwrap();
    let output = call(&["bench", path]);
    expect_code(&output, 2);
    let text = stderr(&output);
    assert!(text.contains("found a config with the kernel set `cuda`; expected `cpu`"), "{text}");
    assert!(text.contains(&format!("tokenyard bench dispatch {path}")), "{text}");
}

#[test]
fn nothing_is_coloured_where_no_terminal_reads() {
    let output = call(&["plugins"]);
    assert!(!stdout(&output).contains('\x1b'));
}

#[test]
fn a_terminal_gets_colours_and_no_panic() {
    // `script` of bsdutils makes a terminal for both streams, and returns the exit code.
    let line = format!("{} plugins", env!("CARGO_BIN_EXE_tokenyard"));
    let mut command = Command::new("script");
    command.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null());
    command.env_remove("NO_COLOR").env("TOKENYARD_LOG", "debug");
    let output = command.output().unwrap();
    expect_code(&output, 0);
    let text = stdout(&output);
    assert!(text.contains('\x1b') && text.contains("shm"), "{text}");
    // mpirun gives ranks a terminal, and writes what they print into a log.
    for (size, rank) in [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")]
    {
        let output =
            command.env(size, "2").env(rank, "0").env("MPI_LOCALRANKID", "0").output().unwrap();
        expect_code(&output, 0);
        let text = stdout(&output);
        assert!(!text.contains('\x1b') && text.contains("shm"), "{text}");
        command.env_remove(size).env_remove(rank);
    }
}

#[test]
fn an_error_on_a_terminal_is_wrapped_and_in_a_log_it_is_one_line() {
    let words = "run /no/such/config.toml";
    let mut command = Command::new("script");
    let line = format!("{} {words}", env!("CARGO_BIN_EXE_tokenyard"));
    command.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null()).env("NO_COLOR", "1");
    let shown = stdout(&command.output().unwrap());
    assert!(shown.lines().count() > 1, "{shown}");
    assert!(shown.lines().all(|line| line.trim_end().chars().count() <= 80), "{shown}");
    let plain = stderr(&call(&words.split(' ').collect::<Vec<_>>()));
    assert_eq!(plain.lines().count(), 1, "{plain}");
    let joined = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(joined(&shown), joined(&plain));
}

#[test]
fn a_wrong_config_is_an_error_that_names_the_line_once() {
    let config = Config::with("[plugins]\npath = []");
    let output = call(&["run", config.path().to_str().unwrap()]);
    expect_code(&output, 2);
    let text = stderr(&output);
    assert!(text.contains("config.toml:"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert_eq!(stdout(&output), "");
}

#[test]
fn a_program_that_asked_for_a_document_gets_one_with_the_error() {
    for command in ["run", "plugins", "doctor"] {
        let output = call(&[command, "/no/such/config.toml", "--json"]);
        expect_code(&output, 2);
        let document = json(&output);
        assert_eq!(document["schema_version"], 5);
        let error = document["error"].as_str().unwrap();
        assert!(error.contains("/no/such/config.toml"), "{error}");
        assert!(stderr(&output).contains(error));
    }
}

/// A config of this text, and its errors as `config check` finds them.
fn config_check(text: &str) -> (Output, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fabric.toml");
    std::fs::write(&path, text).unwrap();
    let output = call(&["config", "check", path.to_str().unwrap(), "--ranks", "4", "--json"]);
    let errors = json(&output)["errors"].as_array().unwrap().clone();
    (output, errors.iter().map(|error| error.as_str().unwrap().to_owned()).collect())
}

#[test]
fn config_check_names_every_error_with_its_line_those_of_components_too() {
    let (output, errors) = config_check(
        "[world]\nbootstrap = \"tcp://host:99999\"\ndeadline_ms = 5\ndeadine = 3\n\
         [kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n\
         [topology]\ndomains = 0\n",
    );
    expect_code(&output, 1);
    for (line, words) in [
        (2, "has the port \"99999\", which is not in 1 to 65535"),
        (3, "deadline_ms = 5 is out of range"),
        (4, "unknown key `deadine`"),
        (10, "topology.domains = 0 is out of range"),
    ] {
        let place = format!("fabric.toml:{line}: ");
        let found = errors.iter().any(|error| error.contains(&place) && error.contains(words));
        assert!(found, "expected `{place}... {words}` in {errors:#?}");
    }
    assert_eq!(errors.len(), 4, "{errors:#?}");

    // Wrong keys do not hide wrong components.
    let (output, errors) = config_check(
        "[world]\ndeadine = 3\n[kernels]\nuse = \"cup\"\nthreads = 1\n\
         [transport.scale_up]\nuse = \"smh\"\n[topology]\ndomains = 0\n",
    );
    expect_code(&output, 1);
    for words in [
        "fabric.toml:2: unknown key `deadine`",
        "fabric.toml:5: unknown key `threads`",
        "topology.domains = 0 is out of range",
        "no kernel set is called `cup`",
        "no transport is called `smh`",
    ] {
        assert!(errors.iter().any(|error| error.contains(words)), "{words}: {errors:#?}");
    }
    assert_eq!(errors.len(), 5, "{errors:#?}");
    // No error sends the reader to the table of a component that does not exist.
    assert!(!errors.iter().any(|error| error.contains("[kernels.cup]")), "{errors:#?}");

    let (output, errors) = config_check(
        "[kernels]\nuse = \"cpu\"\n[kernels.cpu]\n\nthreads = 0\n\
         [transport.scale_up]\nuse = \"smh\"\n[topology]\ndomains = 3\n\
         [topology.auto]\nhost = \"\"\n[plugins]\npaths = [\n  \"/none/libx.so\",\n]\n",
    );
    expect_code(&output, 1);
    for (line, words) in [
        (5, "`threads`: found 0; expected 1 to 256"),
        (7, "no transport is called `smh`"),
        (7, "did you mean `shm`?"),
        (9, "topology.domains = 3; expected a divisor of 4 ranks"),
        (11, "`host` has 0 bytes"),
        (14, "the file cannot be read"),
    ] {
        let place = format!("fabric.toml:{line}: ");
        let found = errors.iter().any(|error| error.contains(&place) && error.contains(words));
        assert!(found, "expected `{place}... {words}` in {errors:#?}");
    }
}

#[test]
fn config_check_of_a_right_config_says_ok_and_what_it_chooses() {
    let config = Config::new();
    let config = config.path();
    let output = call(&["config", "check", config.to_str().unwrap()]);
    expect_code(&output, 0);
    let text = stdout(&output);
    assert!(text.contains(": ok: kernels cpu, scale-up shm, scale-out none"), "{text}");
    let document = json(&call(&["config", "check", config.to_str().unwrap(), "--json"]));
    assert_eq!((&document["ok"], &document["chosen"]["kernels"]), (&true.into(), &"cpu".into()));
    let missing = call(&["config", "check", "/none/fabric.toml"]);
    expect_code(&missing, 2);
    assert!(stderr(&missing).contains("/none/fabric.toml"), "{}", stderr(&missing));
}

#[test]
fn each_of_several_errors_of_a_config_begins_as_an_error() {
    let config = Config::with("[kernels.cpu]\nthreads = 0\n[topology.auto]\nhosts = 1");
    let output = call(&["run", config.path().to_str().unwrap()]);
    expect_code(&output, 2);
    let text = stderr(&output);
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.lines().all(|line| line.starts_with("error: ")), "{text}");
    assert!(text.contains("`threads`: found 0") && text.contains("unknown key `hosts`"), "{text}");
}

#[test]
fn a_run_names_the_line_of_what_the_config_has_wrong_before_a_rank_starts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fabric.toml");
    let shm = "[transport.scale_up]\nuse = \"shm\"\n";
    for (text, place) in [
        ("[kernels]\nuse = \"cup\"\n", "fabric.toml:2: no kernel set is called `cup`"),
        ("[kernels]\nuse = \"cpu\"\n[kernels.cpu]\nthreads = 0\n", "fabric.toml:4: "),
        ("[kernels]\nuse = \"cpu\"\n[topology]\ndomains = 3\n", "fabric.toml:4: "),
        ("[kernels]\nuse = \"cpu\"\n[world]\nbootstrap = \"tcp://h:99999\"\n", "fabric.toml:4: "),
    ] {
        std::fs::write(&path, format!("{text}{shm}")).unwrap();
        let output = call(&["run", path.to_str().unwrap(), "--ranks", "4", "--steps", "1"]);
        expect_code(&output, 2);
        assert!(stderr(&output).contains(place), "{place}: {}", stderr(&output));
        // The launcher reports it, not each rank.
        assert_eq!(stderr(&output).matches("fabric.toml:").count(), 1, "{}", stderr(&output));
        assert!(!stderr(&output).contains("rank "), "{}", stderr(&output));
        assert_eq!(stdout(&output), "", "{place}");
    }
}
