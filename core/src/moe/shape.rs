use crate::{Error, ErrorKind, Result};

/// The largest top-k.
pub const MAX_TOPK: u32 = 32;

/// The largest hidden size: a row of fp32 is one put of at most 1 GiB.
pub const MAX_HIDDEN: u32 = 1 << 28;

/// The shape that every rank must agree on before tokens move. All fields are in range once built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// R: ranks in the world, at least 1.
    pub ranks: u32,
    /// E: experts in the world, a multiple of R.
    pub experts: u32,
    /// K: experts selected by one token, 1 to 32 and at most E.
    pub topk: u32,
    /// H: elements of one token row, at most 2^28. `H * element size` must be a multiple of 16 bytes.
    pub hidden: u32,
    /// M: the most tokens of one rank in a dispatch, at least 1.
    pub max_tokens: u32,
}

impl Shape {
    /// Checks every relation between the fields.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] names the value, the limit and the fix.
    pub fn new(self) -> Result<Self> {
        let refuse = |message: String, fix: &str| {
            Err(Error::new(ErrorKind::InvalidInput, "check shape", message).with_fix(fix))
        };
        let Self { ranks, experts, topk, hidden, max_tokens } = self;
        if ranks == 0 || experts == 0 || topk == 0 || hidden == 0 || max_tokens == 0 {
            return refuse(
                format!(
                    "found ranks = {ranks}, experts = {experts}, topk = {topk}, hidden = {hidden}, \
                     max_tokens = {max_tokens}; expected each at least 1"
                ),
                "give every size a positive value",
            );
        }
        if experts % ranks != 0 {
            return refuse(
                format!("found {experts} experts on {ranks} ranks; expected a multiple of {ranks}"),
                "take a number of ranks that divides the experts, or experts that are a multiple of the ranks",
            );
        }
        if topk > MAX_TOPK.min(experts) {
            return refuse(
                format!(
                    "found topk = {topk}; expected at most {} ({experts} experts, limit {MAX_TOPK})",
                    MAX_TOPK.min(experts)
                ),
                "select fewer experts per token",
            );
        }
        if hidden > MAX_HIDDEN {
            return refuse(
                format!("found hidden = {hidden}; expected at most {MAX_HIDDEN}"),
                "choose a smaller hidden size",
            );
        }
        if hidden % 4 != 0 {
            return refuse(
                format!("found hidden = {hidden}; expected rows of a multiple of 16 bytes"),
                "pad the hidden size (a multiple of 16 elements suits every type)",
            );
        }
        if u64::from(max_tokens) * u64::from(ranks) > i32::MAX as u64 {
            return refuse(
                format!(
                    "found max_tokens * ranks = {}; expected at most {}",
                    u64::from(max_tokens) * u64::from(ranks),
                    i32::MAX
                ),
                "lower max_tokens",
            );
        }
        Ok(self)
    }

    /// E/R: experts on each rank.
    pub fn local_experts(&self) -> u32 {
        self.experts / self.ranks
    }

    /// The rank that hosts `expert`.
    pub fn rank_of(&self, expert: u32) -> u32 {
        expert / self.local_experts()
    }

    /// Numbers of the row with which a combine brings the weights of a token: K weights, a word whose bits select the
    /// experts that enter the sum, and zeros up to a multiple of 16 bytes.
    pub(crate) fn weights_row(&self) -> u32 {
        (self.topk + 1).next_multiple_of(4)
    }

    /// Numbers of 4 bytes in the widest row that any call may have.
    pub fn widest_row(&self) -> u32 {
        self.hidden.max(self.weights_row())
    }

    /// The most ranks one token can go to: min(K, R).
    pub fn max_fanout(&self) -> u32 {
        self.topk.min(self.ranks)
    }
}
