//! The config table of the transport.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};

use crate::ports::PortWish;

/// The table `[transport.scale_out.verbs]` (or `scale_up`). Every key may differ per rank.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerbsConfig {
    /// The device that a rank uses. Default: `"auto"`.
    pub device: DeviceChoice,
    /// Port of the device, 1 to 254. Default: the first that is active.
    #[serde(deserialize_with = "some_in::<_, _, 1, 254>")]
    pub port: Option<u8>,
    /// Entry of the port's GID table, 0 to 255. Default: by rule, see [`crate::rules::gid`].
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
    /// The wait for an answer before a repetition: at least 4.096 us times two to this power, 1 to 31.
    /// Default: 17, which is 0.54 s.
    #[serde(deserialize_with = "in_range::<_, _, 1, 31>")]
    pub timeout: u8,
    /// Repetitions without an answer, 0 to 7. Default: 7.
    #[serde(deserialize_with = "in_range::<_, _, 0, 7>")]
    pub retry_count: u8,
    /// Repetitions when the peer has no receive posted, 0 to 7. Default: 7, which means without
    /// end.
    #[serde(deserialize_with = "in_range::<_, _, 0, 7>")]
    pub rnr_retry: u8,
    /// Most commands of a queue in flight, 1 to 16,384. Default: 1024.
    #[serde(deserialize_with = "in_range::<_, _, 1, 16_384>")]
    pub queue_depth: u32,
    /// Signals that can arrive while this rank does not poll, 64 to 32,768. Default: 8192.
    #[serde(deserialize_with = "in_range::<_, _, 64, 32_768>")]
    pub receive_depth: u32,
    /// The way in which signals arrive. Default: `"auto"`.
    pub signals: SignalChoice,
    /// Whether payloads are read back before their signals count. Default: `"auto"`.
    pub flush: Flush,
}

impl Default for VerbsConfig {
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
            rnr_retry: 7,
            queue_depth: 1024,
            receive_depth: 8192,
            signals: SignalChoice::Auto,
            flush: Flush::Auto,
        }
    }
}

impl VerbsConfig {
    /// The keys about ports.
    pub fn ports(&self) -> PortWish<'_> {
        let (port, gid_index) = (self.port, self.gid_index);
        PortWish { transport: "verbs", device: &self.device, port, gid_index }
    }
}

/// The device that a rank uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The device that the topology chose for the rank. Where it chose none, rank i of the team
    /// takes number i modulo their count of the fastest active ports.
    Auto,
    /// These devices: rank i of the team takes number i modulo their count.
    Named(Vec<String>),
}

/// The way in which signals arrive at this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SignalChoice {
    /// `Immediate`; `Atomic` where the device has no shared receive queues.
    Auto,
    /// As immediate data of a write; this rank counts them while it polls.
    Immediate,
    /// By atomic additions of the device to memory.
    Atomic,
}

/// Whether payloads are read back before their signals count (INV-1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flush {
    /// Where a window is device memory.
    Auto,
    /// For all memory: for tests, and for hosts whose completions may overtake payloads.
    Always,
}

/// Bytes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mtu {
    /// The size of the port.
    Auto,
    /// 256, 512, 1024, 2048 or 4096.
    Bytes(u32),
}

impl<'de> Deserialize<'de> for DeviceChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = DeviceChoice;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"auto\", the name of a device, or a list of names")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<DeviceChoice, E> {
                match name {
                    "auto" => Ok(DeviceChoice::Auto),
                    "" => Err(E::invalid_value(de::Unexpected::Str(name), &self)),
                    _ => Ok(DeviceChoice::Named(vec![name.to_owned()])),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<DeviceChoice, A::Error> {
                let mut names: Vec<String> = Vec::new();
                while let Some(name) = seq.next_element()? {
                    names.push(name);
                }
                if names.is_empty() || names.iter().any(String::is_empty) {
                    return Err(de::Error::invalid_value(
                        de::Unexpected::Seq,
                        &"names in the list",
                    ));
                }
                Ok(DeviceChoice::Named(names))
            }
        }
        deserializer.deserialize_any(Names)
    }
}

