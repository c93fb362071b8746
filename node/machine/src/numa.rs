//! NUMA nodes.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::Fact;
use crate::tree::Tree;

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// Number.
    pub node: u32,
    /// Its logical processors; empty for a node with memory only (of a GPU, for example).
    pub processors: Fact<BTreeSet<u32>>,
    /// Its memory in bytes.
    pub memory: Fact<u64>,
    /// Distances to the nodes in order of number, 10 being its own.
    pub distances: Fact<Vec<u32>>,
}

const NODES: &str = "sys/devices/system/node";

pub(crate) fn read(tree: &Tree) -> Vec<NumaNode> {
    tree.list(NODES)
        .iter()
        .filter_map(|name| {
            let node = name.strip_prefix("node")?.parse().ok()?;
            let file = |rest: &str| format!("{NODES}/{name}/{rest}");
            Some(NumaNode {
                node,
                processors: tree.text(&file("cpulist")).and_then(|list| match list.as_str() {
                    "" => Some(BTreeSet::new()),
                    list => cpu_list(list),
                }),
                memory: tree.word(&file("meminfo"), |text| kilobytes(text, "MemTotal:")),
                distances: tree.word(&file("distance"), |text| {
                    text.split_whitespace().map(|word| word.parse().ok()).collect()
                }),
            })
        })
        .collect()
}

/// Reads the kernel's list format: `0-3,8`. Nothing for an empty or a malformed list.
pub fn cpu_list(list: &str) -> Option<BTreeSet<u32>> {
    /// More processors than any machine has: a larger number means that the file is malformed.
    const MOST: u32 = 1 << 20;
    let mut cpus = BTreeSet::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MOST {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Writes the kernel's list format.
pub fn cpu_list_text(cpus: &BTreeSet<u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for cpu in cpus {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *cpu => *last = *cpu,
            _ => runs.push((*cpu, *cpu)),
        }
    }
    let text = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    runs.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Bytes of the line of `meminfo` that has the word `name`; the kernel writes `kB`.
pub(crate) fn kilobytes(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != name).skip(1);
        words.next()?.parse::<u64>().ok()?.checked_mul(1024)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_lists_are_written_as_they_are_read() {
        for list in ["0-55,112-167", "0", "0,2,4-5"] {
            assert_eq!(cpu_list_text(&cpu_list(list).unwrap()), list);
        }
        assert_eq!(cpu_list_text(&BTreeSet::new()), "");
    }

    #[test]
    fn processor_lists_are_read_and_nonsense_is_not() {
        assert_eq!(cpu_list(" 0-2,8\n"), Some(BTreeSet::from([0, 1, 2, 8])));
        for bad in ["", "3-1", "a", "1,", "0-4294967295"] {
            assert_eq!(cpu_list(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn nodes_have_processors_memory_and_distances() {
        let tree = Tree::recorded(
            "sys/devices/system/node/node0/cpulist = 0-1\n\
             sys/devices/system/node/node0/meminfo = Node 0 MemTotal:  2048 kB\\nNode 0 MemFree: 1 kB\n\
             sys/devices/system/node/node0/distance = 10 20\n\
             sys/devices/system/node/node1/cpulist =\n\
             sys/devices/system/node/possible = 0-1\n",
        )
        .unwrap();
        let nodes = read(&tree);
        assert_eq!(nodes.len(), 2);
        assert_eq!(nodes[0].processors, Fact::Known(BTreeSet::from([0, 1])));
        assert_eq!(nodes[0].memory, Fact::Known(2 << 20));
        assert_eq!(nodes[0].distances, Fact::Known(vec![10, 20]));
        assert_eq!(nodes[1].processors, Fact::Known(BTreeSet::new()));
        assert_eq!(nodes[1].memory, Fact::Missing);
    }
}
