//! What a joiner and rank 0 say to each other before the joiner is in.

use super::super::fields::{Fields, malformed, put_text};
use super::super::seal::{JOB_BYTES, NONCE_BYTES};
use super::MAX_REASON;
use crate::Result;
use crate::config::OnFailure;

/// First frame of a joiner.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) struct Hello {
    pub(in super::super) job: [u8; JOB_BYTES],
    pub(in super::super) nonce: [u8; NONCE_BYTES],
    pub(in super::super) rank: u32,
    pub(in super::super) ranks: u32,
}

impl Hello {
    pub(in super::super) fn encode(&self) -> Vec<u8> {
        let Self { job, nonce, rank, ranks } = self;
        [&job[..], nonce, &rank.to_le_bytes(), &ranks.to_le_bytes()].concat()
    }

    pub(in super::super) fn decode(payload: &[u8]) -> Result<Self> {
        let mut fields = Fields(payload);
        let hello = Self {
            job: fields.array()?,
            nonce: fields.array()?,
            rank: fields.u32()?,
            ranks: fields.u32()?,
        };
        fields.end().map(|()| hello)
    }
}

/// What a joiner says of itself once the connection has a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Proof {
    pub(in super::super) deadline_ms: u64,
    pub(in super::super) late_ms: u64,
    pub(in super::super) on_failure: OnFailure,
    pub(in super::super) pid: u32,
    pub(in super::super) host: String,
}

impl Proof {
    pub(in super::super) fn encode(&self) -> Vec<u8> {
        let mut out = self.deadline_ms.to_le_bytes().to_vec();
        out.extend(self.late_ms.to_le_bytes());
        out.push(u8::from(self.on_failure == OnFailure::Mask));
        out.extend(self.pid.to_le_bytes());
        put_text(&mut out, &self.host, 255);
        out
    }

    pub(in super::super) fn decode(payload: &[u8]) -> Result<Self> {
        let mut fields = Fields(payload);
        let proof = Self {
            deadline_ms: fields.u64()?,
            late_ms: fields.u64()?,
            on_failure: match fields.array::<1>()?[0] {
                0 => OnFailure::Stop,
                1 => OnFailure::Mask,
                code => return Err(malformed(format!("found on_failure {code}, expected 0 or 1"))),
            },
            pid: fields.u32()?,
            host: fields.text(255)?,
        };
        fields.end().map(|()| proof)
    }
}

/// Why a joiner is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in super::super) enum Refusal {
    /// The joiner looks for another job. Its address may be out of date.
    Job = 1,
    /// The secrets differ.
    Secret = 2,
    /// Rank, size or timing cannot be.
    Claim = 3,
    /// Not all ranks came in time.
    Late = 4,
    /// A rank expects another world than rank 0. Told to all.
    Differ = 5,
    /// The rank is alive, as far as rank 0 knows, or another process waits to come back as it.
    Busy = 6,
}

impl Refusal {
    pub(in super::super) fn encode(self, why: &str) -> Vec<u8> {
        let mut out = vec![self as u8];
        put_text(&mut out, why, MAX_REASON);
        out
    }

    pub(in super::super) fn decode(payload: &[u8]) -> Result<(Self, String)> {
        let mut fields = Fields(payload);
        let code = fields.array::<1>()?[0];
        let refusal = [Self::Job, Self::Secret, Self::Claim, Self::Late, Self::Differ, Self::Busy]
            .into_iter()
            .find(|refusal| *refusal as u8 == code)
            .ok_or_else(|| malformed(format!("found refusal {code}, expected 1 to 6")))?;
        let why = fields.text(MAX_REASON)?;
        fields.end().map(|()| (refusal, why))
    }
}
