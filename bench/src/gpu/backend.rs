//! The backends whose GPUs are measured.

use anyhow::{Result, bail};
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_cuda::Cuda;
use tokenyard_gpu::Platform;
use tokenyard_gpu::probe::About;
use tokenyard_rocm::Rocm;

use super::Components;
use super::ceiling::{self, CeilingFigures};
use crate::ranks::Speaker;

/// A maker of GPUs, whose kernel set and link a config names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    Cuda,
    Rocm,
}

impl Backend {
    /// The backend of a config's kernel set, if that runs on GPUs.
    pub(crate) fn of(config: &Config) -> Option<Self> {
        [Self::Cuda, Self::Rocm]
            .into_iter()
            .find(|backend| backend.platform().names.kernels == config.kernels.name)
    }

    /// The backend of a config's kernel set.
    ///
    /// # Errors
    /// The kernels run on CPUs, or the set is a stranger's.
    pub(crate) fn named(config: &Config) -> Result<Self> {
        let Some(backend) = Self::of(config) else {
            bail!(
                "found kernels.use = {:?}; expected \"cuda\" or \"rocm\". For CPUs: `tokenyard bench \
                 CONFIG --scenario exchange`",
                config.kernels.name
            );
        };
        Ok(backend)
    }

    /// Its driver, compiler and names.
    pub(crate) fn platform(self) -> &'static Platform {
        match self {
            Self::Cuda => &tokenyard_cuda::PLATFORM,
            Self::Rocm => &tokenyard_rocm::PLATFORM,
        }
    }

    /// The GPUs that the environment selects for this process.
    pub(crate) fn visible(self) -> Option<String> {
        let name = match self {
            Self::Cuda => "CUDA_VISIBLE_DEVICES",
            Self::Rocm => "HIP_VISIBLE_DEVICES",
        };
        std::env::var(name).ok().filter(|list| !list.is_empty())
    }

    /// The figures of the link on one rank.
    pub(crate) fn ceiling(
        self,
        world: &World,
        components: &Components,
        sms: &[u32],
        say: &Speaker,
    ) -> Result<(About, CeilingFigures)> {
        match self {
            Self::Cuda => ceiling::measure::<Cuda>(world, components, sms, say),
            Self::Rocm => ceiling::measure::<Rocm>(world, components, sms, say),
        }
    }
}
