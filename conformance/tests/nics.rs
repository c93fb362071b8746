//! The NICs that a topology reports are shared out to the transports of a communicator, and appear in its
//! report.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::collections::BTreeMap;
use std::sync::Mutex;

use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::communicator::{Communicator, CommunicatorOptions};
use tokenyard_core::config::{ComponentTable, Config};
use tokenyard_core::export::{Exported, TOPOLOGY_HEADER, TopologyComponent, find_transport};
use tokenyard_core::host::{BuiltIn, OpenTransport, Registry, discover};
use tokenyard_core::topology::{Discover, Place, Topology};
use tokenyard_core::transport::{Capabilities, MemoryNeeds, Transport, TransportOpen};
use tokenyard_core::{Result, abi};

/// NICs that the transport `records_nics` was opened with, and whether all reach each other, by world rank.
static RECORDED: Mutex<BTreeMap<u32, (Vec<String>, bool)>> = Mutex::new(BTreeMap::new());

/// The test that opens `records_nics` and reads what it recorded.
static ALONE: Mutex<()> = Mutex::new(());

/// `shm`, which records the NICs that it was opened with.
struct RecordsNics {
    inner: OpenTransport,
    memory: MemoryNeeds,
}

impl Transport for RecordsNics {
    const NAME: &'static str = "records_nics";
    const ABOUT: &'static str = "records the NICs that it was opened with";
    type Config = TwoNodes;

    fn probe(_: &TwoNodes) -> Result<Capabilities> {
        let inner = find_transport("shm")?.probe(&ComponentTable::empty())?;
        Ok(Capabilities { flags: inner.flags | abi::TY_CAP_PLACED_NICS, ..inner })
    }

    fn open(_: TwoNodes, open: &TransportOpen<'_>) -> Result<Self> {
        let team = open.team;
        let recorded = (team.nics.names.clone(), team.nics.any_rails);
        RECORDED.lock().unwrap().insert(team.world_ranks[team.me as usize], recorded);
        let mut inner = find_transport("shm")?.open(&ComponentTable::empty(), open)?;
        Ok(Self { memory: inner.memory_needs()?, inner })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.memory
    }

    tokenyard_testkit::pass_on!(
        inner: register, endpoint, connect, peer_address, post, poll, read_signal, health
    );
}

/// Two ranks on each of two nodes; the second node has another number of NICs, as its table states.
struct TwoNodesTopology;

#[derive(Default, serde::Deserialize)]
#[serde(default)]
struct TwoNodes {
    second: usize,
    any: bool,
    missing: bool,
}

impl Topology for TwoNodesTopology {
    const NAME: &'static str = "two_nodes";
    const ABOUT: &'static str = "nodes that are not there";
    type Config = TwoNodes;

    fn discover(config: &TwoNodes, ask: &Discover) -> Result<Place> {
        let node = ask.rank / 2;
        let nics = if node == 0 { 4 } else { config.second };
        Ok(Place {
            host: format!("node{node}"),
            device: None,
            numa_node: None,
            processors: 1,
            nics: (0..nics).map(|nic| format!("nic{nic}")).collect(),
            nics_given: config.second == 8,
            any_rails: config.any,
            missing_nic: (config.missing && ask.rank == 3).then(|| "ä".repeat(600)),
        })
    }
}

tokenyard_testkit::built_in_transport!(RecordsNics);
const PLACES: &[*const abi::TyTopologyTable] =
    &[&raw const *TopologyComponent::<TwoNodesTopology>::TABLE];
static TOPOLOGIES: Exported<abi::TyTopologyExport> = Exported(abi::TyTopologyExport {
    header: TOPOLOGY_HEADER,
    components: PLACES.as_ptr(),
    count: PLACES.len(),
});
inventory::submit! { BuiltIn::Topology(&TOPOLOGIES) }

