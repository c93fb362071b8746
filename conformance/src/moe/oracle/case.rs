//! The description of one exchange.

use std::fmt;

use super::number::{Elem, RowType};
use super::rng::{Rng, Stream};

/// Channels that share one scale.
pub const GROUP: usize = 128;

/// One exchange: dispatch, experts, combine. Equal cases have equal inputs and equal outputs.
///
/// The fields are free to set; [`Case::validate`] checks that they are valid together. Every other function
/// of the oracle expects a valid case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// R: ranks, at least 1.
    pub ranks: usize,
    /// D: domains, a divisor of R. Rank r is in domain r / (R/D). Where there are several, combine
    /// rounds once per domain too.
    pub domains: usize,
    /// E: experts, a multiple of R.
    pub experts: usize,
    /// K: selections of a token, 1 to E.
    pub topk: usize,
    /// H: elements of a row, at least 1.
    pub hidden: usize,
    /// M: the most tokens of a rank, at least 1.
    pub max_tokens: usize,
    /// The number of tokens on each rank.
    pub tokens: Tokens,
    /// The type of the rows, and their cast.
    pub input: Input,
    /// How received rows are laid out.
    pub layout: Layout,
    /// The scales of each expert's rows lie column by column. Packed only.
    pub scale_columns: bool,
    /// `source` of received rows has tokens alone, without their rank. Packed only.
    pub source_tokens: bool,
    /// Outputs have worst-case sizes: rows after the expected ones exist and are unspecified.
    pub worst_case: bool,
    /// P of each rank, which drops its rows of x from P on: experts keep the places that they have without a cap. 0:
    /// the rank has no cap. Empty: none has one. Flat and expert-major.
    pub max_rows: Vec<usize>,
    /// Tokens have `topk_weights`, which travel with dispatch, and back with combine.
    pub weights: bool,
    /// How expert outputs are summed.
    pub combine: Combine,
    /// The experts that the tokens select.
    pub routing: Routing,
    /// The values of generated rows.
    pub values: Values,
    /// Decides every generated value.
    pub seed: u64,
}

/// The values of generated rows, and of opaque scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Values {
    /// Finite ones of several magnitudes.
    #[default]
    Usual,
    /// Some are NaN, infinite, subnormal, the largest or -0.
    SomeOdd,
    /// All bytes are 0xFF, as in memory that was never written: nothing but NaN.
    Filler,
}

/// The number of tokens on each rank, at most M.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// M on every rank.
    Full,
    /// A random number from 1 to M on each rank.
    Ragged,
    /// M on ranks with an even number, none on the others.
    OddRanksEmpty,
    /// These numbers, one per rank.
    Exactly(Vec<usize>),
}

/// The type of the dispatched rows, and their cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Rows travel as they are.
    Plain(RowType),
    /// Rows are cast to FP8 e4m3, with one scale per 128 channels.
    Cast(RowType, Scales),
    /// FP8 bytes with this many (at least 1) opaque 4-byte scales per row; both travel unchanged.
    Opaque(usize),
}

/// The scales that a cast makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// f32, any value.
    F32,
    /// f32, rounded up to powers of two.
    RoundedF32,
    /// Rounded up to powers of two; their exponent bytes, four in a word.
    Ue8m0,
}

/// How received rows are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One row per token and rank, by source rank, then token.
    Flat,
    /// One row per token and local expert, grouped by expert.
    ExpertMajor {
        /// Groups start at multiples of this many rows; at least 1.
        alignment: usize,
        /// Whether rows between groups must be zero.
        zero_padding: bool,
    },
    /// `[El, R*M, H]` with counts.
    Packed,
    /// `[R, M, H]`: one row per token and rank, those of a source first in its block.
    RankMajor {
        /// Whether the rest of a block must be zero.
        zero_padding: bool,
    },
}

impl Layout {
    /// Whether a token has one row on a rank, for all of its experts there.
    pub fn has_a_row_per_token(self) -> bool {
        matches!(self, Self::Flat | Self::RankMajor { .. })
    }

    /// Whether the source alone fixes a row's place, so that rows move before any are counted.
    pub fn has_fixed_places(self) -> bool {
        matches!(self, Self::Packed | Self::RankMajor { .. })
    }
}

