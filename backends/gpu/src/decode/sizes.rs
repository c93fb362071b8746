//! The inbox of low-latency rows: see `decode.cuh`.

use tokenyard_core::moe::{Quant, REGION_ALIGN, Shape, logfmt};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::config::Decode;
use crate::engine::args::{HEAD, Masking, THREADS};
use crate::engine::path::unsupported;
use crate::moe::args::{DecodeArgs, MOST_PIECES};
use crate::moe::exchange::{Exchange, Scope};
use crate::moe::quotient::factor;
use crate::moe::sizes::KEPT;

/// Bits of a word of a set of tokens.
const SET_BITS: u32 = u32::BITS;
/// Most tokens of a rank: blocks read all routing, which pays off for few tokens.
const MOST_TOKENS: u32 = 1024;
/// Most experts of a rank: a record names one in 16 bits, and one number stands for none.
const MOST_LOCAL: u32 = u16::MAX as u32;
/// The longest row with its scales that fits the registers of a block.
const LONGEST_ROW: u64 = (16 * MOST_PIECES * THREADS) as u64;
/// Most blocks that only send, where there are many peers, one of them only heads. This many fill the link, and the
/// others do not poll behind their own stores.
const SENDERS: u32 = 33;
/// One of this many blocks sends. With fewer than `FEWEST_BY_ROLE`, too few would be left to receive: all do both.
const BLOCKS_PER_SENDER: u32 = 4;
const FEWEST_BY_ROLE: u32 = 96;
/// Up to this many ranks all blocks send and receive: a block has about one row of others.
const FEW_RANKS: u32 = 2;

/// Sizes and offsets in the control window; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DecodeSizes {
    words: u64,
    records: u64,
    rows: u64,
    /// The longest row with its scales.
    pub(crate) row_pitch: u64,
    record_pitch: u32,
    token_words: u32,
    /// Behind the last row.
    pub(crate) end: u64,
}

/// The part of a call in its decode arguments, beside sizes: masks, addresses of statistics, and forms of the
/// output's arrays.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DecodeCall {
    pub(crate) masking: Masking,
    pub(crate) waited_ns: u64,
    pub(crate) expert_totals: u64,
    pub(crate) scale_stride: [u32; 2],
    pub(crate) source_step: u32,
}

/// Whether the operations of a config send rows without a request over an exchange that may not support it.
///
/// # Errors
/// `Unsupported` where it does not.
pub(crate) fn decodes(decode: Decode, exchange: &Exchange) -> Result<bool> {
    if decode == Decode::Direct {
        return Ok(false);
    }
    let found = match exchange {
        _ if exchange.scope != Scope::Flat => "several domains",
        _ if exchange.path.puts() => "a transport over which rows are put",
        Exchange { shape, .. } if shape.max_tokens > MOST_TOKENS => {
            let message = format!(
                "decode = \"low_latency\": found max_tokens = {}; expected at most {MOST_TOKENS}",
                shape.max_tokens
            );
            return unsupported(message).map_err(with_fix);
        }
        Exchange { shape, .. } if shape.local_experts() > MOST_LOCAL => {
            "too many experts of a rank"
        }
        _ => return Ok(true),
    };
    let expected = "one domain whose ranks reach each other by loads and stores, and fewer than 65536 \
                    experts of a rank";
    unsupported(format!("decode = \"low_latency\": found {found}; expected {expected}"))
        .map_err(with_fix)
}

/// The calls that an exchange takes because its rows go to inboxes: bits `TY_KERNELS_CAP_*`. Rows are encoded where
/// a thread has two pieces of them.
pub(crate) fn capabilities(exchange: &Exchange) -> u32 {
    let hidden = exchange.shape.hidden;
    let codes = exchange.decodes && logfmt::takes(hidden as usize) && hidden <= 16 * THREADS;
    if codes { abi::TY_KERNELS_CAP_LOGFMT10 } else { 0 }
}

fn with_fix(error: Error) -> Error {
    error.with_fix("set decode = \"direct\" in the kernel set's table, or leave it out")
}

impl DecodeSizes {
    /// The sizes from an offset of the control window on.
    pub(crate) fn new(exchange: &Exchange, at: u64) -> Self {
        let Shape { ranks, topk, hidden, max_tokens, .. } = exchange.shape;
        let align = |bytes: u64| bytes.next_multiple_of(REGION_ALIGN);
        let token_words = max_tokens.div_ceil(SET_BITS);
        let reported = u64::from(token_words + exchange.shape.local_experts());
        let record_pitch = 16 * (1 + topk);
        // fp32 with as many scale bytes as channels, as in `Sizes`.
        let widest = 4 * u64::from(hidden) + u64::from(hidden.max(4)).next_multiple_of(16);
        let row_pitch = align(widest).min(LONGEST_ROW);
        let writers = u64::from(exchange.slots()) * u64::from(ranks);
        let places = writers * u64::from(max_tokens);
        let words = align(at);
        let records = words + align(8 * writers * reported);
        let rows = records + align(places * u64::from(record_pitch));
        let end = rows + places * row_pitch;
        Self { words, records, rows, row_pitch, record_pitch, token_words, end }
    }

