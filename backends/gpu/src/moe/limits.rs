//! The requirements of an exchange on a device and a transport.

use tokenyard_core::Result;

use crate::driver::DeviceFacts;
use crate::engine::args::THREADS;
use crate::engine::path::unsupported;
use crate::moe::args::PLACE_BITS;
use crate::moe::exchange::{Exchange, Scope};
use crate::moe::sizes::check_shared;

/// Most ranks that all receive each other's counts; more ranks need counting in two half rounds.
const MOST_RANKS: u32 = 72;

/// Threads of a warp: NVIDIA's, and a wavefront of AMD's. Sizes are counted in them.
const WAVES: [u32; 2] = [32, 64];

/// Most shared memory that one gathering of row metadata takes, except for its list of tokens.
const METADATA_ROOM: u32 = 12 << 10;

/// Shared memory of a gathering: two arrays by K of multiples of 16 bytes, scales, a list of tokens.
pub(crate) fn metadata_bytes(room: u32) -> u32 {
    (room + 2 * 16 + 128).next_multiple_of(128)
}

/// The memory and the warps that a device gives a block of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLimits {
    /// Bytes of shared memory.
    pub shared: u32,
    /// Threads of a warp: `kWave` of the kernels.
    pub wave: u32,
}

impl BlockLimits {
    pub(crate) fn of(facts: &DeviceFacts) -> Self {
        Self { shared: facts.most_shared, wave: facts.wave }
    }

    /// Warps of a block: `kWarps` of the kernels, and `kSummingWarps`.
    pub(crate) fn warps(&self) -> u32 {
        THREADS / self.wave
    }

    /// Warps of a block that move row metadata beside rows, the last ones: `kMetadataWarps` of kernels without runs.
    pub(crate) fn metadata_warps(&self) -> u32 {
        self.warps() / 4
    }

    /// Shared memory that one gathering of row metadata may take, except for its list of tokens: less where all
    /// gatherings would take more than half of a block's memory.
    pub(crate) fn metadata_room(&self) -> u32 {
        METADATA_ROOM.min(self.shared / 2 / self.metadata_warps())
    }

    /// Each warp of a block has places for this many, and there is a block even on one processor.
    pub(crate) fn most_tokens(&self) -> u32 {
        self.warps() << PLACE_BITS
    }
}

/// Whether this device can do an exchange at all. Equal on equal devices.
pub(crate) fn check(exchange: &Exchange, block: BlockLimits) -> Result<()> {
    let (ranks, max_tokens) = (exchange.shape.ranks, exchange.shape.max_tokens);
    if !WAVES.contains(&block.wave) {
        return unsupported(format!(
            "found a GPU with {} threads in a warp; expected {} or {}",
            block.wave, WAVES[0], WAVES[1]
        ));
    }
    if ranks > MOST_RANKS {
        let what = match exchange.scope {
            Scope::Flat => "ranks in one domain",
            Scope::IntraDomain => "ranks in a domain",
            Scope::InterDomain => "domains",
        };
        return unsupported(format!("found {ranks} {what}; expected at most {MOST_RANKS}"));
    }
    let most_tokens = block.most_tokens();
    if max_tokens > most_tokens {
        let (what, fix) = match exchange.scope {
            Scope::IntraDomain => {
                ("domains * max_tokens", "lower max_tokens, or have fewer domains")
            }
            Scope::Flat | Scope::InterDomain => ("max_tokens", "lower max_tokens"),
        };
        let message = format!("found {what} = {max_tokens}; expected at most {most_tokens}");
        return unsupported(message).map_err(|error| error.with_fix(fix));
    }
    check_shared(exchange, block)
}

#[cfg(test)]
mod tests {
    use tokenyard_core::kernels::KernelShape;
    use tokenyard_core::moe::RowFormat;
    use tokenyard_core::{ErrorKind, abi};

    use super::*;
    use crate::engine::path::Path;
    use crate::engine::path::tests::ring;
    use crate::moe::exchange::tests::SHAPE;
    use crate::moe::moving::Moving;
    use crate::moe::moving::tests::MOVING;
    use crate::moe::sizes::{DispatchTiling, KEPT};

    /// Blocks on sm_90 and sm_100, on sm_80, on sm_86, sm_89 and sm_120, and on gfx942.
    const HOPPER: BlockLimits = BlockLimits { shared: 232_448, wave: 32 };
    const AMPERE: BlockLimits = BlockLimits { shared: 166_912, wave: 32 };
    const SMALL: BlockLimits = BlockLimits { shared: 101_376, wave: 32 };
    const GFX942: BlockLimits = BlockLimits { shared: 65_536, wave: 64 };
    /// Blocks of a stand-in for HIP over CUDA.
    const GFX942_OF_32: BlockLimits = BlockLimits { shared: 65_536, wave: 32 };
    const ROW: RowFormat = RowFormat { x_bytes: 14_336, scale_bytes: 224, weights: true };

    fn shape(ranks: u32, experts: u32, topk: u32) -> KernelShape {
        let domains = 1;
        KernelShape { ranks, domains, experts, topk, hidden: 7168, max_tokens: 4096, ..SHAPE }
    }