/// How expert outputs are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combine {
    /// The type of expert outputs, biases and combined rows.
    pub row: RowType,
    /// Biases that start the sum: 0, 1 or 2.
    pub biases: usize,
    /// Expert outputs are multiplied by the token's weights. Not where a token has a row for several experts,
    /// which the caller has merged already.
    pub weighted: bool,
    /// Where sums are rounded, and where weights come from.
    pub sums: Sums,
}

/// How a combine sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sums {
    /// The sum over each rank's experts first, rounded. Weights are those of the dispatch.
    #[default]
    ByRank,
    /// Rounded once, at the token. Not on rows that the caller has merged.
    Once,
    /// As `ByRank`; the combine has its own [weights](super::RankInputs::late_weight), and leaves some
    /// experts out.
    LateWeights,
    /// As `Once`; the combine has its own weights.
    LateWeightsOnce,
    /// As `ByRank`; each rank's sum has the values of a [round trip](super::logfmt) after that. On packed rows of bf16,
    /// in one domain.
    Coded,
    /// As `Coded`; the combine has its own weights.
    LateWeightsCoded,
    /// As `ByRank`; a returned weight is a sum over all ranks that received the token. On flat rows.
    WeightsOfAllRanks,
}

impl Sums {
    /// Whether the sum over a rank's experts is rounded.
    pub fn rounds_by_rank(self) -> bool {
        !matches!(self, Self::Once | Self::LateWeightsOnce)
    }

    /// Whether the combine has its own weights.
    pub fn is_late(self) -> bool {
        matches!(self, Self::LateWeights | Self::LateWeightsOnce | Self::LateWeightsCoded)
    }

    /// Whether the sum over a rank's experts is encoded.
    pub fn is_coded(self) -> bool {
        matches!(self, Self::Coded | Self::LateWeightsCoded)
    }
}

/// The experts that the tokens select. Selections of one token are distinct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// K experts at random.
    Uniform,
    /// Every token selects one and the same expert among its K, so that expert has E/K times the
    /// mean load, at least 4 (E must be at least 4K).
    Skewed,
    /// Every token selects one and the same expert and nothing else.
    OneExpert,
    /// Only experts of the token's own rank; where there are fewer than K, nothing else.
    OwnRank,
    /// K experts at random, about a quarter of them struck out.
    SomeNegative,
    /// As `Uniform`, but about a third of the tokens select nothing.
    SomeNothing,
    /// No token selects anything.
    Nothing,
    /// Given from outside; the number names it (for example a hash of the file).
    Given(u64),
}

/// The reason why a case, or inputs given from outside, cannot be used: what was found and expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid(pub String);

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Invalid {}

/// `Ok` if `condition` holds, else an [`Invalid`] with the message.
pub(super) fn require(condition: bool, message: impl FnOnce() -> String) -> Result<(), Invalid> {
    if condition { Ok(()) } else { Err(Invalid(message())) }
}

impl Default for Case {
    /// A small exchange: two ranks, eight experts, top-2, plain bf16, flat.
    fn default() -> Self {
        Self {
            ranks: 2,
            domains: 1,
            experts: 8,
            topk: 2,
            hidden: 256,
            max_tokens: 16,
            tokens: Tokens::Full,
            input: Input::Plain(RowType::Bf16),
            layout: Layout::Flat,
            scale_columns: false,
            source_tokens: false,
            worst_case: false,
            max_rows: Vec::new(),
            weights: true,
            combine: Combine { row: RowType::Bf16, biases: 0, weighted: false, sums: Sums::ByRank },
            routing: Routing::Uniform,
            values: Values::Usual,
            seed: 0,
        }
    }
}

impl Case {
    /// El: experts of one rank.
    pub fn local_experts(&self) -> usize {
        self.experts / self.ranks
    }

    /// The rank that hosts `expert`.
    pub fn rank_of(&self, expert: usize) -> usize {
        expert / self.local_experts()
    }

    /// The domain of `rank`.
    pub fn domain_of(&self, rank: usize) -> usize {
        rank / (self.ranks / self.domains)
    }

    /// G: scale groups of a row; the last may be partial.
    pub fn groups(&self) -> usize {
        self.hidden.div_ceil(GROUP)
    }

