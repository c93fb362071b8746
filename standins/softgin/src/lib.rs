//! A stand-in for a NIC under NCCL's GPU-Initiated Networking (GIN), for tests: a plugin of NCCL's own RMA interface,
//! which unmodified NCCL loads and drives by its proxy.
//!
//! It moves bytes between the processes of one host. It copies bytes of GPUs on streams, into memory of peers
//! that is mapped here. The kernel copies bytes of the host. It delays, reorders, fails and stops on a seed
//! (`TOKENYARD_SOFTGIN`). Its times say nothing about GIN.
//!
//! How to use it: `docs.md` in this folder.

pub mod abi;
mod config;
mod cuda;
mod failure;
mod inbox;
mod mesh;
mod operations;
mod region;
mod table;
mod team;

pub use table::ncclRmaPlugin_v14;
