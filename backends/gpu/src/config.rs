//! The config tables of this backend's components.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::driver::local_rank;
use crate::flat_sms::USUAL;
use crate::platform::Names;

/// Most bytes of an arena: a combine names places in it by 32-bit numbers of 16-byte units.
pub(crate) const MOST_ARENA: u64 = 64 << 30;

/// The table of the transport between devices, such as `[transport.scale_up.nvlink]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PeersConfig {
    /// The device that this rank drives. Default: the device of the calling thread's current context, else the
    /// rank's index on its machine.
    pub device: Option<Devices>,
    /// Folder of the driver's library, where the loader finds none or the wrong one: for AMD's GPUs.
    pub libraries: Option<PathBuf>,
}

/// Ordinals of devices: one, or a list, of which the rank with index i on its machine takes number i, and again the
/// first after the last.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "OneOrMore")]
pub struct Devices(Vec<u32>);

#[derive(Deserialize)]
#[serde(untagged, expecting = "an ordinal, or a list of ordinals")]
enum OneOrMore {
    One(u32),
    More(Vec<u32>),
}

impl TryFrom<OneOrMore> for Devices {
    type Error = &'static str;

    fn try_from(named: OneOrMore) -> std::result::Result<Self, &'static str> {
        match named {
            OneOrMore::One(ordinal) => Ok(Self(vec![ordinal])),
            OneOrMore::More(ordinals) if ordinals.is_empty() => {
                Err("found an empty list; expected one ordinal or more")
            }
            OneOrMore::More(ordinals) => Ok(Self(ordinals)),
        }
    }
}

impl Devices {
    /// The ordinal for the rank of this process.
    pub fn mine(&self) -> u32 {
        self.of(local_rank())
    }

    fn of(&self, index: u32) -> u32 {
        // Never empty: see `try_from`.
        self.0[index as usize % self.0.len()]
    }
}

/// How rows are moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowCopy {
    /// The best that the device has.
    #[default]
    Auto,
    /// Bulk copies through shared memory.
    Tma,
    /// Vectors of 16 bytes.
    Vector,
}

/// How a combine returns flat rows that lie outside the arena, where peers cannot read them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outside {
    /// The one that measurements predict to be faster.
    #[default]
    Auto,
    /// The owner of the rows pushes them to the rank that sums them, where kernels load and store and
    /// there is one domain.
    Push,
    /// They are copied into the arena first.
    Copy,
}

/// Where windows lie whose rows a host thread puts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Windows {
    /// In host memory where the transport accepts it.
    #[default]
    Auto,
    /// In device memory: the NIC reaches it by dmabuf, or by a kernel module.
    Device,
}

/// How rows move in dispatches to the packed layout, and in the combines that follow them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decode {
    /// Ranks count first; then each row moves to its final place, as in the other layouts.
    #[default]
    Direct,
    /// Senders stage rows at the owners without a request; the owners spread them.
    LowLatency,
}

/// Multiprocessors that an operation occupies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sms {
    /// As many as the operation needs to fill the link.
    #[default]
    Auto,
    /// This many, 1 to 1024.
    Count(u32),
}

const MOST_SMS: u32 = 1024;

impl Sms {
    /// Blocks of an operation for which there is no formula, on a device with this many multiprocessors.
    pub(crate) fn blocks(self, processors: u32) -> u32 {
        let wanted = match self {
            Self::Auto => USUAL,
            Self::Count(count) => count,
        };
        wanted.min(processors)
    }

    /// Blocks of a kernel that touches no other rank: all, unless the config sets a number.
    pub(crate) fn local_blocks(self, processors: u32) -> u32 {
        match self {
            Self::Auto => processors,
            Self::Count(count) => count.min(processors),
        }
    }

    /// Blocks of a low-latency operation on at most this many tokens of a rank: all, where each has work.
    pub(crate) fn decode_blocks(self, processors: u32, tokens: u32) -> u32 {
        let wanted = match (self, tokens) {
            (Self::Count(count), _) => count,
            (Self::Auto, 0..=8) => 16,
            (Self::Auto, 9..=32) => 64,
            (Self::Auto, _) => processors,
        };
        wanted.min(processors)
    }
}

impl<'de> Deserialize<'de> for Sms {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(SmsVisitor)
    }
}

struct SmsVisitor;

