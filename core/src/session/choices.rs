//! The choices of a config on a world, before anything is open.

use std::sync::Arc;

use super::attended;
use super::bring_up::{Survey, agreement, check_mode, together};
use super::levels::LevelReport;
use super::meeting::meet;
use crate::Result;
use crate::abi;
use crate::bootstrap::World;
use crate::config::Config;
use crate::host::Registry;
use crate::topology::Place;

/// The chosen components, and the place of every rank.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Choices {
    /// The kernel set.
    pub kernels: String,
    /// Whether tensors lie in the memory of a device.
    pub works_on_device: bool,
    /// The level inside a domain; none where nothing uses it.
    pub scale_up: Option<LevelReport>,
    /// The level between domains; none where nothing uses it.
    pub scale_out: Option<LevelReport>,
    /// Warnings for the operator: tables of components that no plugin provides.
    pub warnings: Vec<String>,
    /// Scale-up domains in the world.
    pub domains: u32,
    /// Place of every rank; none for an absent rank.
    pub places: Vec<Option<Place>>,
}

impl Choices {
    /// Finds out what a communicator of this config would use, on all ranks of `world`: looks for the places of ranks,
    /// and probes components. It opens none of them, and takes no memory. Collective, as
    /// [`Communicator::open`](crate::communicator::Communicator::open), whose bring-up begins with the same.
    ///
    /// # Errors
    /// Disagreement of the config, components that cannot work here, places that form no levels: on every rank, with
    /// the fix. An error of one rank alone is [`ErrorKind::Refused`](crate::ErrorKind::Refused) on the others, and
    /// the world goes on. [`ErrorKind::Transport`](crate::ErrorKind::Transport) names a component that does not return
    /// from a call within `late_ms`; this rank then leaves the world.
    pub fn of(world: &Arc<World>, config: &Config) -> Result<Self> {
        let (own, copy) = (Arc::clone(world), config.clone());
        attended::run(world, config, move || {
            together(&own, &copy, |members| {
                check_mode(&own, &copy)?;
                let registry = Registry::for_config(&copy)?;
                let component = registry.choose_kernels(&copy.kernels)?;
                let mut items = agreement();
                items.extend(copy.agreement());
                members.agree("survey", &items)?;
                let survey = Survey::gather(members, &copy, &registry, &meet(members)?)?;
                let kinds = component.probe(&copy.kernels.table)?;
                members.barrier("survey ready")?;
                Ok(survey.choices(component.name(), kinds))
            })
        })
    }
}

impl Survey<'_> {
    /// With the kernel set, which works on these kinds of memory.
    pub(crate) fn choices(&self, kernels: &str, kinds: u32) -> Choices {
        let (scale_up, scale_out) = self.levels.reports();
        Choices {
            kernels: kernels.to_owned(),
            works_on_device: kinds & abi::TY_MEMORY_HOST == 0,
            scale_up,
            scale_out,
            warnings: self.warnings.clone(),
            domains: self.domains,
            places: self.places.clone(),
        }
    }
}
