//! Operations beside MoE, and sessions that they share with communicators.
//!
//! Watched by `conformance/tests/{pipes,gathers,tables}.rs` and the cases of `conformance/src/ops`; sessions of several
//! users by the cases `l2/shared`.

/// Methods of every user without experts: how it is opened on all ranks, and what it says of itself. The fields are
/// `standing`, `user`, `options` and `report`.
macro_rules! user_of_a_session {
    ($user:ident, $options:ident) => {
        impl std::fmt::Debug for $user {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($user))
                    .field("rank", &self.rank())
                    .field("options", &self.options)
                    .finish_non_exhaustive()
            }
        }

        impl $user {
            /// Opens it on all ranks of `world`, in a session of its own. Collective.
            ///
            /// # Errors
            /// As [`Communicator::open`](crate::communicator::Communicator::open). [`ErrorKind::Unsupported`] where
            /// the kernel set has no such operations, and where losses are masked.
            pub fn open(
                world: &Arc<World>,
                config: &crate::config::Config,
                options: $options,
            ) -> Result<Self> {
                let ranks = world.ranks();
                let spec = move || options.spec(ranks);
                let opened = crate::session::opening::open_one(world, config, spec)?;
                Ok(Self::made(opened, options))
            }

            /// As [`Communicator::refuse_open`](crate::communicator::Communicator::refuse_open).
            pub fn refuse_open(world: &World, why: Error) -> Error {
                crate::session::opening::refuse_open(world, why)
            }

            /// This rank.
            pub fn rank(&self) -> u32 {
                self.standing.rank()
            }

            /// The device whose memory its tensors lie in; none for host memory.
            pub fn device(&self) -> Option<i32> {
                self.user.device
            }

            /// The options that all ranks agreed on.
            pub fn options(&self) -> $options {
                self.options
            }

            /// The chosen components and the reasons, for display and for JSON.
            pub fn report(&self) -> &BringUpReport {
                &self.report
            }

            /// As [`Communicator::reporter`](crate::communicator::Communicator::reporter).
            pub fn reporter(&self) -> crate::communicator::Reporter {
                crate::communicator::Reporter::new(&self.standing.recorder.0)
            }

            /// Whether an error has closed it.
            pub fn is_closed(&self) -> bool {
                self.standing.is_closed()
            }
        }
    };
}
use user_of_a_session;

pub mod entry;
pub mod gather;
pub mod message;
pub mod pipe;
pub mod record;
pub mod table;

use std::sync::Arc;

use crate::bootstrap::World;
use crate::communicator::tensor::byte_length;
use crate::communicator::{Communicator, CommunicatorOptions, TensorRef};
use crate::config::Config;
use crate::kernels::KernelShape;
use crate::session::opening::open;
use crate::{Error, ErrorKind, Result, abi};
use gather::{Gather, GatherOptions};
use pipe::{Pipe, PipeOptions};
use table::{Table, TableOptions};

/// The users of one session: they share one set of transports and connections. Each has its own kernel set, windows,
/// queues and signals, so communicators may have another M, hidden size, top-k or number of experts each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionOptions {
    /// Communicators for MoE.
    pub communicators: Vec<CommunicatorOptions>,
    /// Pipes.
    pub pipes: Vec<PipeOptions>,
    /// Gathers.
    pub gathers: Vec<GatherOptions>,
    /// Tables.
    pub tables: Vec<TableOptions>,
}

/// The users that [`SessionOptions::open`] has opened, in the order of the options.
#[derive(Debug)]
pub struct SessionUsers {
    /// Communicators for MoE.
    pub communicators: Vec<Communicator>,
    /// Pipes.
    pub pipes: Vec<Pipe>,
    /// Gathers.
    pub gathers: Vec<Gather>,
    /// Tables.
    pub tables: Vec<Table>,
}