impl Visitor<'_> for SmsVisitor {
    type Value = Sms;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"auto\" or a number from 1 to {MOST_SMS}")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<Sms, E> {
        match text {
            "auto" => Ok(Sms::Auto),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> std::result::Result<Sms, E> {
        match u32::try_from(number) {
            Ok(count) if (1..=MOST_SMS).contains(&count) => Ok(Sms::Count(count)),
            _ => Err(E::invalid_value(de::Unexpected::Signed(number), &self)),
        }
    }
}

/// The table of the kernel set, such as `[kernels.cuda]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GpuConfig {
    /// As in the transport's table; must name the same device.
    pub device: Option<Devices>,
    /// Multiprocessors that an operation occupies: "auto" or 1 to 1024. At most the number that the
    /// device has.
    pub sms: Sms,
    /// How rows are moved: "auto", "tma" or "vector".
    pub rows: RowCopy,
    /// How a combine returns rows that lie outside the arena: "auto", "push" or "copy".
    pub outside: Outside,
    /// How rows of the packed layout move: "direct" or "low_latency".
    pub decode: Decode,
    /// Multiprocessors that a low-latency operation occupies: "auto" (all, or fewer for few tokens), or 1 to 1024.
    pub decode_sms: Sms,
    /// With `on_failure = "mask"`: milliseconds after which a low-latency operation goes on without a rank that has
    /// not come, although it lives. Absent: only a lost rank is left out.
    pub mask_after_ms: Option<u64>,
    /// Multiprocessors for local work, such as the merge of expert rows in a combine: "auto" (all), or 1 to 1024.
    pub local_sms: Sms,
    /// Where windows lie whose rows a host thread puts: "auto" (in host memory where the transport accepts
    /// it) or "device".
    pub windows: Windows,
    /// Size of the arena in MiB. Absent: enough for two worst-case outputs of any layout, at most
    /// 16 GiB, but for four of flat rows, at most 64 GiB.
    pub arena_mib: Option<u64>,
    /// Folder for compiled kernels. Default: `tokenyard/cuda`, or of another kernel set's name, in the
    /// user's cache folder.
    pub cache: Option<PathBuf>,
    /// As in the transport's table, for the library of the run-time compiler, too.
    pub libraries: Option<PathBuf>,
    /// The compiler, a program such as `/usr/local/cuda/bin/nvcc`, for transports whose device API includes
    /// headers; on AMD's GPUs for all kernels, where it is named. Default: the compiler of the toolkit, where
    /// one is found.
    pub compiler: Option<PathBuf>,
}

/// The longest time that may be set, a day.
const MOST_MASK_AFTER: u64 = 86_400_000;

impl PeersConfig {
    /// The ordinal of this rank's device, where it is named.
    pub(crate) fn ordinal(&self) -> Option<u32> {
        self.device.as_ref().map(Devices::mine)
    }
}

impl GpuConfig {
    /// The ordinal of this rank's device, where it is named.
    pub(crate) fn ordinal(&self) -> Option<u32> {
        self.device.as_ref().map(Devices::mine)
    }

    pub(crate) fn mask_after(&self) -> Option<Duration> {
        self.mask_after_ms.map(Duration::from_millis)
    }