    /// T: the tokens of `rank`.
    pub fn tokens_of(&self, rank: usize) -> usize {
        match &self.tokens {
            Tokens::Full => self.max_tokens,
            Tokens::Ragged => 1 + Rng::new(self.seed, Stream::Tokens, rank).below(self.max_tokens),
            Tokens::OddRanksEmpty => (1 - rank % 2) * self.max_tokens,
            Tokens::Exactly(counts) => counts.get(rank).copied().unwrap_or(0),
        }
    }

    /// P of `rank`; none where its rows are not capped.
    pub fn cap_of(&self, rank: usize) -> Option<usize> {
        self.max_rows.get(rank).copied().filter(|rows| *rows > 0)
    }

    /// The element type of the rows that a rank sends.
    pub fn sent_elem(&self) -> Elem {
        match self.input {
            Input::Plain(row) | Input::Cast(row, _) => row.into(),
            Input::Opaque(_) => Elem::E4m3,
        }
    }

    /// The element type of the rows that a rank receives.
    pub fn received_elem(&self) -> Elem {
        match self.input {
            Input::Plain(row) => row.into(),
            Input::Cast(..) | Input::Opaque(_) => Elem::E4m3,
        }
    }

    /// The type and number of scales of a received row; `None` where rows have none.
    pub fn scales(&self) -> Option<(Elem, usize)> {
        match self.input {
            Input::Plain(_) => None,
            Input::Cast(_, Scales::F32 | Scales::RoundedF32) => Some((Elem::F32, self.groups())),
            Input::Cast(_, Scales::Ue8m0) => Some((Elem::Bits32, self.groups().div_ceil(4))),
            Input::Opaque(count) => Some((Elem::Bits32, count)),
        }
    }

    /// Checks that the fields are in range and valid together.
    ///
    /// # Errors
    /// Names the field, what was found and what was expected.
    pub fn validate(&self) -> Result<(), Invalid> {
        let Self { ranks, experts, topk, hidden, max_tokens, .. } = *self;
        require(ranks > 0 && experts > 0 && topk > 0 && hidden > 0 && max_tokens > 0, || {
            format!("{self}: found a size of 0; expected every size to be at least 1")
        })?;
        let domains = self.domains;
        require(domains > 0 && ranks % domains == 0, || {
            format!("found {domains} domains; expected a divisor of {ranks} ranks")
        })?;
        require(experts % ranks == 0, || {
            format!("found {experts} experts; expected a multiple of {ranks} ranks")
        })?;
        require(topk <= experts, || format!("found topk = {topk}; expected at most {experts}"))?;
        require(ranks.saturating_mul(max_tokens) <= i32::MAX as usize, || {
            format!(
                "found {ranks} ranks of {max_tokens} tokens; expected at most {} tokens",
                i32::MAX
            )
        })?;
        if let Tokens::Exactly(counts) = &self.tokens {
            let fits = counts.len() == ranks && counts.iter().all(|t| *t <= max_tokens);
            require(fits, || {
                format!("found tokens {counts:?}; expected {ranks} numbers of at most {max_tokens}")
            })?;
        }
        self.validate_kinds()
    }

    /// Whether partial rows may be encoded.
    fn is_codable(&self) -> bool {
        self.layout == Layout::Packed
            && self.combine.row == RowType::Bf16
            && self.hidden.is_multiple_of(512)
            && self.domains == 1
    }

    fn validate_kinds(&self) -> Result<(), Invalid> {
        let Self { experts, topk, combine, layout, .. } = *self;
        if let Layout::ExpertMajor { alignment, .. } = layout {
            require(alignment > 0, || "found alignment 0; expected at least 1".into())?;
        }
        require(!matches!(self.input, Input::Opaque(0)), || {
            "found 0 opaque scales; expected at least 1".into()
        })?;
        require(combine.biases <= 2, || {
            format!("found {} biases; expected at most 2", combine.biases)
        })?;
        let merged = layout.has_a_row_per_token();
        require(!combine.weighted || (self.weights && !merged), || {
            "found a weighted combine; expected weights and a layout that is not flat or rank-major"
                .into()
        })?;
        let packed = layout == Layout::Packed || !(self.scale_columns || self.source_tokens);
        require(packed, || format!("found forms of packed arrays with {layout} rows"))?;
        let (caps, ranks) = (self.max_rows.len(), self.ranks);
        require(caps == 0 || (caps == ranks && !layout.has_fixed_places()), || {
            format!(
                "found {caps} caps of {layout} rows; expected none, or {ranks} of flat or expert-major rows"
            )
        })?;
        let fits = match combine.sums {
            Sums::ByRank => true,
            Sums::Once => !merged,
            Sums::LateWeights | Sums::LateWeightsOnce => combine.weighted,
            Sums::Coded => self.is_codable(),
            Sums::LateWeightsCoded => combine.weighted && self.is_codable(),
            Sums::WeightsOfAllRanks => merged && self.weights,
        };
        require(fits, || {
            format!("found {:?} with {layout} rows, weighted: {}", combine.sums, combine.weighted)
        })?;
        require(self.routing != Routing::Skewed || experts >= 4 * topk, || {
            format!("found skewed routing to {experts} experts; expected at least {}", 4 * topk)
        })
    }
}