impl SessionOptions {
    /// Opens a session for these users on all ranks of `world`. Collective, as [`Communicator::open`], which opens a
    /// session of one user.
    ///
    /// Afterwards each is a user of its own: another thread may use it, ranks may use them in any order, and a refused
    /// call of one does not concern the others. Close or drop them in any order. The last one closes the transports.
    /// [`Communicator::renew`] opens a session for that communicator alone.
    ///
    /// Fabrics fix windows, queues and signals before ranks connect, so no user joins an open session.
    ///
    /// # Errors
    /// As [`Communicator::open`]. [`ErrorKind::InvalidInput`] without a user. [`ErrorKind::Unsupported`] where all
    /// together need more windows, queues or signals than a transport has. So for several users with kernels of a
    /// device, over a transport whose device API serves one of them, or through a ring; `nvlink` and `xgmi` serve
    /// several.
    pub fn open(&self, world: &Arc<World>, config: &Config) -> Result<SessionUsers> {
        let (ranks, options) = (world.ranks(), self.clone());
        let read = move || {
            let communicators = options.communicators.iter().map(|options| options.spec(ranks));
            let pipes = options.pipes.iter().map(|options| options.spec(ranks));
            let gathers = options.gathers.iter().map(|options| options.spec(ranks));
            let tables = options.tables.iter().map(|options| options.spec(ranks));
            communicators.chain(pipes).chain(gathers).chain(tables).collect()
        };
        let mut opened = open(world, config, read)?.into_iter();
        // The iterators end with the shorter one, so the options come first: no user of the next kind is taken.
        let communicators = self.communicators.iter().zip(opened.by_ref());
        let communicators = communicators
            .map(|(options, user)| Communicator::made(user, config, options))
            .collect::<Result<_>>()?;
        let pipes = self.pipes.iter().zip(opened.by_ref());
        let pipes = pipes.map(|(options, user)| Pipe::made(user, *options)).collect();
        let gathers = self.gathers.iter().zip(opened.by_ref());
        let gathers = gathers.map(|(options, user)| Gather::made(user, *options)).collect();
        let tables = self.tables.iter().zip(opened);
        let tables = tables.map(|(options, user)| Table::made(user, *options)).collect();
        Ok(SessionUsers { communicators, pipes, gathers, tables })
    }
}

/// Most bytes that a user may name.
const MOST_BYTES: u64 = 1 << 40;

fn check_range(operation: &'static str, name: &str, value: u64, most: u64) -> Result<()> {
    if value != 0 && value <= most {
        return Ok(());
    }
    let text = format!("found {name} = {value}; expected 1 to {most}");
    Err(Error::new(ErrorKind::InvalidInput, operation, text)
        .with_fix("name a number of this range, the same on all ranks"))
}

/// Numbers that ranks compare.
fn agreement<const N: usize>(numbers: [(&str, u64); N]) -> Vec<(String, String)> {
    numbers.map(|(name, value)| (name.to_owned(), value.to_string())).to_vec()
}

/// A shape without experts, for rank 0 of one domain.
fn no_shape(ranks: u32) -> KernelShape {
    KernelShape {
        size: size_of::<KernelShape>(),
        rank: 0,
        ranks,
        domains: 1,
        experts: 0,
        topk: 0,
        hidden: 0,
        max_tokens: 0,
        in_flight: 0,
        handles: 0,
        runs: 0,
        message_bytes: 0,
        entries: 0,
        layers: 0,
        reserved: 0,
    }
}

/// The text of a refusal. No text would be no refusal.
fn reason(why: &Error) -> String {
    match why.detail() {
        text if text.is_empty() => why.to_string(),
        text => text,
    }
}

/// The length of a tensor without gaps.
fn contiguous_bytes(name: &str, tensor: TensorRef<'_>) -> Result<u64> {
    let raw = tensor.raw();
    if raw.shape.contains(&0) {
        return Ok(0);
    }
    byte_length(&raw).map(|bytes| bytes as u64).ok_or_else(|| {
        let text = format!("{name}: found gaps between rows; expected none");
        Error::new(ErrorKind::InvalidInput, "check arguments", text)
            .with_fix("pass a contiguous copy")
    })
}

/// The bytes of a tensor without gaps.
fn part(tensor: TensorRef<'_>) -> abi::TyPart {
    let bytes = contiguous_bytes("tensor", tensor).unwrap_or_default();
    let data = if bytes == 0 { std::ptr::null_mut() } else { tensor.raw().data.cast() };
    abi::TyPart { data, bytes }
}
