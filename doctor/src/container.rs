//! Device nodes and rights of the process.

use tokenyard_machine::{Access, Capabilities, Gpu, GpuVendor, Nic, Seccomp};

use crate::nics::{function, rails};
use crate::{Facility, Report, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&UVERBS, &RDMA_CM, &NVIDIA, &IPC_LOCK, &SECCOMP];

static UVERBS: Rule = Rule {
    id: "uverbs-nodes",
    title: "Device nodes of NICs",
    wanted: "in /dev/infiniband, readable and writable",
    why: "libibverbs opens a NIC by its device node. /sys shows the host's NICs in a container too, so a \
          NIC can be seen and not be used.",
    cost: "the transport finds no device",
    fix: "docker run --device /dev/infiniband; Kubernetes: an RDMA device plugin; on the host: modprobe \
          ib_uverbs; where it is refused: udev gives it mode 0666, or a group of the process",
    source: "linux-rdma/rdma-core, Documentation/udev.md; Linux kernel, \
             Documentation/infiniband/user_verbs.rst",
};

static RDMA_CM: Rule = Rule {
    id: "rdma-cm-node",
    title: "Device node of the connection manager",
    wanted: "/dev/infiniband/rdma_cm",
    why: "libfabric's verbs provider connects through the connection manager. The part verbs does not: it \
          exchanges addresses by itself.",
    cost: "libfabric's provider verbs does not open",
    fix: "modprobe rdma_ucm on the host, and docker run --device /dev/infiniband/rdma_cm",
    source: "linux-rdma/rdma-core, rdma_cm(7)",
};

static NVIDIA: Rule = Rule {
    id: "nvidia-nodes",
    title: "Device nodes of NVIDIA GPUs",
    wanted: "nvidiactl, nvidia-uvm and nvidiaN of a GPU for each rank",
    why: "CUDA opens GPUs by their device nodes, which the container toolkit puts into containers.",
    cost: "CUDA finds no GPU, or fewer than there are",
    fix: "docker run --gpus all (NVIDIA Container Toolkit); on the host: nvidia-modprobe -u -c 0",
    source: "NVIDIA driver README, Frequently Asked Questions (device files); NVIDIA Container Toolkit \
             documentation",
};

static IPC_LOCK: Rule = Rule {
    id: "ipc-lock",
    title: "The right to lock memory",
    wanted: "CAP_IPC_LOCK, or no limit on locked memory",
    why: "A process with CAP_IPC_LOCK may pin memory whatever `ulimit -l` says. Containers lose it.",
    cost: "registration of memory fails at start where the limit is low",
    fix: "docker run --cap-add IPC_LOCK; Kubernetes: securityContext.capabilities.add: [IPC_LOCK]",
    source: "Linux, capabilities(7); Linux kernel, drivers/infiniband/core/umem.c",
};

static SECCOMP: Rule = Rule {
    id: "seccomp",
    title: "The system call filter",
    wanted: "none, or one that allows what the parts call",
    why: "Container runtimes filter system calls. What a filter allows no file tells; what matters to the \
          parts compiled in is tried on a running node.",
    cost: "calls fail with EPERM",
    fix: "docker run --security-opt seccomp=unconfined shows whether it is the filter",
    source: "Linux, seccomp(2)",
};

pub(crate) fn has_ipc_lock(report: &Report<'_>) -> bool {
    let container = &report.machine.container;
    // In a user namespace of its own the capability does not reach the host's limit.
    container.in_user_namespace.get() != Some(true)
        && container.capabilities.get().is_some_and(|c| c.has(Capabilities::IPC_LOCK))
}

pub(crate) fn judge(report: &mut Report<'_>) {
    uverbs(report);
    nvidia(report);
    ipc_lock(report);
    if report.machine.container.seccomp.get() == Some(Seccomp::Filter) {
        report.note((&SECCOMP, Facility::Node), "system calls", (Verdict::Ok, "filtered"));
    }
}

