//! `tokenyard run` on real processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{
    Config, children, expect_code, json, lives, repository, run, stderr, stdout, tokenyard,
};
use rustix::process::{Pid, Signal, kill_process};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

const SMALL: &str = "--tokens 12 --hidden 128 --experts 8 --topk 3 --steps 3";

#[test]
fn every_number_of_ranks_and_layout_is_right() {
    let config = Config::new();
    for ranks in [1, 2, 4] {
        for layout in ["flat", "expert-major --alignment 8", "packed", "rank-major"] {
            let output = run(&config, &format!("{SMALL} --ranks {ranks} --layout {layout}"));
            expect_code(&output, 0);
            let text = stdout(&output);
            assert!(text.contains("check: passed"), "{text}");
            let table = text.lines().skip_while(|line| !line.starts_with("rank  tokens"));
            let table: Vec<&str> = table.take_while(|line| !line.is_empty()).collect();
            let lines = table.len() - 1;
            assert_eq!(lines, ranks + 1, "one line per rank and one for all:\n{text}");
            assert!(table.iter().all(|line| line.len() <= 80), "{text}");
        }
    }
}

#[test]
fn every_type_and_routing_is_right() {
    let config = Config::new();
    for (kind, routing) in [
        ("fp16", "own-rank"),
        ("fp32", "some-negative"),
        ("fp8", "some-nothing"),
        ("fp8-round", "nothing"),
        ("fp8-ue8m0", "one-expert"),
    ] {
        let more = format!("{SMALL} --ranks 2 --input-type {kind} --routing {routing}");
        expect_code(&run(&config, &more), 0);
    }
}

