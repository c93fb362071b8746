use proptest::prelude::*;

use super::*;

#[test]
fn nvidia_smi_tells_mig_and_the_fabric_of_each_gpu() {
    let text = "\
==============NVSMI LOG==============

Attached GPUs                             : 2
GPU 00000008:01:00.0
    Product Name                          : NVIDIA GB200
    MIG Mode
        Current                           : Disabled
        Pending                           : Enabled
    Inforom Version
        State                             : not of the fabric
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 32766
        ClusterUUID                       : b82bcdd5-1f9b-4c3a-8b0e-0c1d2e3f4a5b
        Health
            Bandwidth                     : Full
    Clocks
        State                             : not of the fabric
GPU 00000009:01:00.0
    MIG Mode
        Current                           : N/A
    Fabric
        State                             : In Progress
        Status                            : N/A
        CliqueId                          : N/A
";
    let gpus = smi(text);
    assert_eq!(gpus.len(), 2);
    assert_eq!(gpus[0].pci.to_string(), "0008:01:00.0");
    assert_eq!(gpus[0].mig, Fact::Known(false));
    let fabric = gpus[0].fabric.known().unwrap();
    assert_eq!(fabric.state, Fact::Known("Completed".into()));
    assert_eq!(fabric.clique, Fact::Known(32766));
    assert_eq!(gpus[1].mig, Fact::Missing);
    assert_eq!(gpus[1].fabric.known().unwrap().clique, Fact::Missing);
}

#[test]
fn links_are_found_by_the_unique_name_of_the_gpu() {
    let links = nvlinks(
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n\
         GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)\n",
    );
    let expected =
        [NvLink { link: 0, megabytes: Some(26_562) }, NvLink { link: 1, megabytes: None }];
    assert_eq!(links["GPU-aaaa"], expected);
    assert!(links["GPU-bbbb"].is_empty());
}

#[test]
fn message_units_and_fabric_domains_are_read() {
    let text = "hca_id:\tmlx5_0\n\ttransport:\tInfiniBand (0)\n\t\tport:\t1\n\t\t\tmax_mtu:\t4096 (5)\n\t\t\tactive_mtu:\t1024 (3)\n";
    assert_eq!(active_mtus(text), BTreeMap::from([(("mlx5_0".to_owned(), 1), 1024)]));
    let text = "provider: efa\n    fabric: efa\n    domain: rdmap85s0-rdm\n    version: 122.0\n    type: FI_EP_RDM\n";
    let domain = FabricDomain {
        provider: "efa".into(),
        domain: "rdmap85s0-rdm".into(),
        version: Some("122.0".into()),
    };
    assert_eq!(fabrics(&[text, text].concat()), [domain]);
}

fn run(words: &'static [&'static str], besides: &'static [&'static str], ms: u64) -> Answer {
    let deadline = Deadline { start: Instant::now(), patience: Duration::from_millis(ms) };
    Run::start(&Tool { file: "", words, besides, warning: Some(14) })?.output(&deadline)
}

fn failed(code: i32, last_line: &str) -> Answer {
    Err(Silence::Failed { code, last_line: last_line.to_owned() })
}

#[test]
fn a_command_says_why_it_has_no_answer() {
    const LONG: u64 = 60_000;
    let start = Instant::now();
    assert_eq!(run(&["sleep", "1000"], &[], 50), Err(Silence::Late { milliseconds: 50 }));
    assert_eq!(run(&["false"], &[], LONG), failed(1, ""));
    assert_eq!(run(&["true"], &[], LONG), failed(0, ""));
    assert_eq!(run(&["sh", "-c", "kill -9 $$"], &[], LONG), failed(137, ""));
    const LOUD: &str =
        "yes debug 2>/dev/null | head -n 100000 >&2; echo 'no data' >&2; echo out; exit 61";
    assert_eq!(run(&["sh", "-c", LOUD], &[], LONG), failed(61, "no data"));
    const SMI: &str = "echo; echo 'Failed to initialize NVML'; echo 'NVML 535.1'; exit 18";
    assert_eq!(run(&["sh", "-c", SMI], &[], LONG), failed(18, "Failed to initialize NVML"));
    let nowhere = run(&["no-such-program-here"], &["/no/such/folder"], LONG);
    assert_eq!(nowhere, Err(Silence::NotFound { besides: vec!["/no/such/folder".to_owned()] }));
    assert_eq!(run(&["echo", "hello"], &[], LONG), Ok("hello\n".into()));
    // The output is complete, and the exit code is a warning.
    assert_eq!(run(&["sh", "-c", "echo hello; exit 14"], &[], LONG), Ok("hello\n".into()));
    assert!(start.elapsed() < Duration::from_secs(900));
}

#[test]
fn a_command_outside_path_is_found_where_its_package_puts_it() {
    use std::os::unix::fs::PermissionsExt;
    let folder = std::env::temp_dir().join(format!("tokenyard-commands-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("fi_info-of-a-package");
    // A link: a file that was just written cannot be run while another thread forks.
    std::os::unix::fs::symlink("/bin/echo", &path).unwrap();
    let besides: &'static [&'static str] =
        Vec::leak(vec!["/no/such/folder", String::leak(folder.display().to_string())]);
    let words = &["fi_info-of-a-package", "efa"];
    assert_eq!(run(words, besides, 60_000), Ok("efa\n".into()));
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let refused = run(words, besides, 60_000).unwrap_err().in_words("fi_info");
    assert!(refused.starts_with("fi_info cannot be run: Permission denied"), "{refused}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_recorded_tree_says_why_a_command_has_no_answer() {
    let tree = Tree::recorded(
        "tokenyard/fi_info.exit = 61 fi_getinfo: -61 (No data available)\n\
         tokenyard/ibv_devinfo.exit = missing\ntokenyard/nvidia-smi-q.exit = late 700\n",
    );
    let words = Outputs::recorded(&tree.unwrap()).silent();
    let words: Vec<String> = words.iter().map(|(name, why)| why.in_words(name)).collect();
    assert_eq!(
        words,
        [
            "fi_info failed with exit code 61: fi_getinfo: -61 (No data available)",
            "ibv_devinfo is not installed: not in PATH, nor in /usr/bin, /usr/sbin",
            "nvidia-smi -q did not answer in 700 ms",
            "nvidia-smi nvlink -s was not run, and its output is not recorded",
        ]
    );
}

proptest! {
    #[test]
    fn no_text_panics(text in "(GPU [0-9a-f:.]{0,14}\n|    [A-Z]{0,4}\n|        [A-Za-z]{1,8} : [A-Z0-9/]{0,4}\n|Link [0-9]: [0-9.]{0,4} GB/s\n|[a-z_]{1,9}: [0-9a-z]{0,4}\n|\\PC{0,20}\n){0,10}") {
        let _ = (smi(&text), nvlinks(&text), active_mtus(&text), fabrics(&text));
    }
}
