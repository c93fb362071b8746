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
fn links_are_told_by_the_unique_name_of_the_gpu() {
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

#[test]
fn a_command_that_is_late_one_that_fails_and_one_that_is_not_installed_differ() {
    let start = Instant::now();
    let late = Run::start(&["sleep", "1000"]).output(start + Duration::from_millis(50));
    assert_eq!(late, Fact::Late);
    let long = || Instant::now() + Duration::from_secs(60);
    assert_eq!(Run::start(&["false"]).output(long()), Fact::Failed(1));
    assert_eq!(Run::start(&["sh", "-c", "kill -9 $$"]).output(long()), Fact::Failed(137));
    assert_eq!(Run::start(&["no-such-program-here"]).output(long()), Fact::Missing);
    assert_eq!(Run::start(&["echo", "hello"]).output(long()), Fact::Known("hello\n".into()));
    assert!(start.elapsed() < Duration::from_secs(900));
}

proptest! {
    #[test]
    fn no_text_panics(text in "(GPU [0-9a-f:.]{0,14}\n|    [A-Z]{0,4}\n|        [A-Za-z]{1,8} : [A-Z0-9/]{0,4}\n|Link [0-9]: [0-9.]{0,4} GB/s\n|[a-z_]{1,9}: [0-9a-z]{0,4}\n|\\PC{0,20}\n){0,10}") {
        let _ = (smi(&text), nvlinks(&text), active_mtus(&text), fabrics(&text));
    }
}
