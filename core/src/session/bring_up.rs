//! The bring-up of a session, without what its users do with it: places and levels first, then the transports with
//! the windows of all users, in the order that fabrics require.

use std::time::Duration;

use super::levels::{Levels, OpenWith};
use super::needs::SessionNeeds;
use super::places::{discover_all, domains, name_hosts, scattered};
use super::reporter::Meeting;
use super::stuck::{Kept, Stuck};
use super::transports::{Transports, WindowMemory};
use crate::bootstrap::{Members, World};
use crate::config::{Config, OnFailure};
use crate::host::Registry;
use crate::nics::{Nics, rails, share_nics};
use crate::topology::Place;
use crate::transport::Window;
use crate::{Error, ErrorKind, Result};

/// The places of all ranks, and the levels that they form: known before a transport is open.
pub(crate) struct Survey<'a> {
    /// Scale-up domains in the world.
    pub(crate) domains: u32,
    /// Place of every rank; none for an absent rank.
    pub(crate) places: Vec<Option<Place>>,
    pub(crate) levels: Levels<'a>,
    /// Warnings for the operator.
    pub(crate) warnings: Vec<String>,
}

impl<'a> Survey<'a> {
    /// Gathers the places of all ranks and chooses the levels. Collective.
    ///
    /// # Errors
    /// Places that form no levels; a transport that no rank, or not every rank, can use.
    pub(crate) fn gather(
        members: &Members<'_>,
        config: &'a Config,
        registry: &Registry,
        meeting: &Meeting,
    ) -> Result<Self> {
        let mut places = discover_all(members, config, registry)?;
        name_hosts(&mut places, &meeting.ranks);
        share_nics(&mut places);
        let domains = match (&config.scale_up, config.domains) {
            // No row is routed by domains.
            (None, None) => scattered(&places),
            (_, wanted) => domains(&places, wanted).map_err(|error| config.at_domains(error))?,
        };
        let mut warnings = unknown_tables(config, registry);
        let mut levels = Levels::choose(members, config, registry, domains)?;
        let transports_use = levels.go_by_nics();
        warnings.extend(rails::even_out(&mut places, domains, transports_use)?);
        if let Some(Some(mine)) = places.get(members.rank() as usize) {
            let any_rails = rails::any_rails(&places);
            levels.use_nics(&Nics { names: mine.nics.clone(), any_rails });
        }
        if config.world.on_failure == OnFailure::Mask && levels.domains > 1 {
            levels.put_only();
        }
        Ok(Self { domains, places, levels, warnings })
    }

    /// Opens the transports for the needs of all users, and connects the ranks. Collective. The users outlive what
    /// this returns: the windows are their memory.
    ///
    /// # Errors
    /// Ranks that need different windows; errors of the components.
    pub(crate) fn connect(
        &self,
        members: &Members<'_>,
        users: &mut [&mut dyn WindowMemory],
        with: &ConnectWith<'_>,
    ) -> Result<(Kept<Transports>, Vec<Window>)> {
        let ConnectWith { needs, deadline, stuck } = *with;
        self.levels.agree(members, needs)?;
        let mut transports =
            stuck.keep(self.levels.open(&OpenWith { members, needs, deadline })?);
        let windows = transports.allocate_windows(users, needs)?;
        // To register may be collective on a fabric, where a rank without memory would leave the others waiting.
        members.barrier("window memory")?;
        transports.register_windows(&windows, needs)?;
        self.levels.connect(members, &mut transports, stuck)?;
        Ok((transports, windows))
    }
}

/// Arguments of [`Survey::connect`].
#[derive(Clone, Copy)]
pub(crate) struct ConnectWith<'a> {
    pub(crate) needs: &'a SessionNeeds,
    /// Most time of a connect.
    pub(crate) deadline: Duration,
    pub(crate) stuck: &'a Stuck,
}

/// Checks that the world was joined with the mode of this config.
pub(crate) fn check_mode(world: &World, config: &Config) -> Result<()> {
    let (found, expected) = (config.world.on_failure, world.on_failure());
    if found == expected {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidInput,
        "open communicator",
        format!(
            "found world.on_failure = {:?} in {}; expected {:?}, as the world was joined with",
            found.name(),
            config.name,
            expected.name()
        ),
    )
    .with_fix("join the world with the options of the same config (World::from_config)"))
}

/// Warns of tables of unknown components. A table of a component that is not chosen may be intended for later
/// use; a table whose component does not exist may also be a misspelt name.
fn unknown_tables(config: &Config, registry: &Registry) -> Vec<String> {
    let components = registry.components();
    let unknown =
        config.unused_tables.iter().filter(|t| !components.iter().any(|p| p.name == t.component));
    unknown
        .map(|table| {
            let text = format!(
                "{}:{}: no component is called `{}` here; the table [{}.{}] is not used",
                config.name, table.line, table.component, table.section, table.component
            );
            tracing::warn!("{text}");
            text
        })
        .collect()
}
