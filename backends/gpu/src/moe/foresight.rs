//! The memory of a communicator, before there is a device or a driver.

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::{Result, abi};

use crate::config::{Decode, GpuConfig, Windows};
use crate::decode::sizes;
use crate::engine::path::{Path, Poster, Transfer, WindowMemory};
use crate::moe::exchange::Exchange;
use crate::moe::limits::{BlockLimits, check};
use crate::moe::sizes::Sizes;

/// How rows leave over one level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkPath {
    /// Kernels store them into the memory of peers: NVLink, xGMI.
    Store,
    /// Kernels put them, through the transport's device API.
    PutByKernels,
    /// A thread of the host puts them.
    PutByHost,
}

/// A communicator that is to be opened.
#[derive(Clone, Copy, Debug)]
pub struct Foreseen<'a> {
    /// The table of the kernel set.
    pub config: &'a GpuConfig,
    /// The shape of the world. `rank` does not matter: all ranks have windows of one size.
    pub shape: &'a KernelShape,
    /// The link of the only domain, or inside of each domain.
    pub inside: LinkPath,
    /// The link between domains.
    pub between: LinkPath,
    /// The device, which must have room for the shape.
    pub block: BlockLimits,
}

/// Bytes of the windows of one rank on one level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelBytes {
    /// Entry records and counts; in low latency rows, too.
    pub control: u64,
    /// Outputs; between domains, rows on their way.
    pub arena: u64,
    /// The windows lie in pinned memory of the host, and not on the device.
    pub in_host_memory: bool,
}

impl Foreseen<'_> {
    /// The windows that the kernel set will ask for: of the only level, or of those inside and between domains.
    ///
    /// # Errors
    /// `Unsupported` if a device of this kind, or the config, cannot do the shape.
    pub fn windows(&self) -> Result<Vec<LevelBytes>> {
        let path = |link| self.path(link);
        let between = (self.shape.domains > 1).then(|| path(self.between));
        let level = match self.inside {
            LinkPath::Store => abi::TY_LEVEL_SCALE_UP,
            LinkPath::PutByKernels | LinkPath::PutByHost => abi::TY_LEVEL_SCALE_OUT,
        };
        let exchanges =
            exchanges(self.shape, self.config.decode, level, path(self.inside), between)?;
        let bytes = |exchange: &Exchange| {
            check(exchange, self.block)?;
            let sizes = Sizes::new(exchange, self.config)?;
            if let Some(decode) = &sizes.decode {
                decode.check(&exchange.shape, self.block.shared)?;
            }
            let in_host_memory = exchange.path.in_host_memory();
            Ok(LevelBytes {
                control: sizes.control_bytes(),
                arena: sizes.arena_bytes,
                in_host_memory,
            })
        };
        exchanges.iter().map(bytes).collect()
    }

    fn path(&self, link: LinkPath) -> Path {
        let put = |poster, memory| Path { transfer: Transfer::Put, poster, memory, ..Path::STORE };
        match (link, self.config.windows) {
            (LinkPath::Store, _) => Path::STORE,
            (LinkPath::PutByKernels, _) => put(Poster::Kernel, WindowMemory::Device),
            (LinkPath::PutByHost, Windows::Device) => put(Poster::HostRing, WindowMemory::Device),
            (LinkPath::PutByHost, Windows::Auto) => put(Poster::HostRing, WindowMemory::Host),
        }
    }
}

/// The exchanges of a world: over its only level, or inside and between its domains.
pub(crate) fn exchanges(
    shape: &KernelShape,
    decode: Decode,
    level: u64,
    inside: Path,
    between: Option<Path>,
) -> Result<Vec<Exchange>> {
    if let Some(between) = between {
        let levels = Exchange::levels(shape, [inside, between]);
        sizes::decodes(decode, &levels[0])?;
        return Ok(levels.into());
    }
    let exchange = Exchange::whole(shape, level, inside);
    let decodes = sizes::decodes(decode, &exchange)?;
    Ok(vec![Exchange { decodes, ..exchange }])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::exchange::tests::SHAPE;
    use crate::moe::sizes::tests::HOPPER;

    fn windows(
        shape: KernelShape,
        config: &GpuConfig,
        between: LinkPath,
    ) -> Result<Vec<LevelBytes>> {
        let (inside, block) = (LinkPath::Store, HOPPER);
        Foreseen { config, shape: &shape, inside, between, block }.windows()
    }

    fn one_domain(max_tokens: u32) -> KernelShape {
        let (ranks, experts, topk, hidden) = (2, 256, 8, 7168);
        KernelShape { ranks, experts, topk, hidden, max_tokens, domains: 1, rank: 0, ..SHAPE }
    }

    #[test]
    fn the_windows_of_one_domain_are_known_without_a_device() {
        let config = GpuConfig::default();
        let found = windows(one_domain(4096), &config, LinkPath::PutByHost).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].arena, found[0].in_host_memory), (16 << 30, false));
        assert!(found[0].control > 0);
        let small = GpuConfig { arena_mib: Some(512), ..config };
        assert_eq!(
            windows(one_domain(4096), &small, LinkPath::PutByHost).unwrap()[0].arena,
            512 << 20
        );
    }

    #[test]
    fn rows_between_domains_lie_on_the_host_or_on_the_device_by_who_puts_them() {
        let config = GpuConfig::default();
        let host = |between| {
            let found = windows(SHAPE, &config, between).unwrap();
            found.iter().map(|level| level.in_host_memory).collect::<Vec<_>>()
        };
        assert_eq!(host(LinkPath::PutByHost), [false, true]);
        assert_eq!(host(LinkPath::PutByKernels), [false, false]);
    }

    #[test]
    fn rows_of_low_latency_count_and_shapes_that_no_device_can_do_are_refused() {
        let direct = GpuConfig::default();
        let low_latency = GpuConfig { decode: Decode::LowLatency, ..direct.clone() };
        let control =
            |config| windows(one_domain(128), config, LinkPath::PutByHost).unwrap()[0].control;
        assert!(control(&low_latency) > control(&direct));
        assert!(windows(one_domain(4096), &low_latency, LinkPath::PutByHost).is_err());
        let many = KernelShape { experts: u32::MAX - 1, ..one_domain(128) };
        assert!(windows(many, &direct, LinkPath::PutByHost).is_err());
    }
}
