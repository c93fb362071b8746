//! Reads work requests, and refuses all that hardware or its reference does not accept.

use tokenyard_sys_mlx5::wqe::{INLINE, Local, MOST_BYTES, Remote, SEGMENT, flags, layout, opcode};

use crate::violation::{Broken, Rule, ensure};

/// The byte with which every slot is filled once its request was taken.
pub(crate) const POISON: u8 = 0xa5;

/// The limits of the requests of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most segments.
    pub(crate) segments: u8,
    /// Most bytes of inline data.
    pub(crate) inline: usize,
    /// Exactly one piece of memory, where there is any, and zeros in bytes that are not needed: libmlx5 leaves
    /// the old bytes of the slot behind the addend.
    pub(crate) exact: bool,
    /// Whether sends are allowed: requests that take receives without a write.
    pub(crate) sends: bool,
}

/// The bytes that a request sends from this side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Inline(Vec<u8>),
    Memory(Vec<Local>),
}

/// The operation of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Nop,
    Write { to: Remote, from: Source, imm: Option<[u8; 4]> },
    Send { from: Source, imm: Option<[u8; 4]> },
    Read { from: Remote, to: Vec<Local> },
    Atomic { to: Remote, compare: Option<u64>, value: u64, sink: Local },
}

impl Operation {
    /// Whether the request returns data.
    pub(crate) fn reads(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::Atomic { .. })
    }

    /// Its pieces of memory on this side.
    pub(crate) fn locals(&self) -> &[Local] {
        match self {
            Self::Write { from: Source::Memory(pieces), .. }
            | Self::Send { from: Source::Memory(pieces), .. }
            | Self::Read { to: pieces, .. } => pieces,
            Self::Atomic { sink, .. } => std::slice::from_ref(sink),
            _ => &[],
        }
    }
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) index: u16,
    pub(crate) opcode: u8,
    pub(crate) segments: u8,
    pub(crate) signaled: bool,
    /// 0 to 4.
    pub(crate) fence: u8,
    pub(crate) operation: Operation,
}

impl Work {
    /// Blocks that the request takes.
    pub(crate) fn blocks(&self) -> u16 {
        blocks(self.segments)
    }
}

/// Blocks that a number of segments takes.
pub(crate) fn blocks(segments: u8) -> u16 {
    u16::from(segments.div_ceil(4)).max(1)
}

/// Reads a request's first segment, and returns the number of segments.
pub(crate) fn segments(
    first: &[u8; SEGMENT],
    index: u16,
    qpn: u32,
    limits: &Limits,
) -> Result<u8, Broken> {
    ensure(*first != [POISON; SEGMENT], Rule::Poison, || {
        format!("request {index:#x}: the doorbell rang before the first segment was written")
    })?;
    let opcode = u32::from_be_bytes(array(first, layout::CTRL_OPCODE));
    let found = (opcode >> 8) as u16;
    ensure(found == index, Rule::Request, || {
        format!("found index {found:#x}; expected {index:#x}: a stale or a misplaced request")
    })?;
    let qpn_ds = u32::from_be_bytes(array(first, layout::CTRL_QPN_DS));
    ensure(qpn_ds >> 8 == qpn, Rule::Request, || {
        format!("request {index:#x}: found queue pair {:#x}; expected {qpn:#x}", qpn_ds >> 8)
    })?;
    let segments = qpn_ds as u8;
    ensure((1..=limits.segments).contains(&segments), Rule::Request, || {
        format!("request {index:#x}: found {segments} segments; expected 1 to {}", limits.segments)
    })?;
    Ok(segments)
}

/// Reads a request of as many segments as its first segment says.
pub(crate) fn request(bytes: &[u8], index: u16, qpn: u32, limits: &Limits) -> Result<Work, Broken> {
    let first = array(bytes, 0);
    let segments = segments(&first, index, qpn, limits)?;
    let reader = Reader { bytes, index, limits };
    reader.whole()?;
    let word = u32::from_be_bytes(array(bytes, layout::CTRL_OPCODE));
    let (opcode, modifier) = (word as u8, (word >> 24) as u8);
    reader.check(modifier == 0, || format!("found opcode modifier {modifier:#x}; expected 0"))?;
    let (signaled, fence) = reader.flags()?;
    let operation = reader.operation(opcode)?;
    Ok(Work { index, opcode, segments, signaled, fence, operation })
}