#[test]
fn the_last_line_of_standard_output_is_one_document_and_all_else_is_on_standard_error() {
    let output = run(&Config::new(), &format!("{SMALL} --ranks 2 --seed 5 --json"));
    expect_code(&output, 0);
    assert_eq!(stdout(&output).lines().count(), 1);
    assert!(stderr(&output).contains("check: passed"));
    let document = json(&output);
    assert_eq!(document["schema_version"], 5);
    assert_eq!(document["command"], "run");
    assert_eq!(document["seed"], 5);
    assert_eq!(document["steps"], 3);
    assert_eq!(document["check"]["passed"], true);
    assert_eq!(document["communicator"]["scale_up"]["transport"], "shm");
    assert_eq!(document["shape"]["layout"], "flat");
    assert_eq!(document["config"]["agreed"]["world.deadline_ms"], 6000);
    assert!(document["conditions"]["cores"].as_u64().unwrap() > 0);
    let ranks = document["ranks"].as_array().unwrap();
    let sum = |key: &str| ranks.iter().map(|r| r[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!(ranks.len(), 2);
    assert_eq!(sum("rows_sent"), sum("rows_received"));
    assert!(ranks.iter().all(|rank| rank["dispatch_us"].as_f64().unwrap() > 0.0));
    // Combine returned T rows per step, and every received row was compared.
    let elements = (2 * 12 * 3 + sum("rows_received")) * 128;
    assert_eq!(document["check"]["elements"].as_u64(), Some(elements));
}

#[test]
fn the_same_seed_gives_the_same_routing_and_another_seed_another() {
    let config = Config::new();
    let rows = |seed: u32| {
        let more = format!("{SMALL} --ranks 2 --steps 1 --seed {seed} --json");
        json(&run(&config, &more.replace("--steps 3 ", "")))["ranks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|rank| rank["rows_received"].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(rows(1), rows(1));
    assert!((2..6).any(|seed| rows(seed) != rows(1)));
}

#[test]
fn the_sample_is_skewed_and_its_exchange_is_right() {
    let sample = repository("samples/skewed-router.safetensors");
    assert!(std::fs::metadata(&sample).unwrap().len() < 200 << 10);
    let more = format!("--steps 2 --json --input {}", sample.display());
    let output = run(&Config::new(), &more);
    expect_code(&output, 0);
    let document = json(&output);
    let skew = document["busiest_expert_over_mean"].as_f64().unwrap();
    assert!(skew >= 4.0, "the busiest expert has {skew} times the mean load");
    assert_eq!(document["shape"]["experts"], 32);
}

#[test]
fn the_traffic_of_a_recorded_routing_is_that_of_its_run_among_domains() {
    let sample = "samples/skewed-router.safetensors";
    let ask = |arguments: &str| {
        let mut command = tokenyard();
        command.current_dir(repository(".")).args(arguments.split_whitespace());
        let output = command.args(["--json", "--input", sample]).output().unwrap();
        expect_code(&output, 0);
        json(&output)
    };
    let ran = ask("run configs/domains.toml --ranks 4 --steps 3");
    assert_eq!(ran["communicator"]["domains"], 2);
    let modelled =
        ask("shape --ranks 4 --domains 2 --experts 32 --topk 4 --hidden 128 --max-tokens 128");
    let (ran, modelled) =
        (ran["ranks"].as_array().unwrap(), modelled["recorded"].as_array().unwrap());
    assert_eq!((ran.len(), modelled.len()), (4, 4));
    for (ran, modelled) in ran.iter().zip(modelled) {
        let rows = modelled["rows_received"].as_f64().unwrap();
        assert_eq!(3.0 * rows, ran["rows_received"].as_f64().unwrap(), "{ran}");
        // bf16 rows of 128 elements.
        assert_eq!(3.0 * 256.0 * rows, ran["bytes_received"].as_f64().unwrap());
        assert_eq!(modelled["tokens"].as_f64(), ran["tokens"].as_f64());
    }
    // Some of the rows that all ranks received stayed; each other one was moved once inside a domain.
    let sum = |of: fn(&Value) -> &Value| {
        modelled.iter().map(|rank| of(rank).as_f64().unwrap()).sum::<f64>()
    };
    let moved = sum(|rank| &rank["dispatch"]["inside"]["rows"]);
    assert!(moved < sum(|rank| &rank["rows_received"]));
    assert_eq!(moved, sum(|rank| &rank["combine"]["inside"]["rows"]));
    assert_eq!(
        sum(|rank| &rank["dispatch"]["out"]["rows"]),
        sum(|rank| &rank["combine"]["out"]["rows"])
    );
}

#[test]
fn a_row_crosses_once_to_each_other_domain_and_what_goes_beside_it_is_below_two_percent() {
    let mut command = tokenyard();
    let sizes = "--tokens 64 --hidden 7168 --topk 8 --experts 32 --steps 2 --ranks 4 --json";
    let arguments = ["run", "configs/domains.toml"].into_iter().chain(sizes.split_whitespace());
    let output = command.current_dir(repository(".")).args(arguments).output().unwrap();
    expect_code(&output, 0);
    let document = json(&output);
    let ranks = document["ranks"].as_array().unwrap();
    let sum = |key: &str| ranks.iter().map(|rank| rank[key].as_u64().unwrap()).sum::<u64>();
    let (put, rows) = (sum("out_bytes"), sum("out_row_bytes"));
    assert!(rows < put && put * 100 <= rows * 102, "{put} bytes for {rows} of rows");
    // A direct exchange would send one to each rank: with top-8 of 32, nearly all go to both of the other domain.
    let pairs = rows / (2 * 2 * 7168);
    assert!(pairs <= 2 * 4 * 64 && sum("rows_sent") > 3 * pairs, "{pairs} crossings");
    assert!(stderr(&output).contains("between domains: "), "{}", stderr(&output));
}

#[test]
fn the_output_holds_what_each_rank_got() {
    let config = Config::new();
    let out = config.file("out.safetensors");
    let more = format!("{SMALL} --ranks 2 --layout packed --output {}", out.display());
    expect_code(&run(&config, &more), 0);
    let bytes = std::fs::read(&out).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for rank in 0..2 {
        let tensor = |name: &str| file.tensor(&format!("rank{rank}.{name}")).unwrap();
        assert_eq!((tensor("x").dtype(), tensor("x").shape()), (Dtype::BF16, &[12, 128][..]));
        assert!(tensor("x").data().iter().any(|byte| *byte != 0));
        assert_eq!(tensor("topk_weights").shape(), [12, 3]);
        assert_eq!(tensor("expert_counts").shape(), [4]);
        assert_eq!(tensor("source_counts").shape(), [2]);
    }
    let left = std::fs::read_dir(out.parent().unwrap()).unwrap().count();
    assert_eq!(left, 2, "the config and the output, and nothing else");
}

#[test]
fn what_is_wrong_is_refused_before_a_rank_starts() {
    let config = Config::new();
    let cut = config.file("cut.safetensors");
    let sample = std::fs::read(repository("samples/skewed-router.safetensors")).unwrap();
    std::fs::write(&cut, &sample[..9000]).unwrap();
    let cut = format!("--input {}", cut.display());
    let sample = repository("samples/skewed-router.safetensors");
    let sample = format!("--input {}", sample.display());
    for (arguments, reason) in [
        ("--topk 40 --experts 64".to_owned(), "found topk = 40; expected at most 32"),
        ("--ranks 3".to_owned(), "32 experts on 3 ranks"),
        ("--ranks 2048 --experts 2048".to_owned(), "at most 1024 on one machine"),
        ("--hidden 4".to_owned(), "rows of 8 bytes; expected a multiple of 16"),
        (cut, "cut short"),
        (format!("{sample} --experts 64"), "num_experts = 32 in the file"),
        (format!("{sample} --input-type fp32"), "found rows of bf16"),
        ("--input /no/such/file".to_owned(), "/no/such/file"),
        ("--output /no/such/folder/out".to_owned(), "Fix: mkdir -p /no/such/folder"),
        ("--tokens 100000000 --hidden 65536".to_owned(), "of memory"),
    ] {
        let output = run(&config, &arguments);
        expect_code(&output, 2);
        let text = stderr(&output);
        assert!(text.contains(reason), "{arguments}: {text}");
        assert_eq!(stdout(&output), "", "{arguments}: nothing has run");
    }
}

#[test]
fn an_error_of_all_ranks_is_shown_once() {
    // The config is checked before ranks start; each rank checks the environment itself.
    let mut command = tokenyard();
    let config = Config::new();
    command.arg("run").arg(config.path()).env("TOKENYARD_REPORTS", "not/absolute");
    let output =
        command.args(format!("{SMALL} --ranks 4 --json").split_whitespace()).output().unwrap();
    expect_code(&output, 2);
    let text = stderr(&output);
    assert_eq!(text.matches("expected an absolute path, or none").count(), 1, "{text}");
    assert!(text.contains("ranks 0-3"), "{text}");
    let document = json(&output);
    assert_eq!(document["check"]["passed"], false);
    assert_eq!(document["failures"][0]["ranks"].as_array().unwrap().len(), 4);
}

/// A run that lasts until it is disturbed; returns its process and those of its ranks.
fn endless(config: &Config) -> (Child, Vec<i32>) {
    start(config, 3, "--experts 9 --steps 40000000 --tokens 8 --hidden 64")
}

/// A run whose ranks have begun, and the processes of these.
fn start(config: &Config, ranks: usize, more: &str) -> (Child, Vec<i32>) {
    let mut command = tokenyard();
    command.arg("run").arg(config.path()).arg("--ranks").arg(ranks.to_string());
    command.args(more.split_whitespace());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    match running_ranks(child.id(), ranks) {
        Some(ranks) => (child, ranks),
        None => {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the ranks do not start");
        }
    }
}

/// The ranks of a launcher, once they have mapped each other's windows: they are past bring-up.
fn running_ranks(launcher: u32, count: usize) -> Option<Vec<i32>> {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(20) {
        let ranks = children(launcher);
        if ranks.len() == count && ranks.iter().all(|pid| maps_windows(*pid)) {
            return Some(ranks);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}

fn maps_windows(pid: i32) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.matches("/memfd:").count() >= 6
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// Waits for the end of a disturbed run and returns its standard error.
fn end_of(mut child: Child, ranks: &[i32], limit: Duration) -> String {
    let start = Instant::now();
    let text: Vec<String> =
        BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok).collect();
    let status = child.wait().unwrap();
    assert!(start.elapsed() < limit, "it took {:?}", start.elapsed());
    assert_eq!(status.code(), Some(2));
    assert!(!ranks.iter().any(|pid| lives(*pid)), "a rank is left behind");
    text.join("\n")
}

/// The first error, behind the warnings of ranks.
fn first_error(text: &str) -> &str {
    text.lines().find(|line| line.starts_with("error: ")).unwrap_or_default()
}

#[test]
fn a_killed_rank_ends_the_run_is_named_first_and_nothing_is_left() {
    let config = Config::new();
    let (child, ranks) = endless(&config);
    signal(ranks[1], Signal::KILL);
    let text = end_of(child, &ranks, Duration::from_secs(6));
    assert!(first_error(&text).contains("rank 1: it died: killed by signal 9"), "{text}");
    // The kernel either closes or resets the connection.
    assert!(text.contains("connection without a goodbye"), "{text}");
}

/// Checks that the other ranks of a run that masks losses did all steps correctly; returns their
/// account of the loss.
fn goes_on_without(config: &Config, ranks: usize, victim: usize, how: Signal) -> Value {
    let out = config.file("out.safetensors");
    let more = format!(
        "--experts 12 --topk 3 --tokens 24 --hidden 256 --steps 1500 --json --output {}",
        out.display()
    );
    let (child, pids) = start(config, ranks, &more);
    signal(pids[victim], how);
    let output = child.wait_with_output().unwrap();
    expect_code(&output, 0);
    assert!(!pids.iter().any(|pid| lives(*pid)), "a rank is left behind");
    assert!(stderr(&output).contains(&format!("lost: rank {victim} from step")), "{output:?}");
    let document = json(&output);
    assert_eq!(document["check"]["passed"], true);
    assert_eq!(document["ranks"].as_array().unwrap().len(), ranks - 1);
    let bytes = std::fs::read(&out).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for rank in 0..ranks {
        assert_eq!(file.tensor(&format!("rank{rank}.x")).is_ok(), rank != victim);
    }
    let lost = document["lost_ranks"].as_array().unwrap();
    assert_eq!(lost.len(), 1);
    assert_eq!(lost[0]["rank"], victim);
    assert!((1..=1500).contains(&lost[0]["from_step"].as_u64().unwrap()), "{lost:?}");
    assert!(document["tokens_missing_experts"].as_u64().unwrap() > 0);
    document
}

#[test]
fn ranks_that_mask_losses_go_on_without_a_killed_one_and_are_right() {
    let document = goes_on_without(&Config::masking(30_000, ""), 3, 1, Signal::KILL);
    let lost = &document["lost_ranks"][0];
    // A kill may hit the rank within a call that it announced, and the account names that call then.
    let how = lost["how"].as_str().unwrap();
    let (died, _) =
        how.split_once("; the last call of a component that it announced is").unwrap_or((how, ""));
    assert_eq!(died, "it died: killed by signal 9");
    for rank in document["ranks"].as_array().unwrap() {
        let from = rank["lost"][0]["from_step"].as_u64().unwrap();
        assert!(
            from >= lost["from_step"].as_u64().unwrap(),
            "the first step of any rank is reported"
        );
    }
}

#[test]
fn ranks_that_mask_losses_go_on_without_a_stopped_one_which_is_killed_in_the_end() {
    let document = goes_on_without(&Config::masking(5000, ""), 3, 2, Signal::STOP);
    let how = document["lost_ranks"][0]["how"].as_str().unwrap();
    assert!(how.contains("it did not end with the others"), "{how}");
}

/// Its sources on the same rail lose its whole domain.
#[test]
fn ranks_that_mask_losses_go_on_without_one_that_others_pass_on_the_way_to_its_domain() {
    let scale_out = "[transport.scale_out]\nuse = \"shm\"\n[topology]\ndomains = 2";
    goes_on_without(&Config::masking(30_000, scale_out), 4, 3, Signal::KILL);
}

#[test]
fn a_stopped_rank_ends_the_run_within_the_deadline_and_nothing_is_left() {
    let config = Config::new();
    let (child, ranks) = endless(&config);
    signal(ranks[2], Signal::STOP);
    let text = end_of(child, &ranks, Duration::from_secs(8));
    assert!(first_error(&text).contains("rank 2: it did not end with the others"), "{text}");
    // The deadlines of heartbeats and of the wait itself end at about the same time; either may be
    // first.
    let texts = ["rank 2 was silent", "rank 2 did not finish phase"];
    assert!(texts.iter().any(|words| text.contains(words)), "{text}");
}

#[test]
fn a_world_of_another_launcher_is_joined_and_rank_0_reports() {
    let config = Config::new();
    let out = config.file("out.safetensors");
    let bootstrap = format!("file://{}", config.file("rendezvous").display());
    let rank = |rank: &str| {
        let mut command = tokenyard();
        command.arg("run").arg(config.path()).args(SMALL.split_whitespace());
        command.args(["--as-rank", "--json", "--output"]).arg(&out);
        let place = [("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)];
        command.envs(place).env("TOKENYARD_BOOTSTRAP", &bootstrap);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let (zero, one) = (rank("0"), rank("1"));
    let (zero, one) = (zero.wait_with_output().unwrap(), one.wait_with_output().unwrap());
    expect_code(&zero, 0);
    expect_code(&one, 0);
    assert_eq!(json(&zero)["ranks"].as_array().unwrap().len(), 2);
    assert_eq!(stdout(&one), "");
    assert!(stderr(&one).contains("rank 1:"), "{}", stderr(&one));
    assert!(config.file("out.rank0.safetensors").exists());
    assert!(config.file("out.rank1.safetensors").exists());
}

#[test]
fn a_process_that_a_launcher_started_starts_no_world_of_its_own_unless_asked() {
    let config = Config::new();
    let torchrun = [("RANK", "1"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")];
    let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "8"), ("SLURM_LOCALID", "1")];
    for (variables, found) in [
        (torchrun, "RANK=1, WORLD_SIZE=8 (torchrun)"),
        (slurm, "SLURM_PROCID=1, SLURM_NTASKS=8 (Slurm)"),
    ] {
        for command in ["run", "bench link"] {
            let mut refused = tokenyard();
            refused.args(command.split(' ')).arg(config.path()).envs(variables);
            let output = refused.output().unwrap();
            expect_code(&output, 2);
            let text = stderr(&output);
            assert!(text.contains(found), "{command}: {text}");
            assert!(
                text.contains("--as-rank") && text.contains("--start-ranks"),
                "{command}: {text}"
            );
            assert_eq!(stdout(&output), "", "{command}");
        }
    }
    let mut asked = tokenyard();
    asked.arg("run").arg(config.path()).args(SMALL.split_whitespace());
    expect_code(&asked.arg("--start-ranks").envs(torchrun).output().unwrap(), 0);
    // A world of one is no other world.
    let mut alone = tokenyard();
    alone.arg("run").arg(config.path()).args(SMALL.split_whitespace());
    expect_code(&alone.envs([("RANK", "0"), ("WORLD_SIZE", "1")]).output().unwrap(), 0);
}

#[test]
fn ranks_with_different_arguments_learn_what_differs() {
    let config = Config::new();
    let bootstrap = format!("file://{}", config.file("rendezvous").display());
    let rank = |rank: &str, seed: &str| {
        let mut command = tokenyard();
        command.arg("run").arg(config.path()).args(SMALL.split_whitespace());
        command.args(["--as-rank", "--seed", seed]);
        let place = [("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)];
        command.envs(place).env("TOKENYARD_BOOTSTRAP", &bootstrap);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let (zero, one) = (rank("0", "1"), rank("1", "2"));
    for rank in [zero, one] {
        let output = rank.wait_with_output().unwrap();
        expect_code(&output, 2);
        assert!(stderr(&output).contains("exchange"), "{}", stderr(&output));
    }
}
