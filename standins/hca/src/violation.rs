//! The rules for drivers, and violations of them.

use std::fmt;

/// The rules, each with its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// A doorbell is 8 aligned bytes in one of two forms, for a queue pair of its page, and agrees with the
    /// record.
    Doorbell,
    /// The record's send word has 16 bits, moves forward, and never passes requests that were not reported yet;
    /// its receive word is untouched where there is no receive queue.
    Record,
    /// A work request has its own index, queue pair and exact size, and nothing in reserved bytes.
    Request,
    /// A work request is whole before its doorbell: every slot that was taken is filled with 0xa5.
    Poison,
    /// Keys exist, are of the queue pair's domain, and cover and allow the access for which they are used.
    Key,
    /// A completion queue has room, and its memory has the size that it claims.
    Completion,
    /// A command has the bits of its table and no others, comes in a valid state and names objects that exist.
    Mailbox,
    /// Nothing is freed that is in use.
    Lifetime,
}

impl Rule {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Doorbell,
        Self::Record,
        Self::Request,
        Self::Poison,
        Self::Key,
        Self::Completion,
        Self::Mailbox,
        Self::Lifetime,
    ];

    /// The number in `docs.md`.
    pub fn number(self) -> u8 {
        self as u8 + 1
    }

    /// The source of the rule.
    pub fn source(self) -> &'static str {
        match self {
            Self::Doorbell => {
                "rdma-core providers/mlx5/qp.c post_send_db; DOCA GPUNetIO's ring; mlx5dv_devx_alloc_uar(3)"
            }
            Self::Record => "rdma-core providers/mlx5/qp.c post_send_db, mlx5_wq_overflow",
            Self::Request => {
                "infiniband/mlx5dv.h: mlx5_wqe_ctrl_seg, mlx5_wqe_raddr_seg, enum MLX5_OPCODE"
            }
            Self::Poison => {
                "rdma-core providers/mlx5/qp.c: udma_to_device_barrier between request, record and doorbell"
            }
            Self::Key => {
                "InfiniBand Architecture 1.4, 10.6 (memory management), 9.4.5 (atomics); ibv_reg_mr(3)"
            }
            Self::Completion => "mlx5_ifc.h cqc_bits; infiniband/mlx5dv.h mlx5_cqe64",
            Self::Mailbox => {
                "mlx5_ifc.h; InfiniBand Architecture 1.4, 10.3.1 (states of queue pairs)"
            }
            Self::Lifetime => {
                "ibv_dereg_mr(3), ibv_dealloc_pd(3), mlx5dv_devx_umem_reg(3): objects in use"
            }
        }
    }
}

/// One violation by a driver. The device stops at the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The rule that it breaks.
    pub rule: Rule,
    /// The queue pair, where there is one.
    pub qpn: Option<u32>,
    /// The value that was found, and the values that were expected.
    pub text: String,
    /// The bytes that break the rule: a work request, a doorbell.
    pub bytes: Vec<u8>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {} ({:?})", self.rule.number(), self.rule)?;
        if let Some(qpn) = self.qpn {
            write!(f, ", queue pair {qpn:#x}")?;
        }
        write!(f, ": {}; source: {}", self.text, self.rule.source())?;
        for (at, chunk) in self.bytes.chunks(16).enumerate() {
            write!(f, "\n  {:04x}:", at * 16)?;
            for word in chunk.chunks(4) {
                f.write_str(" ")?;
                word.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
            }
        }
        Ok(())
    }
}

/// A rule, and the text of its violation.
pub(crate) type Broken = (Rule, String);

pub(crate) fn ensure(holds: bool, rule: Rule, text: impl FnOnce() -> String) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err((rule, text())) }
}