    pub(crate) fn check(&self, names: &Names) -> Result<()> {
        let refuse = |key: &str, found: String, expected: &str| {
            Err(Error::new(
                ErrorKind::Config,
                "check config",
                format!("`{key}`: found {found}; expected {expected}"),
            )
            .with_context("table", names.table())
            .with_key(key))
        };
        if let (Decode::Direct, Sms::Count(count)) = (self.decode, self.decode_sms) {
            return refuse("decode_sms", count.to_string(), "decode = \"low_latency\" beside it");
        }
        if let Some(found) = self.mask_after_ms {
            let low_latency = self.decode == Decode::LowLatency;
            if !low_latency || !(1..=MOST_MASK_AFTER).contains(&found) {
                let expected = "1 to 86400000 (a day), with decode = \"low_latency\" beside it";
                return refuse("mask_after_ms", found.to_string(), expected);
            }
        }
        match self.arena_mib {
            Some(mib) if mib == 0 || mib > MOST_ARENA >> 20 => {
                refuse("arena_mib", mib.to_string(), "1 to 65536 (64 GiB)")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::tests::NAMES;
    use tokenyard_core::config::ComponentTable;

    fn parse(text: &str) -> std::result::Result<GpuConfig, String> {
        let parsed = ComponentTable::from_text(text, "a.toml").parse::<GpuConfig>("cuda");
        parsed.and_then(|config| config.check(&NAMES).map(|()| config)).map_err(|e| e.to_string())
    }

    #[test]
    fn multiprocessors_are_a_number_or_auto_and_never_more_than_there_are() {
        assert_eq!(parse("").unwrap(), GpuConfig::default());
        assert_eq!(parse("sms = \"auto\"").unwrap().sms, Sms::Auto);
        assert_eq!(parse("sms = 24").unwrap().sms, Sms::Count(24));
        assert_eq!(Sms::Auto.blocks(132), USUAL);
        assert_eq!([Sms::Count(24).blocks(132), Sms::Count(24).blocks(20)], [24, 20]);
        for wrong in ["sms = 0", "sms = 1025", "sms = -1", "sms = \"all\"", "sms = 1.5"] {
            let text = parse(wrong).unwrap_err();
            assert!(text.contains("\"auto\" or a number from 1 to 1024"), "{wrong}: {text}");
        }
    }

    #[test]
    fn a_device_is_named_for_all_ranks_or_for_each() {
        let of =
            |text: &str| [0, 1, 2, 5].map(|index| parse(text).unwrap().device.unwrap().of(index));
        assert_eq!(of("device = 3"), [3; 4]);
        assert_eq!(of("device = [0, 1]"), [0, 1, 0, 1]);
        assert_eq!(of("device = [4, 2, 7]"), [4, 2, 7, 7]);
        for (wrong, expected) in [
            ("device = []", "found an empty list; expected one ordinal or more"),
            ("device = \"first\"", "an ordinal, or a list of ordinals"),
            ("device = [-1]", "an ordinal, or a list of ordinals"),
        ] {
            let text = parse(wrong).unwrap_err();
            assert!(text.contains(expected), "{wrong}: {text}");
        }
    }

    #[test]
    fn rows_outside_the_arena_are_pushed_or_copied_as_the_config_says() {
        assert_eq!(parse("outside = \"push\"").unwrap().outside, Outside::Push);
        assert_eq!(parse("outside = \"copy\"").unwrap().outside, Outside::Copy);
        let text = parse("outside = \"pull\"").unwrap_err();
        assert!(text.contains("`auto`, `push`, `copy`"), "{text}");
    }

    #[test]
    fn rows_of_the_packed_layout_go_directly_unless_the_config_says_otherwise() {
        assert_eq!(parse("").unwrap().decode, Decode::Direct);
        let both = parse("decode = \"low_latency\"\ndecode_sms = 24").unwrap();
        assert_eq!((both.decode, both.decode_sms), (Decode::LowLatency, Sms::Count(24)));
        let text = parse("decode = \"fast\"").unwrap_err();
        assert!(text.contains("`direct` or `low_latency`"), "{text}");
        let text = parse("decode_sms = 24").unwrap_err();
        assert!(text.contains("`decode_sms`: found 24") && text.contains("low_latency"), "{text}");
    }

    #[test]
    fn a_rank_that_lives_is_left_out_only_where_the_config_says_when() {
        assert_eq!(parse("").unwrap().mask_after(), None);
        let set = parse("decode = \"low_latency\"\nmask_after_ms = 250").unwrap();
        assert_eq!(set.mask_after(), Some(Duration::from_millis(250)));
        for wrong in ["mask_after_ms = 9", "decode = \"low_latency\"\nmask_after_ms = 0"] {
            let text = parse(wrong).unwrap_err();
            assert!(text.contains("1 to 86400000 (a day)"), "{text}");
        }
    }

    #[test]
    fn a_low_latency_operation_has_all_multiprocessors_unless_it_has_few_tokens() {
        let auto = |tokens| Sms::Auto.decode_blocks(132, tokens);
        assert_eq!([1, 8, 9, 32, 33, 128].map(auto), [16, 16, 64, 64, 132, 132]);
        assert_eq!(Sms::Auto.decode_blocks(20, 32), 20);
        assert_eq!([1, 128].map(|tokens| Sms::Count(24).decode_blocks(132, tokens)), [24, 24]);
    }

    #[test]
    fn local_work_has_all_multiprocessors_unless_the_config_sets_a_number() {
        assert_eq!(parse("").unwrap().local_sms, Sms::Auto);
        assert_eq!(parse("local_sms = 24").unwrap().local_sms, Sms::Count(24));
        let blocks = |sms: Sms| sms.local_blocks(132);
        assert_eq!([Sms::Auto, Sms::Count(24), Sms::Count(200)].map(blocks), [132, 24, 132]);
        let text = parse("local_sms = 0").unwrap_err();
        assert!(text.contains("\"auto\" or a number from 1 to 1024"), "{text}");
    }

    #[test]
    fn windows_lie_in_device_memory_where_the_config_says_so() {
        assert_eq!(parse("").unwrap().windows, Windows::Auto);
        assert_eq!(parse("windows = \"device\"").unwrap().windows, Windows::Device);
        let text = parse("windows = \"gpu\"").unwrap_err();
        assert!(text.contains("`auto`, `device`") || text.contains("`auto` or `device`"), "{text}");
    }

    #[test]
    fn arenas_that_combine_cannot_name_are_refused() {
        assert_eq!(parse("arena_mib = 65536").unwrap().arena_mib, Some(65536));
        for wrong in ["arena_mib = 0", "arena_mib = 65537"] {
            let text = parse(wrong).unwrap_err();
            assert!(text.contains("expected 1 to 65536 (64 GiB)"), "{text}");
        }
    }
}