impl<'de> Deserialize<'de> for Mtu {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Mtu;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"auto\", 256, 512, 1024, 2048 or 4096")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Mtu, E> {
                match text {
                    "auto" => Ok(Mtu::Auto),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Mtu, E> {
                match bytes {
                    256 | 512 | 1024 | 2048 | 4096 => Ok(Mtu::Bytes(bytes as u32)),
                    _ => Err(E::invalid_value(de::Unexpected::Signed(bytes), &self)),
                }
            }
        }
        deserializer.deserialize_any(Bytes)
    }
}

/// A number between `LO` and `HI`.
///
/// # Errors
/// The number is outside.
pub fn in_range<'de, D, T, const LO: i64, const HI: i64>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<i64>,
{
    let found = i64::deserialize(deserializer)?;
    let inside = (LO..=HI).contains(&found);
    T::try_from(found).ok().filter(|_| inside).ok_or_else(|| {
        let expected = format!("{LO} to {HI}");
        de::Error::invalid_value(de::Unexpected::Signed(found), &expected.as_str())
    })
}

/// A number between `LO` and `HI`, for a key that may be absent.
///
/// # Errors
/// The number is outside.
pub fn some_in<'de, D, T, const LO: i64, const HI: i64>(
    deserializer: D,
) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<i64>,
{
    in_range::<D, T, LO, HI>(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use tokenyard_core::config::ComponentTable;

    use super::*;

    fn read(text: &str) -> Result<VerbsConfig, String> {
        ComponentTable::from_text(text, "a.toml").parse("verbs").map_err(|e| e.to_string())
    }

    fn refusal(text: &str) -> String {
        read(text).unwrap_err()
    }

    #[test]
    fn an_empty_table_is_the_default() {
        assert_eq!(read("").unwrap(), VerbsConfig::default());
    }

    #[test]
    fn every_key_is_read() {
        let text = "device = [\"mlx5_0\", \"mlx5_1\"]\nport = 2\ngid_index = 3\npkey_index = 1\n\
                    traffic_class = 104\nservice_level = 3\nmtu = 4096\ntimeout = 20\n\
                    retry_count = 5\nrnr_retry = 6\nqueue_depth = 64\nreceive_depth = 128\n\
                    signals = \"atomic\"\nflush = \"always\"\n";
        let expected = VerbsConfig {
            device: DeviceChoice::Named(vec!["mlx5_0".into(), "mlx5_1".into()]),
            port: Some(2),
            gid_index: Some(3),
            pkey_index: 1,
            traffic_class: 104,
            service_level: 3,
            mtu: Mtu::Bytes(4096),
            timeout: 20,
            retry_count: 5,
            rnr_retry: 6,
            queue_depth: 64,
            receive_depth: 128,
            signals: SignalChoice::Atomic,
            flush: Flush::Always,
        };
        assert_eq!(read(text).unwrap(), expected);
        let one = read("device = \"rxe0\"\nmtu = \"auto\"\nsignals = \"immediate\"").unwrap();
        assert_eq!(one.device, DeviceChoice::Named(vec!["rxe0".into()]));
        assert_eq!((one.mtu, one.signals), (Mtu::Auto, SignalChoice::Immediate));
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line_and_the_keys_there_are() {
        let text = refusal("port = 1\ngid = 3");
        assert!(text.contains("`gid`") && text.contains("a.toml:2:"), "{text}");
        assert!(text.contains("gid_index") && text.contains("rnr_retry"), "{text}");
    }

    #[test]
    fn a_value_out_of_range_is_refused_with_its_line_and_the_range() {
        for (line, expected) in [
            ("port = 0", "1 to 254"),
            ("gid_index = 256", "0 to 255"),
            ("service_level = 16", "0 to 15"),
            ("mtu = 1500", "1024"),
            ("timeout = 0", "1 to 31"),
            ("timeout = 32", "1 to 31"),
            ("retry_count = 8", "0 to 7"),
            ("rnr_retry = -1", "0 to 7"),
            ("queue_depth = 0", "1 to 16384"),
            ("receive_depth = 63", "64 to 32768"),
            ("signals = \"both\"", "immediate"),
            ("flush = \"never\"", "always"),
            ("device = []", "names in the list"),
            ("device = 5", "the name of a device"),
            ("mtu = \"big\"", "\"auto\""),
        ] {
            let text = refusal(&format!("\n{line}"));
            assert!(text.contains(expected) && text.contains("a.toml:2:"), "{line}: {text}");
        }
    }
}