fn uverbs(report: &mut Report<'_>) {
    let nodes = &report.machine.devices.nodes;
    // Whether storage has its device nodes is nobody's matter here.
    let nics = rails(report);
    let granted = |nic: &Nic| {
        let node = nic.uverbs.known().and_then(|node| nodes.get(&format!("infiniband/{node}")));
        node == Some(&Access::Granted)
    };
    let given = nics.iter().filter(|nic| granted(nic)).count();
    // Who was given all GPUs, or has none to go by, is to have all NICs: a rail is missing.
    let gpus = &report.machine.gpus;
    // Virtual functions, and NICs beyond a GPU's one, may be other containers'.
    let is_spare = !gpus.is_empty() && given >= gpus.len();
    let is_virtual =
        |nic: &Nic| function(report, nic).is_some_and(|function| function.is_virtual_function);
    let others: Vec<bool> = nics.iter().map(|nic| is_spare || is_virtual(nic)).collect();
    let is_part = gpus.is_empty() || gpus.iter().any(|gpu| !gpu.is_visible);
    for (nic, is_other) in nics.iter().zip(others) {
        let Some(node) = nic.uverbs.known() else {
            let found = "the kernel names none: ib_uverbs is not loaded";
            let noted = (Verdict::Broken, found);
            report.note((&UVERBS, Facility::of(nic)), &nic.name, noted).fix("modprobe ib_uverbs");
            continue;
        };
        let found = match nodes.get(&format!("infiniband/{node}")) {
            Some(Access::Granted) => "there".to_owned(),
            Some(Access::Refused) => format!("/dev/infiniband/{node} is refused"),
            None => format!("no /dev/infiniband/{node}"),
        };
        let is_named = report.job.asks.nics.contains(&nic.name);
        let told = match (granted(nic), is_named || given == 0, is_part || is_other) {
            (true, ..) => (Verdict::Ok, found),
            (false, true, _) => (Verdict::Broken, found),
            (false, false, true) => {
                (Verdict::Ok, format!("{found}: {given} of {} NICs are given", nics.len()))
            }
            (false, false, false) => (Verdict::Slow, found),
        };
        let finding = report.note((&UVERBS, Facility::of(nic)), &nic.name, told);
        if given > 0 && !is_named {
            finding.cost("its rail is missing: ranks that would use it share others");
        }
    }
    let through_cm = report.job.asks(Facility::Libfabric) && report.job.asks(Facility::Verbs);
    if through_cm && !rails(report).is_empty() {
        let (verdict, found) = match nodes.get("infiniband/rdma_cm") {
            Some(Access::Granted) => (Verdict::Ok, "there"),
            Some(Access::Refused) => (Verdict::Broken, "refused"),
            None => (Verdict::Broken, "not there"),
        };
        report.note((&RDMA_CM, Facility::Verbs), "rdma_cm", (verdict, found));
    }
}

fn nvidia(report: &mut Report<'_>) {
    let machine = report.machine;
    let gpus: Vec<_> = machine.gpus.iter().filter(|gpu| gpu.vendor == GpuVendor::Nvidia).collect();
    if gpus.is_empty() || machine.nvidia.is_none() {
        return;
    }
    let granted = |name: &String| machine.devices.nodes.get(name) == Some(&Access::Granted);
    let missing = |names: Vec<String>| -> Vec<String> {
        names.into_iter().filter(|name| !granted(name)).collect()
    };
    let name = |gpu: &&Gpu| format!("nvidia{}", gpu.minor.get().unwrap_or(gpu.index));
    let common = missing(vec!["nvidiactl".to_owned(), "nvidia-uvm".to_owned()]);
    let own = missing(gpus.iter().map(name).collect());
    let given = gpus.len() - own.len();
    let (verdict, found) = match (common.is_empty(), own.is_empty()) {
        (true, true) => (Verdict::Ok, format!("those of {given} GPUs")),
        // Another job may have been given the others.
        (true, false) if given as u64 >= report.job.ranks.max(1) => {
            (Verdict::Ok, format!("{given} of {} GPUs are given", gpus.len()))
        }
        _ => {
            let all = common.into_iter().chain(own).collect::<Vec<_>>().join(", ");
            (Verdict::Broken, format!("missing or refused: {all}"))
        }
    };
    report.note((&NVIDIA, Facility::Cuda), "NVIDIA GPUs", (verdict, found));
}

fn ipc_lock(report: &mut Report<'_>) {
    let Some(facility) = rails(report).first().map(|nic| Facility::of(nic)) else { return };
    let container = &report.machine.container;
    if container.capabilities.known().is_none() {
        return;
    }
    let unlimited = report
        .machine
        .limits
        .locked_memory
        .get()
        .is_some_and(|limit| limit.soft == tokenyard_machine::Bound::Unlimited);
    let (verdict, found) = match (has_ipc_lock(report), unlimited) {
        (true, _) => (Verdict::Ok, "CAP_IPC_LOCK"),
        (false, true) => (Verdict::Ok, "no CAP_IPC_LOCK, and no limit"),
        // The limit itself is judged by its own rule; it may still be enough.
        (false, false) => (Verdict::Unknown, "no CAP_IPC_LOCK, so the limit counts"),
    };
    report.note((&IPC_LOCK, facility), "process", (verdict, found));
}
