//! The job that is to run on a node.

use std::collections::BTreeSet;

use tokenyard_machine::{Nic, NicFamily};

/// A thing that a component needs of a node. A rule is about one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Facility {
    /// Every job.
    Node,
    /// RDMA NICs through libibverbs (`verbs`, the provider `verbs` of libfabric, `ibgda`, `gin`).
    Verbs,
    /// EFA adapters.
    Efa,
    /// libfabric.
    Libfabric,
    /// NVIDIA GPUs.
    Cuda,
    /// NVIDIA GPUs that reach each other's memory.
    NvLink,
    /// AMD GPUs.
    Hip,
    /// AMD GPUs that reach each other's memory.
    Xgmi,
    /// A NIC reads and writes GPU memory.
    GpuMemory,
    /// A GPU rings the NIC's doorbell.
    GpuInitiated,
    /// NCCL's device interface.
    Gin,
    /// A ConnectX takes commands of this process.
    Devx,
}

impl Facility {
    /// The library or interface through which a NIC of this family is used.
    pub(crate) fn of(nic: &Nic) -> Self {
        if nic.family == NicFamily::Efa { Self::Efa } else { Self::Verbs }
    }
}

/// The demands of components on the node.
#[derive(Clone, Debug, Default)]
pub struct Asks {
    /// Their needs; `None` without a config: then all that is there counts.
    pub uses: Option<BTreeSet<Facility>>,
    /// NICs that the config names, if it does.
    pub nics: Vec<String>,
    /// The config says that NICs of all names reach each other.
    pub any_rails: bool,
    /// A transport takes the first so many NICs that it finds, and not those that the topology chose.
    pub counted_rails: bool,
    /// Entries of GID tables that the config names for `verbs` or `ibgda`; it goes by rule where there are none.
    pub gid_indices: BTreeSet<u8>,
    /// Ports that the config names for `verbs` or `ibgda`; all are used where there are none.
    pub ports: BTreeSet<u32>,
    /// The config names the GPU that a rank drives.
    pub names_device: bool,
    /// The config lets ibgda raise signals by writes.
    pub writes_totals: bool,
}

/// One of several transports of which the first that works is taken.
#[derive(Clone, Debug, Default)]
pub struct Alternative {
    /// Name of the transport.
    pub name: String,
    /// Its own needs, without those of other components.
    pub asks: Asks,
}

/// The demands of the config and the shape on the node.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// The needs of the chosen components, without alternatives.
    pub asks: Asks,
    /// Transports of which the first that works is taken, in order; none where there is no choice.
    pub alternatives: Vec<Alternative>,
    /// Ranks that the node is to run.
    pub ranks: u64,
    /// Where their number comes from, `--ranks` or the launcher's variable; empty where it is one for each GPU.
    pub ranks_from: String,
    /// How many GPUs they drive, the first ones, where the operator chose so; else all.
    pub drives: Option<u64>,
    /// Processor threads of a rank.
    pub threads: u64,
    /// Bytes of one rank's windows, if all of them is touched.
    pub window_bytes: u64,
    /// A chosen transport is a plugin, which may use `/dev/shm`.
    pub plugin_transport: bool,
}

impl Job {
    /// Whether the job uses it. A facility that few jobs use must be asked for.
    pub fn needs(&self, facility: Facility) -> bool {
        let is_rare = matches!(facility, Facility::GpuInitiated | Facility::Gin | Facility::Devx);
        match &self.asks.uses {
            _ if facility == Facility::Node => true,
            None => !is_rare,
            Some(uses) => uses.contains(&facility),
        }
    }

    /// Whether the job uses it, or would with one of its alternatives.
    pub(crate) fn may_need(&self, facility: Facility) -> bool {
        let has =
            |one: &Alternative| one.asks.uses.as_ref().is_some_and(|uses| uses.contains(&facility));
        self.needs(facility) || self.alternatives.iter().any(has)
    }

    /// Whether a config says that it is used.
    pub(crate) fn asks(&self, facility: Facility) -> bool {
        self.asks.uses.as_ref().is_some_and(|uses| uses.contains(&facility))
    }

    /// The same job with this of its alternatives taken, or with none of them.
    pub(crate) fn with(&self, alternative: Option<&Alternative>) -> Self {
        let mut job = self.clone();
        job.alternatives.clear();
        let uses = job.asks.uses.get_or_insert_default();
        if let Some(Alternative { asks, .. }) = alternative {
            uses.extend(asks.uses.iter().flatten());
            job.asks.nics.extend(asks.nics.iter().cloned());
            job.asks.gid_indices.extend(&asks.gid_indices);
            job.asks.ports.extend(&asks.ports);
            job.asks.any_rails |= asks.any_rails;
            job.asks.names_device |= asks.names_device;
            job.asks.writes_totals |= asks.writes_totals;
            job.asks.counted_rails |= asks.counted_rails;
        }
        job
    }
}

impl Asks {
    /// Adds what a part of this kind and name needs. `provider` is libfabric's, where it has one.
    pub fn add_component(&mut self, kind: &str, name: &str, provider: Option<&str>) {
        use Facility::{
            Cuda, Devx, Efa, Gin, GpuInitiated, GpuMemory, Hip, Libfabric, NvLink, Verbs, Xgmi,
        };
        let facilities: &[Facility] = match (kind, name) {
            ("kernel set", "cuda") => &[Cuda],
            ("kernel set", "rocm") => &[Hip],
            ("transport", "nvlink") => &[Cuda, NvLink],
            ("transport", "xgmi") => &[Hip, Xgmi],
            ("transport", "verbs") => &[Verbs],
            ("transport", "ibgda") => &[Cuda, Verbs, GpuMemory, GpuInitiated, Devx],
            ("transport", "gin") => &[Cuda, Verbs, GpuMemory, GpuInitiated, Gin],
            ("transport", "efa") => &[Efa, Libfabric],
            ("transport", "libfabric") => match provider {
                Some("efa") => &[Efa, Libfabric],
                Some(name) if name.starts_with("verbs") => &[Verbs, Libfabric],
                _ => &[Libfabric],
            },
            _ => &[],
        };
        self.uses.get_or_insert_default().extend(facilities);
    }
}