struct Reader<'a> {
    bytes: &'a [u8],
    index: u16,
    limits: &'a Limits,
}

impl Reader<'_> {
    fn check(&self, holds: bool, text: impl FnOnce() -> String) -> Result<(), Broken> {
        ensure(holds, Rule::Request, || format!("request {:#x}: {}", self.index, text()))
    }

    fn count(&self) -> usize {
        self.bytes.len() / SEGMENT
    }

    /// Checks that every segment was written. Only a segment of inline data may have any bytes.
    fn whole(&self) -> Result<(), Broken> {
        let most = if self.is_inline(2) { 3 } else { self.count() };
        let torn = (0..most).find(|at| self.segment(*at) == [POISON; SEGMENT]);
        ensure(torn.is_none(), Rule::Poison, || {
            format!(
                "request {:#x}: the doorbell rang before segment {} was written",
                self.index,
                torn.unwrap_or(0)
            )
        })
    }

    fn segment(&self, at: usize) -> [u8; SEGMENT] {
        array(self.bytes, at * SEGMENT)
    }

    fn is_inline(&self, segment: usize) -> bool {
        let at = segment * SEGMENT;
        segment < self.count() && u32::from_be_bytes(array(self.bytes, at)) & INLINE != 0
    }

    fn flags(&self) -> Result<(bool, u8), Broken> {
        let byte = self.bytes[layout::CTRL_FLAGS];
        let completion = byte & flags::COMPLETION_MASK;
        let fence = byte >> flags::FENCE_SHIFT;
        let rest = byte & !(flags::COMPLETION_MASK | 7 << flags::FENCE_SHIFT);
        self.check(completion == 0 || completion == flags::COMPLETION, || {
            format!("found completion mode {}; expected 0 or 2", completion >> 2)
        })?;
        self.check(fence <= 4, || format!("found fence {fence}; expected 0 to 4"))?;
        self.check(rest == 0, || format!("found flags {rest:#04x}; expected 0"))?;
        let reserved = [layout::CTRL_SIGNATURE, layout::CTRL_STREAM, layout::CTRL_STREAM + 1];
        for at in reserved {
            let found = self.bytes[at];
            self.check(found == 0, || format!("found reserved byte {at} = {found:#04x}"))?;
        }
        Ok((completion != 0, fence))
    }

    fn operation(&self, opcode: u8) -> Result<Operation, Broken> {
        let operation = match opcode {
            opcode::NOP => {
                self.exactly(1)?;
                Operation::Nop
            }
            opcode::RDMA_WRITE => {
                Operation::Write { to: self.remote()?, from: self.source(2, false)?, imm: None }
            }
            opcode::RDMA_WRITE_IMM => Operation::Write {
                to: self.remote()?,
                from: self.source(2, true)?,
                imm: Some(array(self.bytes, layout::CTRL_IMM)),
            },
            opcode::RDMA_READ => {
                Operation::Read { from: self.remote()?, to: self.pieces(2, false)? }
            }
            opcode::ATOMIC_FA | opcode::ATOMIC_CS => self.atomic(opcode)?,
            opcode::SEND if self.limits.sends => {
                Operation::Send { from: self.source(1, true)?, imm: None }
            }
            opcode::SEND_IMM if self.limits.sends => Operation::Send {
                from: self.source(1, true)?,
                imm: Some(array(self.bytes, layout::CTRL_IMM)),
            },
            other => {
                self.check(false, || format!("found opcode {other:#04x}; expected a known one"))?;
                Operation::Nop
            }
        };
        let has_imm = matches!(opcode, opcode::RDMA_WRITE_IMM | opcode::SEND_IMM);
        let imm: [u8; 4] = array(self.bytes, layout::CTRL_IMM);
        self.check(has_imm || imm == [0; 4], || format!("found immediate data {imm:02x?}"))?;
        Ok(operation)
    }

    fn exactly(&self, segments: usize) -> Result<(), Broken> {
        let found = self.count();
        self.check(found == segments, || format!("found {found} segments; expected {segments}"))
    }

    fn at_least(&self, segments: usize) -> Result<(), Broken> {
        let found = self.count();
        let text = || format!("found {found} segments; expected {segments} or more");
        self.check(found >= segments, text)
    }

    fn remote(&self) -> Result<Remote, Broken> {
        self.at_least(2)?;
        let reserved = u32::from_be_bytes(array(self.bytes, SEGMENT + layout::REMOTE_RESERVED));
        self.check(reserved == 0, || format!("found reserved word {reserved:#x} behind the key"))?;
        Ok(Remote {
            address: u64::from_be_bytes(array(self.bytes, SEGMENT + layout::REMOTE_ADDRESS)),
            key: u32::from_be_bytes(array(self.bytes, SEGMENT + layout::REMOTE_KEY)),
        })
    }

    fn atomic(&self, opcode: u8) -> Result<Operation, Broken> {
        self.exactly(4)?;
        let to = self.remote()?;
        let at = 2 * SEGMENT;
        let value = u64::from_be_bytes(array(self.bytes, at + layout::ATOMIC_ADD));
        let compare = u64::from_be_bytes(array(self.bytes, at + layout::ATOMIC_COMPARE));
        let swaps = opcode == opcode::ATOMIC_CS;
        let is_free = swaps || !self.limits.exact;
        self.check(is_free || compare == 0, || format!("found {compare:#x} behind the addend"))?;
        let sink = self.data(3)?;
        self.check(sink.bytes == 8, || {
            format!("found a sink of {} bytes; expected 8", sink.bytes)
        })?;
        Ok(Operation::Atomic { to, compare: swaps.then_some(compare), value, sink })
    }

    /// Inline data or memory, from segment `first` to the end.
    fn source(&self, first: usize, may_be_empty: bool) -> Result<Source, Broken> {
        if !self.is_inline(first) {
            return Ok(Source::Memory(self.pieces(first, may_be_empty)?));
        }
        let at = first * SEGMENT;
        let length = (u32::from_be_bytes(array(self.bytes, at)) & !INLINE) as usize;
        let most = self.limits.inline;
        self.check((1..=most).contains(&length), || {
            format!("found {length} inline bytes; expected 1 to {most}")
        })?;
        self.exactly(first + (layout::DATA_INLINE + length).div_ceil(SEGMENT))?;
        let at = at + layout::DATA_INLINE;
        Ok(Source::Inline(self.bytes[at..at + length].to_vec()))
    }

    fn pieces(&self, first: usize, may_be_empty: bool) -> Result<Vec<Local>, Broken> {
        if self.limits.exact {
            self.exactly(first + 1)?;
        } else if !may_be_empty {
            self.at_least(first + 1)?;
        }
        (first..self.count()).map(|at| self.data(at)).collect()
    }

    fn data(&self, segment: usize) -> Result<Local, Broken> {
        let at = segment * SEGMENT;
        let bytes = u32::from_be_bytes(array(self.bytes, at + layout::DATA_BYTES));
        self.check((1..=MOST_BYTES).contains(&bytes), || {
            format!(
                "found {bytes:#x} bytes of data; expected 1 to {MOST_BYTES:#x} (0 counts as 2^31)"
            )
        })?;
        Ok(Local {
            address: u64::from_be_bytes(array(self.bytes, at + layout::DATA_ADDRESS)),
            key: u32::from_be_bytes(array(self.bytes, at + layout::DATA_KEY)),
            bytes,
        })
    }
}

/// `N` bytes from an offset on. Bytes behind the end are 0.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes.get(at + i).copied().unwrap_or(0))
}
