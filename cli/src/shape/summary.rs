//! The answer in a few lines: what a rank takes, and how much of a card that is.

use serde::Serialize;
use tokenyard_machine::bytes;

use super::{Buffer, KernelsName, ShapeArgs};
use crate::memory::available;
use crate::output::{People, Style};

/// Part of a card that windows may take without a warning. Weights and activations need the rest.
const USUAL_PERCENT: u64 = 50;

/// The memory that a GPU needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct OnGpu {
    /// Bytes in the memory of each GPU.
    pub(super) bytes: u64,
    /// Bytes in pinned memory of the host, for each GPU.
    pub(super) host_bytes: u64,
    /// Bytes of the card that it is compared with.
    pub(super) card_bytes: u64,
    /// Whether it fits at all.
    pub(super) fits: bool,
}

/// The sum of the buffers that count and are wanted.
pub(super) fn total(list: &[Buffer], wanted: impl Fn(&Buffer) -> bool) -> u64 {
    let counted = list.iter().filter(|buffer| buffer.counts && wanted(buffer));
    counted.map(|buffer| buffer.bytes).fold(0, u64::saturating_add)
}

impl OnGpu {
    /// The memory of the windows of a GPU kernel set; none for the cpu kernel set.
    pub(super) fn of(args: &ShapeArgs, list: &[Buffer]) -> Option<Self> {
        let usual = match args.kernels {
            KernelsName::Cpu => return None,
            KernelsName::Cuda => 80,
            KernelsName::Rocm => 192,
        };
        let card_bytes = u64::from(args.card_memory.unwrap_or(usual)) << 30;
        let bytes = total(list, |buffer| !buffer.in_host_memory);
        let host_bytes = total(list, |buffer| buffer.in_host_memory);
        Some(Self { bytes, host_bytes, card_bytes, fits: bytes <= card_bytes })
    }

    fn percent(&self) -> u64 {
        (u128::from(self.bytes) * 100 / u128::from(self.card_bytes.max(1))) as u64
    }

    /// The warning, if the windows leave little of the card.
    fn warning(&self) -> Option<String> {
        let fix =
            "lower --max-tokens, or set `arena_mib` (here --arena-mib) for what really arrives";
        match self.percent() {
            _ if !self.fits => Some(format!(
                "the windows do not fit into a card of {}: opening a communicator fails. Fix: {fix}",
                bytes(self.card_bytes)
            )),
            percent if percent >= USUAL_PERCENT => Some(format!(
                "{percent} % of the card is taken before weights and activations. Fix: {fix}"
            )),
            _ => None,
        }
    }
}

/// Whether all ranks may run on this machine, of which `available` bytes are free.
fn on_this_machine(all: u64, available: Option<u64>) -> String {
    let taken = "memory is taken only where it is touched";
    match available {
        None => taken.to_owned(),
        Some(here) if all <= here => format!("it fits into the {} available here", bytes(here)),
        Some(here) => format!("more than the {} available here, but {taken}", bytes(here)),
    }
}

/// Prints the summary, and an empty line.
pub(super) fn print(args: &ShapeArgs, rank_bytes: u64, gpu: Option<&OnGpu>, people: People) {
    let ShapeArgs { ranks, experts, topk, hidden, max_tokens, domains, .. } = args;
    let strong = |count: u64| people.paint(Style::Strong, bytes(count));
    let among = if *domains > 1 { format!(" in {domains} domains") } else { String::new() };
    people.prose(format_args!(
        "{ranks} ranks{among}, {max_tokens} tokens of {hidden} elements each, top-{topk} of {experts} \
         experts, kernels {}",
        args.kernels.name()
    ));
    let Some(gpu) = gpu else {
        let all = rank_bytes.saturating_mul(u64::from(*ranks));
        people.prose(format_args!(
            "one rank: {} of address space, for windows and handles",
            strong(rank_bytes)
        ));
        people.prose(format_args!("all ranks: {}", strong(all)));
        people.prose(format_args!("{}\n", on_this_machine(all, available())));
        return;
    };
    let host = match gpu.host_bytes {
        0 => String::new(),
        count => format!("; and {} of pinned host memory", strong(count)),
    };
    people.prose(format_args!(
        "each GPU: {} of its memory, {} % of a card of {}{host}",
        strong(gpu.bytes),
        gpu.percent(),
        bytes(gpu.card_bytes)
    ));
    people
        .prose("on top: compiled kernels, the driver's context, and some MiB for each live handle");
    match gpu.warning() {
        Some(warning) => {
            people.prose(format_args!("{} {warning}\n", people.paint(Style::Warn, "warning:")))
        }
        None => people.prose(format_args!("it fits; outputs lie in the arena and cost no more\n")),
    }
}