#[test]
fn the_nics_of_each_rank_reach_its_transport_and_the_report() {
    let _alone = ALONE.lock().unwrap();
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let text = "[world]\ndeadline_ms = 20000\n[kernels]\nuse = \"cpu\"\n\
                [transport.scale_up]\nuse = \"shm\"\n[transport.scale_out]\nuse = \"records_nics\"\n\
                [topology]\nuse = \"two_nodes\"\n[topology.two_nodes]\nsecond = 2\nany = true\n";
    let config = Config::parse(text, "nics").unwrap();
    let reports = in_threads(4, &config, |world| {
        let comm =
            Communicator::open(world, &config, CommunicatorOptions::new(8, 2, 64, 8)).unwrap();
        let report = serde_json::to_value(comm.report()).unwrap();
        comm.close().unwrap();
        report
    })
    .unwrap();
    // Two and two on the first node, one each on the second: so each rank uses one.
    let expected = ["nic0", "nic2", "nic0", "nic1"];
    for report in &reports {
        for (rank, nic) in expected.iter().enumerate() {
            assert_eq!(report["places"][rank]["nics"], serde_json::json!([nic]));
        }
        assert_eq!(report["scale_out"]["placed_nics"], true);
        assert_eq!(report["scale_up"]["placed_nics"], false);
        let warnings = report["warnings"].to_string();
        assert!(
            warnings.contains("every rank uses 1 of its NICs, because rank 2 on node1"),
            "{warnings}"
        );
        assert!(warnings.contains("rail 1 crosses: rank 1 on node0 uses nic2"), "{warnings}");
    }
    let recorded = || {
        let recorded = RECORDED.lock().unwrap();
        recorded.values().map(|(nics, any)| format!("{} {any}", nics.join(","))).collect::<Vec<_>>()
    };
    assert_eq!(recorded(), expected.map(|nic| format!("{nic} true")));
    let equal = Config::parse(&text.replace("= 2\nany = true", "= 4"), "nics").unwrap();
    let opened = in_threads(4, &equal, |world| {
        let comm =
            Communicator::open(world, &equal, CommunicatorOptions::new(8, 2, 64, 8)).unwrap();
        comm.close().unwrap();
    });
    opened.unwrap();
    assert_eq!(recorded(), ["nic0,nic1 false", "nic2,nic3 false"].repeat(2));
}

#[test]
fn a_node_with_fewer_nics_is_refused_on_every_rank_with_the_names() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let text = "[world]\ndeadline_ms = 20000\n[kernels]\nuse = \"cpu\"\n\
                [transport.scale_up]\nuse = \"shm\"\n[transport.scale_out]\nuse = \"records_nics\"\n\
                [topology]\nuse = \"two_nodes\"\ntwo_nodes.second = 2\n";
    let config = Config::parse(text, "nics").unwrap();
    let errors = in_threads(4, &config, |world| {
        Communicator::open(world, &config, CommunicatorOptions::new(8, 2, 64, 8))
            .unwrap_err()
            .to_string()
    })
    .unwrap();
    for text in &errors {
        assert!(
            text.contains("rank 2 on node1 has 1 (nic0) and rank 0 on node0 has 2 (nic0, nic1)"),
            "{text}"
        );
    }
}

#[test]
fn a_missing_nic_is_refused_on_every_rank_only_where_a_transport_uses_nics_and_rails_matter() {
    let _alone = ALONE.lock().unwrap();
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let config = |out: &str, any: bool| {
        let text = format!(
            "[world]\ndeadline_ms = 20000\n[kernels]\nuse = \"cpu\"\n\
             [transport.scale_up]\nuse = \"shm\"\n[transport.scale_out]\nuse = \"{out}\"\n\
             [topology]\nuse = \"two_nodes\"\ntwo_nodes.second = 4\ntwo_nodes.missing = true\n\
             two_nodes.any = {any}\n"
        );
        Config::parse(&text, "nics").unwrap()
    };
    let open = |config: &Config| {
        in_threads(4, config, |world| {
            match Communicator::open(world, config, CommunicatorOptions::new(8, 2, 64, 8)) {
                Ok(comm) => comm.close().map(|()| String::new()).unwrap(),
                Err(error) => error.to_string(),
            }
        })
        .unwrap()
    };
    for text in open(&config("records_nics", false)) {
        // Text without room is cut between characters.
        assert!(text.contains("rank 3 on node1 lacks a NIC: ä"), "{text}");
    }
    assert_eq!(open(&config("shm", false)), [""; 4]);
    // The fix that the error names.
    assert_eq!(open(&config("records_nics", true)), [""; 4]);
}

#[test]
fn as_many_nics_as_a_place_has_room_for_cross_the_abi_and_more_are_refused() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let registry = Registry::built_in().unwrap();
    let component = registry.topology("two_nodes").unwrap();
    let ask = Discover { rank: 2, ranks: 4, local_rank: 0 };
    let found = |second: usize| {
        discover(
            &component,
            &ComponentTable::from_text(&format!("second = {second}"), "a.toml"),
            &ask,
        )
    };
    let place = found(8).unwrap();
    assert_eq!((place.nics.len(), place.nics_given), (8, true));
    assert_eq!((place.nics[7].as_str(), place.host.as_str()), ("nic7", "node1"));
    assert!(!found(1).unwrap().nics_given);
    assert!(found(0).unwrap().nics.is_empty());
    let text = found(9).unwrap_err().to_string();
    assert!(text.contains("expected at most 8 names of 1 to 63 bytes"), "{text}");
}
