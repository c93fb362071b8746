use proptest::prelude::*;

use super::*;

#[test]
fn rights_and_limits_of_a_container_are_read() {
    let tree = Tree::recorded(
        "proc/self/status = Uid:\\t1000\\t1001\\t1000\\t1000\\nCapEff:\\t00000000a80425fb\\nSeccomp:\\t2\n\
         proc/self/uid_map = 0 100000 65536\n\
         proc/self/cgroup = 0::/kubepods/pod1/x\n\
         proc/self/environ = PATH=/bin\\0NCCL_IB_HCA=mlx5\\0SECRET=1\\0LD_LIBRARY_PATH=/a:/b\\0\n\
         sys/fs/cgroup/cgroup.controllers = cpu memory\n\
         sys/fs/cgroup/kubepods/pod1/x/memory.max = max\n\
         sys/fs/cgroup/kubepods/pod1/memory.max = 1048576\n\
         sys/fs/cgroup/kubepods/pod1/x/cpu.max = 250000 100000\n\
         dev/infiniband/rdma_cm !denied\n\
         dev/infiniband/uverbs0 =\n\
         dev/infiniband/by-path/x =\n\
         dev/nvidia0 =\n\
         dev/nvidia-caps-imex-channels/channel0 =\n\
         dev/sda =\n",
    )
    .unwrap();
    let container = read(&tree);
    assert_eq!(container.runtime, Fact::Known(Some("kubernetes".into())));
    assert_eq!(container.user, Fact::Known(1001));
    let capabilities = container.capabilities.get().unwrap();
    assert!(capabilities.has(Capabilities::NET_RAW));
    assert!(!capabilities.has(Capabilities::IPC_LOCK));
    assert!(!capabilities.has(200));
    assert_eq!(container.seccomp, Fact::Known(Seccomp::Filter));
    assert_eq!(container.in_user_namespace, Fact::Known(true));
    assert_eq!(container.cgroup.memory, Fact::Known(Bound::At(1 << 20)));
    assert_eq!(container.cgroup.millicpus, Fact::Known(Bound::At(2500)));
    let kept: Vec<_> = container.environment.keys().collect();
    assert_eq!(kept, ["LD_LIBRARY_PATH", "NCCL_IB_HCA"]);
    let nodes: Vec<_> = read_devices(&tree).nodes.into_iter().collect();
    assert_eq!(
        nodes,
        [
            ("infiniband/rdma_cm".to_owned(), Access::Refused),
            ("infiniband/uverbs0".to_owned(), Access::Granted),
            ("nvidia-caps-imex-channels/channel0".to_owned(), Access::Granted),
            ("nvidia0".to_owned(), Access::Granted),
        ]
    );
}

#[test]
fn version_1_of_control_groups_is_read() {
    let tree = Tree::recorded(
        "sys/fs/cgroup/memory/memory.limit_in_bytes = 9223372036854771712\n\
         sys/fs/cgroup/cpu/cpu.cfs_quota_us = -1\n\
         sys/fs/cgroup/cpu/cpu.cfs_period_us = 100000\n\
         proc/self/cgroup = 4:memory:/docker/1\n",
    )
    .unwrap();
    let container = read(&tree);
    assert_eq!(container.cgroup.version, Fact::Known(1));
    assert_eq!(container.cgroup.memory, Fact::Known(Bound::Unlimited));
    assert_eq!(container.cgroup.millicpus, Fact::Known(Bound::Unlimited));
    assert_eq!(container.runtime, Fact::Known(Some("docker".into())));
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,40}|[0-9max]{0,22} [0-9]{0,22}") {
        let _ = (environment(&text), cpu_max(&text), above(&text).count());
    }
}
