//! The topology contract: the place of this rank.

use crate::Result;

/// The rank whose place a topology finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discover {
    /// World rank.
    pub rank: u32,
    /// Ranks in the world.
    pub ranks: u32,
    /// Index of the rank on its machine, from the launcher.
    pub local_rank: u32,
}

/// The place of one rank.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Place {
    /// Identity of the machine: equal on ranks that share memory; at most 63 bytes. In the places of a
    /// communicator's report, and in errors, it is the host's name where names distinguish the machines.
    pub host: String,
    /// Device ordinal that the rank drives.
    pub device: Option<u32>,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// Number of logical processors that this process may run on; 0 if unknown.
    pub processors: u32,
    /// Names of NICs that are nearest to the rank and equally near, in order; at most
    /// [`TY_PLACE_NICS`](crate::abi::TY_PLACE_NICS) of at most 63 bytes. Core divides them among ranks: in
    /// the places of a communicator's report they are the rank's own.
    #[serde(default)]
    pub nics: Vec<String>,
    /// The operator named the NICs: they are used unchanged.
    #[serde(default)]
    pub nics_given: bool,
    /// NICs of all names reach each other: ranks of a rail may have different ones, or none.
    #[serde(default)]
    pub any_rails: bool,
    /// Text about the NIC that is missing near the rank, or cannot be used, where other ranks of its machine
    /// have one of their own. At most [`TY_MISSING_NIC_BYTES`](crate::abi::TY_MISSING_NIC_BYTES); a longer
    /// text is cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_nic: Option<String>,
}

/// A topology. It has no instance: `discover` is called once per rank at bring-up.
pub trait Topology: 'static {
    /// The name that a config writes.
    const NAME: &'static str;
    /// One line of text for display.
    const ABOUT: &'static str;
    /// The component's own table.
    type Config: serde::de::DeserializeOwned;

    /// Finds this rank's place.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn discover(config: &Self::Config, discover: &Discover) -> Result<Place>;
}