    #[test]
    fn more_tokens_of_all_domains_than_warps_have_places_for_are_refused() {
        let check = |max_tokens| {
            let shape = KernelShape { max_tokens, ..SHAPE };
            let [inside, between] = Exchange::levels(&shape, [Path::STORE; 2]);
            check(&inside, HOPPER).and_then(|()| check(&between, HOPPER))
        };
        let most = HOPPER.most_tokens();
        // With three domains.
        assert!(check(most / 3).is_ok());
        for (max_tokens, found) in [(most / 3 + 1, 16_777_218), (1 << 31, u32::MAX)] {
            let error = check(max_tokens).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            let text = error.to_string();
            let expected =
                format!("found domains * max_tokens = {found}; expected at most 16777216");
            assert!(text.contains(&expected), "{text}");
            assert!(error.fix().is_some_and(|fix| fix.contains("fewer domains")), "{text}");
        }
    }

    #[test]
    fn more_tokens_of_one_rank_than_warps_have_places_for_are_refused() {
        let check = |max_tokens| {
            let shape = KernelShape { max_tokens, domains: 1, ..SHAPE };
            check(&Exchange::whole(&shape, abi::TY_LEVEL_SCALE_UP, Path::STORE), HOPPER)
        };
        let most = HOPPER.most_tokens();
        assert!(check(most).is_ok());
        let error = check(most + 1).unwrap_err();
        assert!(error.to_string().contains("found max_tokens = 16777217"), "{error}");
        assert_eq!(error.fix(), Some("lower max_tokens"));
    }

    #[test]
    fn every_device_has_room_for_any_top_k_of_up_to_512_experts() {
        for (shared, ranks) in [(HOPPER, 8), (AMPERE, 8), (SMALL, 8), (HOPPER, 72), (SMALL, 1)] {
            for (topk, experts) in
                (1..=32).flat_map(|topk| [8, 64, 256, 384, 512].map(|e| (topk, e)))
            {
                let experts = u32::max(experts, topk).next_multiple_of(ranks);
                let shape = shape(ranks, experts, topk);
                let exchange = Exchange::whole(&shape, abi::TY_LEVEL_SCALE_UP, Path::STORE);
                let found = check(&exchange, shared);
                assert!(found.is_ok(), "{shape:?} in {shared:?}: {found:?}");
                for (x_bytes, scale_bytes) in [(7168, 224), (14_336, 2048), (28_672, 1024)] {
                    let row = RowFormat { x_bytes, scale_bytes, weights: true };
                    for moving in MOVING {
                        let dispatch_tiling = DispatchTiling::new(&exchange, &row, shared, moving);
                        assert!(
                            dispatch_tiling.shared + KEPT <= shared.shared,
                            "{shape:?}, {row:?}: {dispatch_tiling:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_block_of_gfx942_has_room_for_eight_ranks_and_256_experts_and_rows_of_any_type() {
        for (block, [ranks, experts, topk]) in [
            (GFX942, [8, 256, 8]),
            (GFX942, [8, 256, 32]),
            (GFX942, [8, 512, 8]),
            (GFX942, [16, 256, 8]),
            (GFX942, [1, 512, 8]),
            (GFX942_OF_32, [8, 256, 8]),
            (GFX942_OF_32, [2, 256, 32]),
        ] {
            let shape = shape(ranks, experts, topk);
            let exchange = Exchange::whole(&shape, abi::TY_LEVEL_SCALE_UP, Path::STORE);
            let found = check(&exchange, block);
            assert!(found.is_ok(), "{shape:?} in {block:?}: {found:?}");
            let domains = KernelShape { domains: ranks, ..shape };
            let [_, rail] = Exchange::levels(&domains, [Path::STORE, ring(1024)]);
            let rows = [(7168, 224), (14_336, 0), (28_672, 1024)];
            for (exchange, (x_bytes, scale_bytes)) in
                [exchange, rail].iter().flat_map(|one| rows.map(|row| (one, row)))
            {
                let row = RowFormat { x_bytes, scale_bytes, weights: true };
                for moving in MOVING {
                    let tiling = DispatchTiling::new(exchange, &row, block, moving);
                    assert!(tiling.shared + KEPT <= block.shared, "{row:?}: {tiling:?}");
                    assert!(tiling.movers <= block.warps(), "{tiling:?}");
                }
            }
        }
        let exchange = Exchange::whole(&shape(8, 1024, 8), abi::TY_LEVEL_SCALE_UP, Path::STORE);
        let text = check(&exchange, GFX942).unwrap_err().to_string();
        assert!(text.contains("1024 experts and top-8 need") && text.contains("65536"), "{text}");
    }

    #[test]
    fn a_warp_counts_32_tokens_at_once_unless_a_block_has_no_room_for_what_they_select() {
        let tokens = |experts, topk, shared| {
            let exchange =
                Exchange::whole(&shape(8, experts, topk), abi::TY_LEVEL_SCALE_UP, Path::STORE);
            DispatchTiling::new(&exchange, &ROW, shared, Moving::Links { beside: false })
                .tally_tokens
        };
        for (experts, topk) in [(256, 8), (512, 32), (384, 10)] {
            assert_eq!([HOPPER, AMPERE].map(|shared| tokens(experts, topk, shared)), [32, 32]);
        }
        assert_eq!([8, 10, 16, 32].map(|topk| tokens(512, topk, SMALL)), [32, 32, 16, 8]);
        assert_eq!([8, 16, 32].map(|topk| tokens(256, topk, SMALL)), [32, 32, 16]);
        // A shape that does not fit at all is refused, with its least requirement.
        assert_eq!(tokens(4096, 8, SMALL), 1);
    }
}
