//! The arguments and reports of the kernels of every operation: how ranks enter, waits, signals, times. Mirrors
//! `args.cuh`; the compiler of the kernels checks the sizes.

/// Longest text of a refusal.
pub(crate) const TEXT: usize = 192;
/// Words of an entry's head.
pub(crate) const HEAD: u32 = 8;
/// Words of a text: its length, then four bytes each.
pub(crate) const TEXT_WORDS: u32 = 1 + TEXT as u32 / 4;
/// Threads of a block: `kWarps * kWave` of the kernels, and `kSummingWarps * kWave`.
pub(crate) const THREADS: u32 = 512;

/// How a rank enters.
pub(crate) const ENTER: u32 = 0;
pub(crate) const REFUSE_TEXT: u32 = 1;
pub(crate) const REFUSE_INPUT: u32 = 2;
pub(crate) const REFUSE_FULL: u32 = 3;
pub(crate) const REFUSE_BROKEN: u32 = 4;

/// How an operation continues. Operations have codes of their own behind these.
pub(crate) const GO: u32 = 1;
pub(crate) const REFUSED: u32 = 2;
pub(crate) const FULL: u32 = 3;
pub(crate) const MISMATCH: u32 = 4;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WaitReport {
    pub(crate) ended: u64,
    pub(crate) phase: u64,
    pub(crate) peer: u64,
    pub(crate) signal: u64,
    pub(crate) expected: u64,
    pub(crate) found: u64,
    pub(crate) waiting: u64,
    pub(crate) wait_signal: u64,
    pub(crate) wait_expected: u64,
    pub(crate) wait_found: u64,
    pub(crate) begun: u64,
    pub(crate) masking: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) epoch: u64,
    pub(crate) code: u32,
    pub(crate) rank: u32,
    pub(crate) tokens: u64,
    pub(crate) rows: u64,
    pub(crate) needed: u64,
    pub(crate) capacity: u64,
    pub(crate) verdict: u32,
    pub(crate) text_bytes: u32,
    pub(crate) signature: u64,
    pub(crate) own_signature: u64,
    pub(crate) origin: u32,
    pub(crate) own_origin: u32,
    pub(crate) objector: u32,
    pub(crate) reserved: u32,
    pub(crate) text: [u8; TEXT],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trace {
    pub(crate) begun: u64,
    pub(crate) counted: u64,
    pub(crate) entered: u64,
    pub(crate) moved: u64,
    pub(crate) arrived: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct State {
    pub(crate) arrived: u32,
    pub(crate) reserved: u32,
    pub(crate) turn: u64,
    pub(crate) stopped: u64,
    pub(crate) dealt: u64,
    pub(crate) taken: u64,
    pub(crate) gathered: u64,
    pub(crate) summed: u64,
    pub(crate) problem: u64,
    pub(crate) rows: u64,
    pub(crate) done: u64,
    pub(crate) entered: u64,
    pub(crate) outbox: u64,
    pub(crate) largest_put: u64,
    pub(crate) queues: u64,
    pub(crate) entry_signals: u64,
    pub(crate) windows: [u64; 2],
    pub(crate) tallies: u64,
    pub(crate) counters: u64,
    pub(crate) counters_step: u64,
    pub(crate) put_bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Common {
    pub(crate) abort: u64,
    pub(crate) report: u64,
    pub(crate) state: u64,
    pub(crate) outcome: u64,
    pub(crate) trace: u64,
    pub(crate) cell: u64,
    pub(crate) former: u64,
    pub(crate) former_outcome: u64,
    pub(crate) former_stopped: u64,
    pub(crate) cap_ns: u64,
    pub(crate) signature: u64,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) experts: u32,
    pub(crate) topk: u32,
    pub(crate) max_tokens: u32,
    pub(crate) input_rows: u32,
    pub(crate) ticket: u32,
    pub(crate) no_host_sync: u32,
    pub(crate) verdict: u32,
    pub(crate) entry_words: u32,
    pub(crate) text_bytes: u32,
    pub(crate) slots: u32,
    pub(crate) objector: u32,
    pub(crate) group_count: u32,
    pub(crate) local: u32,
    pub(crate) local_factor: u32,
    pub(crate) former_ticket: u32,
    pub(crate) reserved: u32,
    pub(crate) text: [u8; TEXT],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Masking {
    pub(crate) masks: u64,
    pub(crate) lost: u64,
    pub(crate) settled: u64,
    pub(crate) leaving: u64,
    pub(crate) after_ns: u64,
    pub(crate) rank: u32,
    pub(crate) reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArriveArgs {
    pub(crate) abort: u64,
    pub(crate) report: u64,
    pub(crate) cap_ns: u64,
    pub(crate) cell: u64,
    pub(crate) ranks: u32,
    pub(crate) done: u32,
    pub(crate) phase: u32,
    pub(crate) rank: u32,
    pub(crate) trace: u64,
    pub(crate) state: u64,
}

impl Common {
    /// Nothing.
    pub(crate) const NONE: Self = Self {
        abort: 0,
        report: 0,
        state: 0,
        outcome: 0,
        trace: 0,
        cell: 0,
        former: 0,
        former_outcome: 0,
        former_stopped: 0,
        cap_ns: 0,
        signature: 0,
        rank: 0,
        ranks: 0,
        experts: 0,
        topk: 0,
        max_tokens: 0,
        input_rows: 0,
        ticket: 0,
        no_host_sync: 0,
        verdict: 0,
        entry_words: 0,
        text_bytes: 0,
        slots: 0,
        objector: 0,
        group_count: 0,
        local: 0,
        local_factor: 0,
        former_ticket: 0,
        reserved: 0,
        text: [0; TEXT],
    };
}
