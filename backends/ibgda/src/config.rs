//! The config table of the transport.

use serde::Deserialize;
use tokenyard_core::Result;
use tokenyard_core::config::ComponentTable;
use tokenyard_verbs::config::{in_range, some_in};
use tokenyard_verbs::ports::PortWish;
use tokenyard_verbs::{DeviceChoice, Mtu};

use crate::device_api::DEPTHS;

pub(crate) const COMPONENT: &str = "ibgda";

/// The table `[transport.scale_out.ibgda]` (or `scale_up`). `queue_pairs` is equal on all ranks; every other key may
/// differ per rank.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IbgdaConfig {
    /// The device that a rank uses. Default: `"auto"`.
    pub device: DeviceChoice,
    /// Port of the device, 1 to 254. Default: the first that is active.
    #[serde(deserialize_with = "some_in::<_, _, 1, 254>")]
    pub port: Option<u8>,
    /// Entry of the port's GID table, 0 to 255. Default: by rule, see [`tokenyard_verbs::rules::gid`].
    #[serde(deserialize_with = "some_in::<_, _, 0, 255>")]
    pub gid_index: Option<u8>,
    /// Entry of the port's partition key table. Default: 0.
    pub pkey_index: u16,
    /// The traffic class of the packets, 0 to 255: on RoCE, DSCP times four. Default: 0.
    pub traffic_class: u8,
    /// The service level of the packets, 0 to 15. Default: 0.
    #[serde(deserialize_with = "in_range::<_, _, 0, 15>")]
    pub service_level: u8,
    /// Bytes of a packet: `"auto"`, 256, 512, 1024, 2048 or 4096. Default: the size of the port.
    pub mtu: Mtu,
    /// The wait for an answer before a repetition: at least 4.096 us times two to this power, 1 to 31. Default: 17,
    /// which is 0.54 s.
    #[serde(deserialize_with = "in_range::<_, _, 1, 31>")]
    pub timeout: u8,
    /// Repetitions without an answer, 0 to 7. Default: 7.
    #[serde(deserialize_with = "in_range::<_, _, 0, 7>")]
    pub retry_count: u8,
    /// The poster of kernels' doorbells. Default: `"auto"`.
    pub doorbell: Doorbell,
    /// The memory of the queues that kernels write. Default: `"auto"`.
    pub queues: Placement,
    /// The memory of their completions. Default: `"auto"`.
    pub completions: Placement,
    /// The way in which signals are raised. Default: `"auto"`.
    pub signals: SignalChoice,
    /// Whether additions wait for earlier reads and additions of their queue pair. Default: false.
    pub fence: bool,
    /// Queue pairs to each peer, 1 to 8. Default: 4. Kernels spread their puts over them.
    #[serde(deserialize_with = "in_range::<_, _, 1, 8>")]
    pub queue_pairs: u32,
    /// Requests of a queue pair that are under way, a power of two from 64 to 32,768. Default: 1024.
    pub depth: u32,
}

impl Default for IbgdaConfig {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            port: None,
            gid_index: None,
            pkey_index: 0,
            traffic_class: 0,
            service_level: 0,
            mtu: Mtu::Auto,
            timeout: 17,
            retry_count: 7,
            doorbell: Doorbell::Auto,
            queues: Placement::Auto,
            completions: Placement::Auto,
            signals: SignalChoice::Auto,
            fence: false,
            queue_pairs: 4,
            depth: 1024,
        }
    }
}

/// The poster of kernels' doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Doorbell {
    /// The kernels where the GPU's driver maps the NIC's registers, else the host.
    Auto,
    /// The kernels.
    Gpu,
    /// A thread of the host.
    Cpu,
}

/// The memory of queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Queues: the GPU's where the NIC reaches it and kernels ring, else the host's. Completions: the host's.
    Auto,
    /// Memory of the GPU.
    Gpu,
    /// Pinned memory of the host.
    Host,
}

/// The way in which signals are raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SignalChoice {
    /// `Atomic`.
    Auto,
    /// By atomic additions of the peer's device to memory.
    Atomic,
    /// By writes of new totals. Reading the table refuses it, with the reason.
    Write,
}

