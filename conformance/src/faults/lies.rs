use std::path::Path;

use tokenyard_core::bootstrap::{Secret, WorldOptions};
use tokenyard_core::communicator::CommunicatorOptions;
use tokenyard_core::config::Config;

use super::Phase;
use crate::moe::oracle::{Case, Input, Layout, RowType};
use crate::ops::faults::{LENGTH, OTHER_LENGTH};

/// The value or call of the victim that differs from the others'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Another secret.
    Secret,
    /// Another deadline.
    Deadline,
    /// A relative plugin path in its config.
    PluginPath,
    /// A kernel set that does not exist.
    UnknownComponent,
    /// Another M.
    MaxTokens,
    /// Another H.
    Hidden,
    /// Another K.
    Topk,
    /// Another E.
    Experts,
    /// K > E.
    TopkAboveExperts,
    /// Experts that the ranks cannot share evenly.
    UnevenExperts,
    /// Rows of another type.
    RowType,
    /// Another layout.
    Layout,
    /// A replay where the others dispatch.
    Operation,
    /// A message of another length than its receivers expect.
    Length,
    /// A shard of another length than those of the others.
    Shards,
    /// Another scale of a sum than that of the others.
    Sums,
    /// More entries than a table has room for.
    Entries,
}

pub(super) const LIES: [(&str, Lie); 13] = [
    ("secret", Lie::Secret),
    ("deadline", Lie::Deadline),
    ("relative_plugin_path", Lie::PluginPath),
    ("unknown_component", Lie::UnknownComponent),
    ("max_tokens", Lie::MaxTokens),
    ("hidden", Lie::Hidden),
    ("topk", Lie::Topk),
    ("experts", Lie::Experts),
    ("topk_above_experts", Lie::TopkAboveExperts),
    ("uneven_experts", Lie::UnevenExperts),
    ("row_type", Lie::RowType),
    ("layout", Lie::Layout),
    ("operation", Lie::Operation),
];

impl Lie {
    /// The phase in which the difference shows.
    pub(super) fn phase(self) -> Phase {
        match self {
            Self::Secret | Self::Deadline | Self::PluginPath => Phase::Bootstrap,
            Self::Length => Phase::Message,
            Self::Shards => Phase::GatherSend,
            Self::Sums => Phase::ReduceSend,
            Self::Entries => Phase::Write,
            Self::RowType | Self::Layout | Self::Operation => Phase::DispatchSend,
            _ => Phase::Connect,
        }
    }

    /// Whether the victim is refused before it joins, so that the others know only that it is absent.
    pub(super) fn never_joins(self) -> bool {
        matches!(self, Self::Secret | Self::PluginPath)
    }

    /// Words that the victim's error contains, and the errors of the others where it joined, in a world of
    /// `ranks` ranks.
    pub(super) fn says(self, ranks: u32) -> Vec<String> {
        // As in the script: four experts on each rank.
        let experts = 4 * ranks;
        let words: &[&str] = match self {
            Self::Secret => &["secret"],
            Self::Deadline => &["deadline"],
            Self::PluginPath => &["is relative", "absolute path"],
            Self::UnknownComponent => &["no_such_kernels", "available"],
            Self::MaxTokens => &["max_tokens", "12", "11"],
            Self::Hidden => &["hidden", "64", "128"],
            Self::Topk => &["topk", "3", "2"],
            Self::Experts => &["experts", &experts.to_string(), &(experts + ranks).to_string()],
            Self::TopkAboveExperts => {
                &[&format!("topk = {}", experts + 1), &format!("at most {experts}")]
            }
            Self::UnevenExperts => &[
                &format!("{} experts on {ranks} ranks", experts + 1),
                &format!("multiple of {ranks}"),
            ],
            Self::RowType => &["rank 1 called", "bf16", "fp32"],
            Self::Layout => &["rank 1 called", "flat", "packed"],
            Self::Operation => &["rank 1 called", "replay", "dispatch"],
            Self::Length => &[
                "between this rank and rank ",
                &format!("{OTHER_LENGTH} bytes were sent"),
                &format!("{LENGTH} were expected"),
            ],
            Self::Shards => &["rank 1", &format!("{OTHER_LENGTH}"), &format!("{LENGTH} bytes")],
            Self::Sums => &["rank 1", "the same types, precision and scale"],
            Self::Entries => &["values: found", &format!("at most 4 entries of {LENGTH} bytes")],
        };
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    pub(super) fn spoil_config(self, config: &mut Config) -> tokenyard_core::Result<()> {
        match self {
            Self::Deadline => config.world.deadline += config.world.deadline,
            Self::UnknownComponent => config.kernels.name = "no_such_kernels".to_owned(),
            Self::PluginPath => {
                let name = Path::new(&config.name).display().to_string();
                let text = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n\
                            [plugins]\npaths = [\"plugins/libtokenyard_x.so\"]\n";
                Config::parse(text, &name)?;
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn spoil_world(self, options: &mut WorldOptions) -> tokenyard_core::Result<()> {
        if self == Self::Secret {
            options.secret = Secret::generate()?;
        }
        Ok(())
    }

    pub(super) fn spoil_options(self, options: &mut CommunicatorOptions) {
        match self {
            Self::MaxTokens => options.max_tokens -= 1,
            Self::Hidden => options.hidden *= 2,
            Self::Topk => options.topk -= 1,
            // One more on each rank.
            Self::Experts => options.experts += options.experts / 4,
            Self::TopkAboveExperts => options.topk = options.experts + 1,
            Self::UnevenExperts => options.experts += 1,
            _ => {}
        }
    }

    pub(super) fn spoil_case(self, case: &mut Case) {
        match self {
            Self::RowType => case.input = Input::Plain(RowType::F32),
            Self::Layout => case.layout = Layout::Packed,
            _ => {}
        }
    }
}
