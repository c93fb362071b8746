//! How many ranks a launcher starts on this node.

/// Variables that hold the number itself. Those of mpirun stand before Slurm's, which under mpirun count its daemons.
const COUNTS: [&str; 4] = [
    "LOCAL_WORLD_SIZE",           // torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE", // Open MPI and PRRTE
    "MPI_LOCALNRANKS",            // MPICH and Intel MPI (Hydra)
    "PMI_LOCAL_SIZE",             // Cray MPICH
];
/// Slurm's variables, for the nodes of a step or of an allocation: `16(x2),8`, or one number for all.
const SLURM: [&str; 3] =
    ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"];

/// Ranks of a node, and the source of that number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeRanks {
    pub(super) count: u32,
    /// As people write it: `--ranks`, or a variable.
    pub(super) from: &'static str,
}

/// Ranks that the launcher of this process starts on this node. One is a look at the node by a process alone,
/// as `srun --ntasks-per-node=1` does, and says nothing about the job.
pub(super) fn ranks(env: &dyn Fn(&str) -> Option<String>) -> Option<NodeRanks> {
    let node: usize = env("SLURM_NODEID").and_then(|node| node.trim().parse().ok()).unwrap_or(0);
    let plain =
        COUNTS.into_iter().map(|name| (name, env(name).and_then(|n| n.trim().parse().ok())));
    let slurm = SLURM.into_iter().map(|name| (name, env(name).and_then(|list| at(&list, node))));
    let (from, count) = plain.chain(slurm).find_map(|(name, count)| Some((name, count?)))?;
    (count > 1).then_some(NodeRanks { count, from })
}

/// The number for a node in Slurm's list, where `8(x2)` stands for two nodes.
fn at(list: &str, node: usize) -> Option<u32> {
    let mut before = 0_usize;
    for part in list.trim().split(',') {
        let (count, nodes) = match part.split_once("(x") {
            Some((count, nodes)) => (count, nodes.strip_suffix(')')?.parse().ok()?),
            None => (part, 1_usize),
        };
        before = before.saturating_add(nodes);
        if node < before {
            return count.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Option<(u32, &'static str)> {
        let env = |name: &str| {
            variables.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned())
        };
        ranks(&env).map(|found| (found.count, found.from))
    }

    #[test]
    fn each_launcher_says_how_many_ranks_it_starts_here() {
        for (name, value) in [
            ("LOCAL_WORLD_SIZE", "16"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "16"),
            ("MPI_LOCALNRANKS", "16"),
            ("PMI_LOCAL_SIZE", "16"),
            ("SLURM_STEP_TASKS_PER_NODE", "16(x4)"),
            ("SLURM_TASKS_PER_NODE", "16"),
            ("SLURM_NTASKS_PER_NODE", "16"),
        ] {
            assert_eq!(of(&[(name, value)]), Some((16, name)));
        }
        // Under mpirun Slurm starts a daemon on each node.
        let mpi = [("SLURM_STEP_TASKS_PER_NODE", "1(x2)"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "8")];
        assert_eq!(of(&mpi), Some((8, "OMPI_COMM_WORLD_LOCAL_SIZE")));
    }

    #[test]
    fn slurm_s_list_is_read_at_the_node() {
        let at_node = |node| {
            of(&[("SLURM_STEP_TASKS_PER_NODE", "8(x2),4,16"), ("SLURM_NODEID", node)]).map(|n| n.0)
        };
        assert_eq!(
            ["0", "1", "2", "3", "4"].map(at_node),
            [Some(8), Some(8), Some(4), Some(16), None]
        );
    }

    #[test]
    fn a_process_alone_and_nonsense_say_nothing() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("LOCAL_WORLD_SIZE", "1")]), None);
        assert_eq!(
            of(&[("SLURM_STEP_TASKS_PER_NODE", "1(x2)"), ("SLURM_NTASKS_PER_NODE", "8")]),
            None
        );
        for value in ["", "x", "8(x", "8(x2", "(x2)", "-1"] {
            assert_eq!(of(&[("SLURM_STEP_TASKS_PER_NODE", value)]), None, "{value}");
        }
    }
}