/// The reason why totals are not written.
const NO_WRITES: &str = "found \"write\"; expected \"auto\" or \"atomic\": two writes of a connection \
                         may reach memory in either order, above all with adaptive routing, so a total \
                         could be seen before its payload (INV-1)";

impl IbgdaConfig {
    /// Reads and checks the table.
    ///
    /// # Errors
    /// The error names the line, the value that was found and the values that are expected.
    pub(crate) fn read(table: &ComponentTable) -> Result<Self> {
        let config: Self = table.parse(COMPONENT)?;
        if config.signals == SignalChoice::Write {
            return Err(table.invalid(COMPONENT, "signals", NO_WRITES));
        }
        if !DEPTHS.contains(&config.depth) || !config.depth.is_power_of_two() {
            let (least, most) = (DEPTHS.start(), DEPTHS.end());
            let found =
                format!("found {}; expected a power of two from {least} to {most}", config.depth);
            return Err(table.invalid(COMPONENT, "depth", &found));
        }
        if config.doorbell == Doorbell::Cpu && config.queues == Placement::Gpu {
            let found = "found \"gpu\" with doorbell = \"cpu\"; expected \"auto\" or \"host\": the host \
                         writes the record of each ring beside the queue";
            return Err(table.invalid(COMPONENT, "queues", found));
        }
        Ok(config)
    }

    pub(crate) fn ports(&self) -> PortWish<'_> {
        let (port, gid_index) = (self.port, self.gid_index);
        PortWish { transport: COMPONENT, device: &self.device, port, gid_index }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<IbgdaConfig> {
        IbgdaConfig::read(&ComponentTable::from_text(text, "a.toml"))
    }

    #[test]
    fn an_empty_table_is_the_default_and_every_key_is_read() {
        assert_eq!(read("").unwrap(), IbgdaConfig::default());
        let text = "device = [\"mlx5_0\", \"mlx5_1\"]\nport = 2\ngid_index = 3\npkey_index = 1\n\
                    traffic_class = 104\nservice_level = 3\nmtu = 4096\ntimeout = 20\nretry_count = 5\n\
                    doorbell = \"gpu\"\nqueues = \"gpu\"\ncompletions = \"host\"\nsignals = \"atomic\"\n\
                    fence = true\nqueue_pairs = 8\ndepth = 64\n";
        let expected = IbgdaConfig {
            device: DeviceChoice::Named(vec!["mlx5_0".into(), "mlx5_1".into()]),
            port: Some(2),
            gid_index: Some(3),
            pkey_index: 1,
            traffic_class: 104,
            service_level: 3,
            mtu: Mtu::Bytes(4096),
            timeout: 20,
            retry_count: 5,
            doorbell: Doorbell::Gpu,
            queues: Placement::Gpu,
            completions: Placement::Host,
            signals: SignalChoice::Atomic,
            fence: true,
            queue_pairs: 8,
            depth: 64,
        };
        assert_eq!(read(text).unwrap(), expected);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_line_and_what_was_expected() {
        for (line, expected) in [
            ("port = 0", "1 to 254"),
            ("gid_index = 256", "0 to 255"),
            ("service_level = 16", "0 to 15"),
            ("mtu = 1500", "1024"),
            ("timeout = 32", "1 to 31"),
            ("retry_count = 8", "0 to 7"),
            ("doorbell = \"nic\"", "`cpu`"),
            ("queues = \"device\"", "`host`"),
            ("completions = 1", "string"),
            ("signals = \"immediate\"", "`atomic`"),
            ("signals = \"write\"", "INV-1"),
            ("fence = 1", "true or false"),
            ("queue_pairs = 9", "1 to 8"),
            ("depth = 32", "64 to 32768"),
            ("depth = 65", "a power of two"),
            ("depth = 65536", "64 to 32768"),
            ("lanes = 1", "queue_pairs"),
        ] {
            let text = read(&format!("\n{line}")).unwrap_err().to_string();
            assert!(text.contains(expected) && text.contains("a.toml:2"), "{line}: {text}");
        }
        let text = read("doorbell = \"cpu\"\nqueues = \"gpu\"").unwrap_err().to_string();
        assert!(text.contains("a.toml:2") && text.contains("doorbell = \"cpu\""), "{text}");
    }
}
