//! The config table of the transport.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use tokenyard_core::Result;
use tokenyard_core::config::ComponentTable;
use tokenyard_sys_nccl::consts;

pub(crate) const COMPONENT: &str = "gin";
const DEPTHS: std::ops::RangeInclusive<u32> = 2..=16_384;

/// The table `[transport.scale_out.gin]` (or `scale_up`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GinConfig {
    /// The library, an absolute path; may differ per rank. Default: `libnccl.so.2`, where the loader finds it.
    pub nccl_library: Option<PathBuf>,
    /// The folder with `nccl.h` and `nccl_device.h` of the same version, an absolute path; may differ per rank.
    /// Default: beside the library.
    pub nccl_include: Option<PathBuf>,
    /// How commands are posted; equal on all ranks. Default: `auto`, NCCL's choice.
    #[serde(rename = "type")]
    pub gin_type: GinType,
    /// Commands to one peer that are under way, 2 to 16,384, equal on all ranks. Default: 32 where a thread of NCCL's
    /// posts, else 256.
    pub queue_depth: Option<u32>,
}

/// How the commands of kernels are posted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GinType {
    /// The type that NCCL finds, except EFA-GDA.
    #[default]
    Auto,
    /// A thread of NCCL posts, over any NIC that NCCL has a plugin for.
    Proxy,
    /// Kernels post to ConnectX.
    Gdaki,
    /// Kernels post through GPI.
    Gpi,
    /// Kernels post to EFA. NCCL's packages lack headers for it.
    EfaGda,
}

impl GinType {
    /// All types that NCCL may find.
    pub(crate) const ALL: [Self; 4] = [Self::Proxy, Self::Gdaki, Self::Gpi, Self::EfaGda];

    /// `ncclGinType_t`.
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::Auto => consts::GIN_TYPE_NONE,
            Self::Proxy => consts::GIN_TYPE_PROXY,
            Self::Gdaki => consts::GIN_TYPE_GDAKI,
            Self::Gpi => consts::GIN_TYPE_GPI,
            Self::EfaGda => consts::GIN_TYPE_EFA_GDA,
        }
    }

    /// The name in a config.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Proxy => "proxy",
            Self::Gdaki => "gdaki",
            Self::Gpi => "gpi",
            Self::EfaGda => "efa_gda",
        }
    }

    /// The macro that removes this type from NCCL's headers.
    fn switch(self) -> Option<&'static str> {
        match self {
            Self::Auto => None,
            Self::Proxy => Some("NCCL_GIN_PROXY_ENABLE=0"),
            Self::Gdaki => Some("NCCL_GIN_GDAKI_ENABLE=0"),
            Self::Gpi => Some("NCCL_GIN_GPI_ENABLE=0"),
            Self::EfaGda => Some("NCCL_GIN_EFA_GDA_ENABLE=0"),
        }
    }

    /// Whether kernels that were compiled for this choice can post by `found`.
    pub(crate) fn has(self, found: Self) -> bool {
        self == found || self == Self::Auto && found != Self::EfaGda
    }

    /// The macros by which kernels are compiled for this choice alone: such kernels are much smaller.
    pub(crate) fn switches(self) -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().filter(move |other| !self.has(*other)).filter_map(Self::switch)
    }
}

impl GinConfig {
    /// Reads and checks the table.
    ///
    /// # Errors
    /// The error names the line, the value that was found and the values that are expected.
    pub(crate) fn read(table: &ComponentTable) -> Result<Self> {
        let config: Self = table.parse(COMPONENT)?;
        let paths =
            [("nccl_library", &config.nccl_library), ("nccl_include", &config.nccl_include)];
        for (key, path) in paths {
            if let Some(path) = path.as_deref().filter(|path| !Path::is_absolute(path)) {
                let found = format!("found {}; expected an absolute path", path.display());
                return Err(table.invalid(COMPONENT, key, &found));
            }
        }
        if let Some(depth) = config.queue_depth.filter(|depth| !DEPTHS.contains(depth)) {
            let found = format!("found {depth}; expected {} to {}", DEPTHS.start(), DEPTHS.end());
            return Err(table.invalid(COMPONENT, "queue_depth", &found));
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<GinConfig> {
        GinConfig::read(&ComponentTable::from_text(text, "a.toml"))
    }

    #[test]
    fn an_empty_table_is_the_default_and_every_key_is_read() {
        assert_eq!(read("").unwrap(), GinConfig::default());
        let text = "nccl_library = \"/n/lib/libnccl.so.2\"\nnccl_include = \"/n/include\"\n\
                    type = \"efa_gda\"\nqueue_depth = 64\n";
        let expected = GinConfig {
            nccl_library: Some("/n/lib/libnccl.so.2".into()),
            nccl_include: Some("/n/include".into()),
            gin_type: GinType::EfaGda,
            queue_depth: Some(64),
        };
        assert_eq!(read(text).unwrap(), expected);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_line_and_what_was_expected() {
        for (line, expected) in [
            ("queue_depth = 1", "2 to 16384"),
            ("queue_depth = 16385", "2 to 16384"),
            ("nccl_library = \"libnccl.so.2\"", "absolute path"),
            ("nccl_include = \"include\"", "absolute path"),
            ("type = \"socket\"", "`proxy`"),
            ("depth = 1", "queue_depth"),
        ] {
            let text = read(&format!("\n{line}")).unwrap_err().to_string();
            assert!(text.contains(expected) && text.contains("a.toml:2"), "{line}: {text}");
        }
    }

    #[test]
    fn kernels_are_compiled_for_what_is_named_and_for_all_but_efa_gda_by_default() {
        let out = |choice: GinType| choice.switches().collect::<Vec<_>>();
        assert_eq!(out(GinType::Auto), ["NCCL_GIN_EFA_GDA_ENABLE=0"]);
        assert_eq!(
            out(GinType::Proxy),
            ["NCCL_GIN_GDAKI_ENABLE=0", "NCCL_GIN_GPI_ENABLE=0", "NCCL_GIN_EFA_GDA_ENABLE=0"]
        );
        assert!(!out(GinType::EfaGda).contains(&"NCCL_GIN_EFA_GDA_ENABLE=0"));
        for choice in GinType::ALL {
            assert!(choice.has(choice) && !choice.has(GinType::Auto));
            assert_eq!(read(&format!("type = \"{}\"", choice.name())).unwrap().gin_type, choice);
        }
    }
}