    /// The arguments of a kernel.
    pub(crate) fn arguments(
        &self,
        shape: &Shape,
        phases: u32,
        senders: u32,
        of: &DecodeCall,
    ) -> DecodeArgs {
        DecodeArgs {
            words: self.words,
            records: self.records,
            rows: self.rows,
            row_pitch: self.row_pitch,
            record_pitch: self.record_pitch,
            token_words: self.token_words,
            phases,
            senders,
            masking: of.masking,
            waited_ns: of.waited_ns,
            expert_totals: of.expert_totals,
            scale_stride: of.scale_stride,
            source_step: of.source_step,
            topk_factor: factor(shape.topk),
            tokens_factor: factor(shape.max_tokens),
            words_factor: factor(self.token_words),
            report_factor: factor(self.token_words + shape.local_experts()),
            ranks_factor: factor(shape.ranks),
        }
    }

    /// Offsets and lengths of the places for rows of one writer, by slot.
    pub(crate) fn rows_of(
        self,
        exchange: &Exchange,
        writer: u32,
    ) -> impl Iterator<Item = (u64, u64)> + use<> {
        let Shape { ranks, max_tokens, .. } = exchange.shape;
        let bytes = u64::from(max_tokens) * self.row_pitch;
        (0..exchange.slots()).map(move |slot| {
            (self.rows + (u64::from(slot) * u64::from(ranks) + u64::from(writer)) * bytes, bytes)
        })
    }

    /// Shared memory of a block: addresses, the routing of this rank, the reports of all ranks about their rows.
    pub(crate) fn shared(&self, shape: &Shape) -> u32 {
        let Shape { ranks, topk, hidden, max_tokens, .. } = *shape;
        let local = shape.local_experts();
        let sent = (shape.experts + ranks) * self.token_words
            + max_tokens * topk
            + Quant::FP8.groups(hidden);
        let coming = ranks * (HEAD + 2 * self.token_words + 2 * local + 1) + 3;
        // Windows, and a problem of the routing.
        8 * (ranks + 2) + 4 * (sent + coming)
    }

    /// The same for a combine: the longest partial row of its own (`kOwnPartBytes`), addresses, the heads of all ranks.
    pub(crate) fn shared_of_combine(shape: &Shape) -> u32 {
        LONGEST_ROW as u32 + 8 * (shape.ranks + 1) + 4 * shape.ranks * (HEAD + 1)
    }

    /// The same for a combine of rank-major rows of 16-bit numbers: an own row and sums of it (`SumRoom`), of as many
    /// threads.
    pub(crate) fn shared_of_narrow(shape: &Shape, threads: u32) -> u32 {
        Self::shared_of_combine(shape) - LONGEST_ROW as u32 + 2 * (16 + 4 * 8) * threads
    }

    /// Whether a block of a device that gives it `most_shared` bytes has memory for that.
    pub(crate) fn check(&self, shape: &Shape, most_shared: u32) -> Result<()> {
        let combine = Self::shared_of_combine(shape).max(Self::shared_of_narrow(shape, THREADS));
        let needed = self.shared(shape).max(combine).saturating_add(KEPT);
        if needed <= most_shared {
            return Ok(());
        }
        let message = format!(
            "decode = \"low_latency\": {} experts, top-{} and max_tokens = {} need {needed} bytes of shared \
             memory in a block; the device has {most_shared}",
            shape.experts, shape.topk, shape.max_tokens
        );
        unsupported(message).map_err(|error| with_fix(error).with_context("key", "decode"))
    }

    /// The reason why rows of this many bytes, with scales of this many bytes, have no place; none
    /// if they are.
    pub(crate) fn refuses(&self, row_bytes: u64, scale_bytes: u64) -> Option<String> {
        let bytes = row_bytes + scale_bytes.next_multiple_of(16);
        (bytes > self.row_pitch).then(|| {
            format!(
                "decode = \"low_latency\": found rows of {bytes} bytes with their scales; expected at most {}",
                self.row_pitch
            )
        })
    }
}

/// Blocks of a dispatch in one kernel that only send; 0 where each sends and receives.
pub(crate) fn senders(ranks: u32, blocks: u32) -> u32 {
    let by_role = ranks > FEW_RANKS && blocks >= FEWEST_BY_ROLE;
    if by_role { (blocks / BLOCKS_PER_SENDER).min(SENDERS) } else { 0 }
}

/// An error for a combine of a handle whose output is not packed.
pub(crate) fn not_packed() -> Error {
    Error::new(ErrorKind::Internal, "combine", "the handle's dispatch was no low-latency one")
}

#[cfg(test)]
mod tests {
    use tokenyard_core::kernels::KernelShape;

    use super::*;
    use crate::engine::path::Path;
    use crate::engine::path::tests::ring;
    use crate::moe::exchange::tests::SHAPE;

    const HOPPER: u32 = 232_448;