impl fmt::Display for Case {
    /// A short name without spaces. Different cases have different names; a name never changes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, experts, topk, hidden, max_tokens, .. } = self;
        write!(f, "{}.{}.", self.layout, self.input)?;
        write!(f, "r{ranks}")?;
        if self.domains > 1 {
            write!(f, "-d{}", self.domains)?;
        }
        write!(f, "-e{experts}-k{topk}-h{hidden}-m{max_tokens}")?;
        write!(f, ".{}.{}", self.tokens, self.routing)?;
        f.write_str(if self.weights { ".weights" } else { "" })?;
        write!(f, ".to-{}", self.combine.row)?;
        f.write_str(if self.combine.weighted { "-weighted" } else { "" })?;
        f.write_str(match self.combine.sums {
            Sums::ByRank => "",
            Sums::Once => "-once",
            Sums::LateWeights => "-late",
            Sums::LateWeightsOnce => "-late-once",
            Sums::Coded => "-logfmt10",
            Sums::LateWeightsCoded => "-late-logfmt10",
            Sums::WeightsOfAllRanks => "-weights-of-all",
        })?;
        if self.combine.biases > 0 {
            write!(f, "-bias{}", self.combine.biases)?;
        }
        f.write_str(if self.worst_case { ".worst" } else { "" })?;
        if !self.max_rows.is_empty() {
            let caps: Vec<String> = self.max_rows.iter().map(usize::to_string).collect();
            write!(f, ".p{}", caps.join("-"))?;
        }
        f.write_str(match self.values {
            Values::Usual => "",
            Values::SomeOdd => ".odd-values",
            Values::Filler => ".filler",
        })?;
        f.write_str(if self.scale_columns { ".scale-columns" } else { "" })?;
        f.write_str(if self.source_tokens { ".source-tokens" } else { "" })?;
        write!(f, ".s{}", self.seed)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flat => f.write_str("flat"),
            Self::ExpertMajor { alignment, zero_padding } => {
                write!(f, "expert{alignment}{}", if *zero_padding { "z" } else { "" })
            }
            Self::Packed => f.write_str("packed"),
            Self::RankMajor { zero_padding } => {
                write!(f, "rankmajor{}", if *zero_padding { "z" } else { "" })
            }
        }
    }
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(row) => write!(f, "{row}"),
            Self::Cast(row, Scales::F32) => write!(f, "{row}-cast"),
            Self::Cast(row, Scales::RoundedF32) => write!(f, "{row}-cast-rounded"),
            Self::Cast(row, Scales::Ue8m0) => write!(f, "{row}-cast-ue8m0"),
            Self::Opaque(scales) => write!(f, "fp8-opaque{scales}"),
        }
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Ragged => f.write_str("ragged"),
            Self::OddRanksEmpty => f.write_str("odd-ranks-empty"),
            Self::Exactly(counts) => {
                let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
                write!(f, "t{}", counts.join("-"))
            }
        }
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Skewed => f.write_str("skewed"),
            Self::OneExpert => f.write_str("one-expert"),
            Self::OwnRank => f.write_str("own-rank"),
            Self::SomeNegative => f.write_str("some-negative"),
            Self::SomeNothing => f.write_str("some-nothing"),
            Self::Nothing => f.write_str("nothing"),
            Self::Given(name) => write!(f, "given{name:016x}"),
        }
    }
}
