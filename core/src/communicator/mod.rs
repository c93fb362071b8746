//! The communicator: one kernel set, the transports of its levels and a topology, opened together by all
//! ranks.
//!
//! The communicator has four duties. It validates all input of a caller, so that components may trust it. It
//! runs the operations of all ranks in step. It ends waits (INV-6) and reports the reason. It owns the
//! components and frees them in the right order. One thread uses a communicator at a time. Several
//! communicators may live in one process, and several threads may use one each. They may share transports:
//! [`SessionOptions`](crate::ops::SessionOptions) opens several on one session.
//!
//! Operations are collective: all ranks call the same operations, and their halves, in the same order. If one
//! rank sends 0, sends 1 and receives 0, all do. Ranks that call the halves in another order may wait for
//! each other until the deadline. Where one rank's input is refused, all ranks get an error for that
//! operation, nothing is moved, and the communicator stays usable. After an error of another kind the
//! communicator is closed, and every later call reports the reason.
//!
//! **Order on a device.** A plain call ignores the caller's streams. All work that the caller has queued on a
//! tensor must have ended before the call that takes the tensor. All work on an output or a [`CombineInput`]
//! must have ended before it is dropped, because the next operation may reuse its place, and other ranks
//! write there. So synchronise the stream first. After the operation no synchronisation is needed: when a
//! call that receives returns, the operation has ended on the device. A call through [`Communicator::on`] is
//! in the order of a [`Stream`] instead, and needs none of this.
//!
//! A call, a check or an output of an operation is changed here; places and transports are the session's. Watched by
//! the tests in these files, L1 and L2 of the suite, and `conformance/tests/{pending,call_forms,reporting}.rs`.

mod abandoned;
mod arguments;
mod bring_up;
mod buffer;
mod call_forms;
mod caller_memory;
mod claims;
pub(crate) mod components;
pub(crate) mod course;
mod graph;
mod masks;
pub(crate) mod memory;
mod operations;
mod order;
pub(crate) mod output;
mod pending;
mod refusal;
mod sort;
mod state;
mod stream;
pub(crate) mod tensor;
mod tool_stream;

pub use crate::moe::Cast;
pub use crate::moe::count_routing::RoutingRoom;
pub use crate::moe::dispatch::arriving::Arriving;
pub use crate::moe::dispatch::copy_out::Outputs;
pub use crate::session::{
    BringUpReport, Choices, LevelReport, REPORTS_VARIABLE, Reporter, write_reports,
};
pub use arguments::{Combine, Dispatch, LateTopk, Replay, Sizes};
pub use bring_up::CommunicatorOptions;
pub use buffer::Buffer;
pub use caller_memory::CallerMemory;
pub use components::CallForm;
pub use graph::ToolGraph;
pub use masks::Masks;
pub use output::{CombineInput, Handle, Received};
pub use pending::{PendingCombine, PendingDispatch, PendingReplay};
pub use refusal::RefusedCall;
pub use state::Communicator;
pub use stream::{OnStream, Statistics, Stream};
pub use tensor::{Element, TensorMut, TensorRef};
pub use tool_stream::ToolStream;
