//! Device nodes and rights of the process.

use tokenyard_errors::words::first_names;
use tokenyard_machine::{Access, Capabilities, Gpu, GpuVendor, Nic, Seccomp};

use crate::nics::{function, has_link, rails};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    UVERBS = "uverbs-nodes",
    RDMA_CM = "rdma-cm-node",
    NVIDIA = "nvidia-nodes",
    IPC_LOCK = "ipc-lock",
    SECCOMP = "seccomp",
}

pub(crate) fn has_ipc_lock(report: &DoctorReport<'_>) -> bool {
    let container = &report.machine.container;
    // In a user namespace of its own the capability does not reach the host's limit.
    container.in_user_namespace.get() != Some(true)
        && container.capabilities.get().is_some_and(|c| c.has(Capabilities::IPC_LOCK))
}

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    uverbs(report);
    nvidia(report);
    ipc_lock(report);
    if report.machine.container.seccomp.get() == Some(Seccomp::Filter) {
        report.note(&SECCOMP, Facility::Node, "system calls", Verdict::Ok.on("filtered"));
    }
}

/// The fix for a device node that is missing.
const GIVE: &str = "docker run --device /dev/infiniband; Kubernetes: ask for one more of the RDMA device \
                    plugin's resource; on the host: modprobe ib_uverbs, and udev makes the node";

/// The fix for a device node that may not be opened.
const OPEN_UP: &str = "chmod 0666 /dev/infiniband/uverbs*; lasting: KERNEL==\"uverbs*\", MODE=\"0666\" in \
                       /etc/udev/rules.d, or run as a user of the nodes' group (in a container: \
                       --group-add)";

fn uverbs(report: &mut DoctorReport<'_>) {
    let machine = report.machine;
    let nodes = &machine.devices.nodes;
    // Device nodes of storage do not matter here.
    let nics = rails(report);
    let given = nics.iter().filter(|nic| is_given(report, nic)).count();
    let others = machine.serving_nics().into_iter().filter(|nic| is_given(report, nic));
    let others: Vec<&str> = others.map(|nic| nic.name.as_str()).collect();
    for nic in &nics {
        let Some(node) = nic.uverbs.known() else {
            let found = "the kernel names none: ib_uverbs is not loaded";
            let judgement = Verdict::Broken.on(found);
            report.note(&UVERBS, Facility::of(nic), &nic.name, judgement).fix("modprobe ib_uverbs");
            continue;
        };
        let access = nodes.get(&format!("infiniband/{node}"));
        let found = match access {
            Some(Access::Granted) => "there".to_owned(),
            Some(Access::Refused) => format!("/dev/infiniband/{node} is refused"),
            None => format!("no /dev/infiniband/{node}"),
        };
        let is_named = report.job.asks.nics.contains(&nic.name);
        let (verdict, found) = match (access, given) {
            (Some(Access::Granted), _) => (Verdict::Ok, found),
            _ if is_named => (Verdict::Broken, found),
            (_, 0) if others.is_empty() => (Verdict::Broken, found),
            (_, 0) => (
                Verdict::Slow,
                format!("{found}; ranks would use some of {}", first_names(&others)),
            ),
            (_, given) if is_anothers(report, &nics, nic) => {
                (Verdict::Ok, format!("{found}: {given} of {} NICs are given", nics.len()))
            }
            _ => (Verdict::Slow, found),
        };
        let finding = report.note(&UVERBS, Facility::of(nic), &nic.name, verdict.on(found));
        match access {
            Some(Access::Refused) => finding.fix(OPEN_UP),
            _ => finding.fix(GIVE),
        };
        match (is_named, given) {
            (true, _) => finding.impact("the config names this NIC: its ranks do not start"),
            (false, 0) if !others.is_empty() => {
                finding.impact("ranks use NICs that are for storage or the like, which are slower")
            }
            (false, 0) => finding,
            (false, _) => {
                finding.impact("its rail is missing: ranks that would use it share others")
            }
        };
    }
    let through_cm = report.job.asks(Facility::Libfabric) && report.job.asks(Facility::Verbs);
    if through_cm && !rails(report).is_empty() {
        let (verdict, found) = match nodes.get("infiniband/rdma_cm") {
            Some(Access::Granted) => (Verdict::Ok, "there"),
            Some(Access::Refused) => (Verdict::Broken, "refused"),
            None => (Verdict::Broken, "not there"),
        };
        report.note(&RDMA_CM, Facility::Verbs, "rdma_cm", verdict.on(found));
    }
}

/// The process may open it.
fn is_given(report: &DoctorReport<'_>, nic: &Nic) -> bool {
    let node = nic.uverbs.known().map(|node| format!("infiniband/{node}"));
    node.and_then(|node| report.machine.devices.nodes.get(&node)) == Some(&Access::Granted)
}

/// Whether a NIC that this process cannot use may belong to another container. That is so if no GPU of this
/// process has fewer NICs than the node's other GPUs have. A container with all GPUs should have all NICs
/// with a link; of virtual functions a node may have more than it needs.
fn is_anothers(report: &DoctorReport<'_>, rails: &[&Nic], nic: &Nic) -> bool {
    let machine = report.machine;
    let far = |gpu: &Gpu, nic: &Nic| nic.pci.get().map(|at| machine.distance(gpu.pci, at));
    let nearest = |gpu: &Gpu| rails.iter().filter_map(|nic| far(gpu, nic)).min();
    let is_near = |gpu: &Gpu, nic: &Nic| far(gpu, nic).is_some() && far(gpu, nic) == nearest(gpu);
    let has =
        |gpu: &Gpu| rails.iter().filter(|nic| is_near(gpu, nic) && is_given(report, nic)).count();
    let gpus = machine.given_gpus();
    let most = gpus.iter().map(|gpu| has(gpu)).max().unwrap_or(0);
    if gpus.iter().any(|gpu| is_near(gpu, nic) && has(gpu) < most) {
        return false;
    }
    let is_virtual = function(report, nic).is_some_and(|function| function.is_virtual_function);
    let is_component = gpus.is_empty() || machine.gpus.iter().any(|gpu| !gpu.is_visible);
    is_component || is_virtual || !has_link(nic)
}

fn nvidia(report: &mut DoctorReport<'_>) {
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
    report.note(&NVIDIA, Facility::Cuda, "NVIDIA GPUs", verdict.on(found));
}

fn ipc_lock(report: &mut DoctorReport<'_>) {
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
    report.note(&IPC_LOCK, facility, "process", verdict.on(found));
}