    fn whole(max_tokens: u32, path: Path) -> Exchange {
        let shape = KernelShape {
            ranks: 8,
            domains: 1,
            experts: 288,
            topk: 8,
            hidden: 7168,
            max_tokens,
            ..SHAPE
        };
        let exchange = Exchange::whole(&shape, abi::TY_LEVEL_SCALE_UP, path);
        Exchange { decodes: true, ..exchange }
    }

    #[test]
    fn it_is_refused_by_name_where_rows_are_put_or_cross_domains_or_tokens_are_many() {
        let store = whole(128, Path::STORE);
        assert!(decodes(Decode::LowLatency, &store).unwrap());
        assert!(!decodes(Decode::Direct, &whole(4096, ring(1 << 20))).unwrap());
        let [inside, _] = Exchange::levels(&SHAPE, [Path::STORE; 2]);
        for (exchange, found) in [
            (whole(128, ring(1 << 20)), "found a transport over which rows are put"),
            (inside, "found several domains"),
            (whole(1025, Path::STORE), "found max_tokens = 1025; expected at most 1024"),
        ] {
            let error = decodes(Decode::LowLatency, &exchange).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("decode = \"low_latency\"") && text.contains(found), "{text}");
            assert!(error.fix().is_some_and(|fix| fix.contains("direct")), "{text}");
        }
    }

    #[test]
    fn sums_travel_in_logfmt_10_where_rows_go_to_inboxes_and_have_blocks_of_512_up_to_8192() {
        let takes = |hidden, decodes| {
            let exchange = whole(128, Path::STORE);
            let shape = Shape { hidden, ..exchange.shape };
            let exchange = Exchange { shape, regions: shape, decodes, ..exchange };
            let fits = DecodeSizes::new(&exchange, 0)
                .refuses(logfmt::most_bytes(hidden as usize) as u64, 0);
            assert_eq!(fits, None);
            capabilities(&exchange) & abi::TY_KERNELS_CAP_LOGFMT10 != 0
        };
        assert!(takes(512, true) && takes(7168, true) && takes(8192, true));
        assert!(!takes(7168, false) && !takes(768, true) && !takes(8704, true));
    }

    #[test]
    fn every_place_is_apart_and_aligned_and_slots_are_twice_the_operations_that_may_be_open() {
        let exchange = whole(128, Path::STORE);
        assert_eq!(exchange.slots(), 2 * exchange.in_flight.max(2));
        let sizes = DecodeSizes::new(&exchange, 1000);
        let writers = u64::from(exchange.slots()) * 8;
        assert_eq!((sizes.words, sizes.token_words, sizes.record_pitch), (1024, 4, 144));
        assert!(sizes.records >= sizes.words + 8 * writers * (4 + 36));
        assert!(sizes.rows >= sizes.records + writers * 128 * 144);
        assert_eq!(sizes.end, sizes.rows + writers * 128 * sizes.row_pitch);
        assert_eq!(sizes.row_pitch, LONGEST_ROW);
        assert!([sizes.words, sizes.records, sizes.rows].iter().all(|at| at % 128 == 0));
    }

    #[test]
    fn the_places_of_one_writer_are_apart_from_those_of_others_in_every_slot() {
        let exchange = whole(128, Path::STORE);
        let sizes = DecodeSizes::new(&exchange, 0);
        let mut all: Vec<_> = (0..8).flat_map(|writer| sizes.rows_of(&exchange, writer)).collect();
        all.sort_unstable();
        assert_eq!(all.first().unwrap().0, sizes.rows);
        assert!(all.windows(2).all(|two| two[0].0 + two[0].1 == two[1].0));
        assert_eq!(all.last().map(|(at, bytes)| at + bytes), Some(sizes.end));
    }

    #[test]
    fn rows_that_a_block_cannot_hold_are_refused_with_what_it_can() {
        let sizes = DecodeSizes::new(&whole(128, Path::STORE), 0);
        assert_eq!(sizes.refuses(4 * 7168, 0), None);
        assert_eq!(sizes.refuses(7168, 224), None);
        let text = sizes.refuses(4 * 7168, 7168).unwrap();
        assert!(text.contains("35840") && text.contains("at most 32768"), "{text}");
    }

    #[test]
    fn a_block_has_room_for_the_routing_of_decoding_shapes_and_others_are_refused() {
        let check = |tokens| {
            let exchange = whole(tokens, Path::STORE);
            DecodeSizes::new(&exchange, 0).check(&exchange.shape, HOPPER)
        };
        assert!(check(128).is_ok() && check(1024).is_ok());
        let shape = Shape { experts: 8192, topk: 32, ..whole(1024, Path::STORE).shape };
        let exchange = Exchange { shape, regions: shape, ..whole(1024, Path::STORE) };
        let error = DecodeSizes::new(&exchange, 0).check(&shape, HOPPER).unwrap_err();
        assert!(error.to_string().contains("8192 experts, top-32"), "{error}");
    }

    #[test]
    fn blocks_take_roles_where_there_are_many_peers_and_enough_blocks() {
        assert_eq!(
            [senders(2, 132), senders(8, 132), senders(3, 96), senders(8, 64)],
            [0, 33, 24, 0]
        );
    }
}
