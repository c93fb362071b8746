//! The bring-up of a session, without what its users do with it: places and levels first, then the transports with
//! the windows of all users, in the order that fabrics require.

use std::time::Duration;

use super::levels::{Levels, OpenWith};
use super::needs::SessionNeeds;
use super::places::{discover_all, domains, name_hosts, scattered};
use super::reporter::Meeting;
use super::stuck::{Kept, Stuck};
use super::transports::{Transports, WindowMemory};
use super::variables;
use crate::abi;
use crate::bootstrap::{Ask, Members, Next, World};
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
            // Nothing is routed by domains.
            (None, None) => scattered(&places),
            (_, wanted) => domains(&places, wanted).map_err(|error| config.at_domains(error))?,
        };
        let mut warnings = variables::misspelt();
        warnings.extend(unknown_tables(config, registry));
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

/// Does the steps of a bring-up with the members of a world. Where a rank fails, they fail on all ranks. Where losses
/// are masked and a rank was lost meanwhile, they start anew without it.
///
/// # Errors
/// Those of `steps`.
pub(crate) fn together<T>(
    world: &World,
    config: &Config,
    steps: impl Fn(&Members<'_>) -> Result<T>,
) -> Result<T> {
    let mut ask = Ask::First;
    loop {
        let members = world.admit(ask)?;
        let error = match steps(&members) {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        match members.after(&error, config.world.deadline) {
            Next::Anew(next) => {
                tracing::warn!("bringing the communicator up anew: {error}");
                ask = next;
                continue;
            }
            // Other ranks wait in the next collective: they must learn why it never completes.
            Next::Refuse => members.refuse(&error),
            Next::Leave => world.report_failure(&error.to_string()),
            Next::End => {}
        }
        return Err(error);
    }
}

/// Items that are equal in the programs of all ranks, beside their config.
pub(crate) fn agreement() -> Vec<(String, String)> {
    let (transports, kernels) = (
        (abi::TY_TRANSPORT_MAJOR, abi::TY_TRANSPORT_MINOR),
        (abi::TY_KERNELS_MAJOR, abi::TY_KERNELS_MINOR),
    );
    vec![
        ("tokenyard version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("transport ABI".to_owned(), format!("{}.{}", transports.0, transports.1)),
        ("kernel set ABI".to_owned(), format!("{}.{}", kernels.0, kernels.1)),
    ]
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
