//! The opening of a session for its users, in the order that fabrics require: resources that are fixed early come
//! first.
//!
//! load → agree → discover → probe → needs → open → allocate → register → endpoint → exchange → connect
//! → commit → plan. Where a rank fails at any step, the opening fails on all ranks, so that no rank waits for it; the
//! world, and what is open in it, goes on.

use std::sync::Arc;

use super::attended;
use super::bring_up::{ConnectWith, Survey, agreement, check_mode, together};
use super::levels::Levels;
use super::meeting::meet;
use super::needs::SessionNeeds;
use super::progress::Proxies;
use super::reporter::{Counters, FlightRecorder, Live, OpenRecorder, RingCounts};
use super::standing::Standing;
use super::stuck::Stuck;
use super::transports::{Transports, WindowMemory};
use super::user::User;
use super::watchdog::{Bounds, Watchdog, WatchedLinks};
use super::watched_kernels::{PlanWith, ServeWith, WatchedKernels};
use super::{Choices, Owned, Session};
use crate::abi;
use crate::bootstrap::{Ask, Members, World};
use crate::config::{Config, OnFailure};
use crate::host::{KernelsRef, OpenKernels, Registry};
use crate::kernels::{KernelNeeds, KernelShape};
use crate::transport::Window;
use crate::{Error, ErrorKind, Result};

/// A user that a session is to be opened for. Equal on all ranks.
#[derive(Clone)]
pub(crate) struct UserSpec {
    /// The name of such users in messages.
    pub(crate) name: &'static str,
    /// The shape that the kernel set is opened for: of rank 0, in one domain.
    pub(crate) shape: KernelShape,
    /// The bit `TY_KERNELS_CAP_*` without which the kernel set cannot run them; 0: each can.
    pub(crate) capability: u32,
    /// The names of the kinds of operations, for reports.
    pub(crate) operations: &'static [&'static str],
    /// The numbers that ranks compare, by name.
    pub(crate) agreement: Vec<(String, String)>,
}

/// A user that was opened.
pub(crate) struct OpenedUser {
    /// Its number in the world, the same on all ranks.
    pub(crate) number: u64,
    pub(crate) user: User,
    pub(crate) standing: Standing,
    pub(crate) report: BringUpReport,
}

/// The components that were opened, and the reasons.
#[derive(Clone, Debug, serde::Serialize)]
pub struct BringUpReport {
    /// The chosen components, and the place of every rank.
    #[serde(flatten)]
    pub choices: Choices,
    /// `direct`, or `hierarchical` where data crosses once per domain and is forwarded there.
    pub algorithm: &'static str,
    /// Bytes of each window on this rank.
    pub window_bytes: Vec<u64>,
}

/// Opens a session for these users on all ranks of `world`, and returns them in this order. Collective.
///
/// # Errors
/// Those of [`SessionOptions::open`](crate::ops::SessionOptions::open). `read` gives the users; its error is one of
/// this rank alone.
pub(crate) fn open(
    world: &Arc<World>,
    config: &Config,
    read: impl Fn() -> Result<Vec<UserSpec>> + Send + 'static,
) -> Result<Vec<OpenedUser>> {
    let (own, copy) = (Arc::clone(world), config.clone());
    attended::run(world, config, move || {
        together(&own, &copy, |members| open_users(&own, members, &copy, read()?))
    })
}

/// Opens a session for one user. See [`open`].
///
/// # Errors
/// As there.
pub(crate) fn open_one(
    world: &Arc<World>,
    config: &Config,
    read: impl Fn() -> Result<UserSpec> + Send + 'static,
) -> Result<OpenedUser> {
    let none = || Error::new(ErrorKind::Internal, "open session", "the bring-up gave no user");
    open(world, config, move || Ok(vec![read()?]))?.pop().ok_or_else(none)
}

/// Takes part in the opening that the other ranks begin, with a refusal. Returns `why`.
pub(crate) fn refuse_open(world: &World, why: Error) -> Error {
    match world.admit(Ask::First) {
        Ok(members) => members.refuse(&why),
        // All ranks know of it.
        Err(error) => tracing::debug!("refusing a bring-up that does not begin: {error}"),
    }
    why
}

fn open_users(
    world: &Arc<World>,
    members: &Members<'_>,
    config: &Config,
    all: Vec<UserSpec>,
) -> Result<Vec<OpenedUser>> {
    check_mode(world, config)?;
    let opening = |spec| Opening::new(world, config, spec);
    let openings = all.into_iter().map(opening).collect::<Result<Vec<_>>>()?;
    let registry = Registry::for_config(config)?;
    let component = registry.choose_kernels(&config.kernels)?;
    let numbers = agree(members, config, &openings)?;
    let meeting = meet(members)?;
    for (at, opening) in openings.iter().enumerate() {
        // The recorder's only meeting, so the cell is empty.
        let _ = opening.recorder.0.meeting.set(meeting.of(at));
    }
    let survey = Survey::gather(members, config, &registry, &meeting)?;
    let kinds = component.probe(&config.kernels.table)?;

    let bounds = Bounds { deadline: config.world.deadline, late: config.world.late };
    let stuck = Stuck::default();
    let step = Step { world, config, survey: &survey, kinds, bounds, stuck: &stuck };
    // Declared first, so that they are dropped last: the windows are their memory.
    let mut users = step.open_kernels(members, component, &openings, &numbers)?;
    let asked = step.ask_needs(&users, &openings)?;
    let needs = SessionNeeds::sum(&asked, &survey.levels.limits())?;
    let mut memories: Vec<_> = users.iter_mut().map(|user| user as &mut dyn WindowMemory).collect();
    let with = ConnectWith { needs: &needs, deadline: bounds.deadline, stuck: &stuck };
    let (mut transports, windows) = survey.connect(members, &mut memories, &with)?;
    let granted = Granted { needs: &needs, windows: &windows };
    // SAFETY: `Session` owns transports and users together, and operations run only while a user, and so the
    // session, lives.
    unsafe { step.plan(&mut users, &transports, granted)? };
    let mut proxies = Proxies::new(&stuck);
    // SAFETY: `Session` stops the threads before it drops transports and users, and so does an error here;
    // where a thread is stuck, both are leaked.
    let rings = unsafe { step.serve_rings(&users, &mut transports, granted, &mut proxies)? };
    let counters = counters(&users, &openings)?;
    // SAFETY: reports stop reading before a `User` drops its session, and no step fails before it is made.
    let links = unsafe { transports.links() };
    let users: Vec<_> = users.into_iter().map(Arc::new).collect();
    let owners = users.iter().map(|user| Arc::clone(user) as Owned).collect();
    let session = Arc::new(Session::new(owners, transports, proxies, &stuck)?);

    let mut opened = Vec::new();
    let parts = users.into_iter().zip(counters).zip(rings).zip(openings).zip(&asked).zip(numbers);
    for (((((kernels, counters), rings), opening), needs), number) in parts {
        // SAFETY: as above.
        let counters = counters.map(|counters| unsafe { Counters::new(counters) });
        let live = Live { watched: kernels.watchdog.watched(), links, counters, rings };
        let recorder = opening.recorder;
        opened.push(OpenedUser {
            number,
            report: report(&survey, component.name(), kinds, needs),
            user: User {
                looking: recorder.0.look_at(live),
                session: Arc::clone(&session),
                kernels: Arc::clone(&kernels),
                transports: survey.levels.transports(),
                device: (needs.device >= 0).then_some(needs.device),
                capabilities: needs.capabilities,
            },
            standing: Standing::new(opening.spec.name, recorder, world, kernels),
        });
    }
    members.barrier("session ready")?;
    opened.iter().for_each(|opened| opened.standing.recorder.0.track.opened());
    Ok(opened)
}

/// A user that is being opened.
struct Opening {
    spec: UserSpec,
    recorder: OpenRecorder,
}

impl Opening {
    fn new(world: &Arc<World>, config: &Config, spec: UserSpec) -> Result<Self> {
        let recorder = FlightRecorder::new(world, config, spec.shape.in_flight, spec.operations)?;
        Ok(Self { spec, recorder: OpenRecorder(recorder) })
    }
}

/// The resources that the session has for its users.
#[derive(Clone, Copy)]
struct Granted<'a> {
    needs: &'a SessionNeeds,
    windows: &'a [Window],
}

/// Facts that steps of a bring-up share, once places and levels are chosen.
struct Step<'a> {
    world: &'a Arc<World>,
    config: &'a Config,
    survey: &'a Survey<'a>,
    /// Kinds of memory that the kernel set works on.
    kinds: u32,
    bounds: Bounds,
    stuck: &'a Stuck,
}

impl Step<'_> {
    /// Opens a kernel set with a watchdog for each user.
    fn open_kernels(
        &self,
        members: &Members<'_>,
        component: KernelsRef,
        openings: &[Opening],
        numbers: &[u64],
    ) -> Result<Vec<WatchedKernels>> {
        let mut users = Vec::new();
        for (opening, number) in openings.iter().zip(numbers) {
            let headway = self.world.liveness().headway(*number);
            let lost = members.membership().clone();
            let watchdog = Watchdog::start(self.world, headway, self.bounds, lost)?;
            let (rank, domains) = (self.world.rank(), self.survey.levels.domains);
            let shape = KernelShape { rank, domains, ..opening.spec.shape };
            let kernels = component.open(&self.config.kernels.table, &shape)?;
            users.push(WatchedKernels::new(kernels, watchdog, self.stuck));
        }
        Ok(users)
    }

    /// Asks the kernel sets what they need, and checks that it fits config and levels.
    fn ask_needs(
        &self,
        users: &[WatchedKernels],
        openings: &[Opening],
    ) -> Result<Vec<KernelNeeds>> {
        let (levels, on_failure) = (&self.survey.levels, self.world.on_failure());
        let mut asked = Vec::new();
        for (user, opening) in users.iter().zip(openings) {
            let mut kernels = user.kernels();
            let needs = kernels.needs(&levels.limits())?;
            check_runs(&kernels, &opening.spec, &needs)?;
            if on_failure == OnFailure::Mask {
                check_masking(levels, &kernels, &opening.spec, &needs)?;
            }
            check_device(self.kinds, &needs)?;
            if levels.domains > 1 {
                kernels.compose(self.world.rank(), on_failure == OnFailure::Mask);
            }
            asked.push(needs);
        }
        Ok(asked)
    }

    /// Fixes the plans of the kernel sets.
    ///
    /// # Safety
    /// As [`WatchedKernels::plan`], for each.
    unsafe fn plan(
        &self,
        users: &mut [WatchedKernels],
        transports: &Transports,
        granted: Granted<'_>,
    ) -> Result<()> {
        let (Granted { needs, windows }, levels) = (granted, &self.survey.levels);
        let is_shared = users.len() > 1;
        for (user, share) in users.iter_mut().zip(&needs.shares) {
            let names = levels.link_names(transports);
            user.watchdog.name_links(WatchedLinks { names, domains: levels.domains });
            let cap = self.bounds.cap(self.world.on_failure());
            let with = PlanWith { transports, windows, share, is_shared, cap };
            // SAFETY: by this function's contract.
            unsafe { user.plan(&with)? };
        }
        Ok(())
    }

    /// Finds threads for the rings of all kernel sets, and returns what the rings count.
    ///
    /// # Safety
    /// As [`WatchedKernels::start_proxies`], for each.
    unsafe fn serve_rings(
        &self,
        users: &[WatchedKernels],
        transports: &mut Transports,
        granted: Granted<'_>,
        proxies: &mut Proxies,
    ) -> Result<Vec<[Option<RingCounts>; 2]>> {
        let (Granted { needs, windows }, levels) = (granted, &self.survey.levels);
        let mut rings = Vec::new();
        for user in users {
            let with = ServeWith { transports: &mut *transports, windows, needs, levels };
            // SAFETY: by this function's contract.
            rings.push(unsafe { user.start_proxies(with, proxies)? });
        }
        Ok(rings)
    }
}

/// Lets the watchdogs report to the recorders, and returns the counters of the kernel sets.
fn counters(
    users: &[WatchedKernels],
    openings: &[Opening],
) -> Result<Vec<Option<abi::TyCounters>>> {
    let mut all = Vec::new();
    for (user, opening) in users.iter().zip(openings) {
        user.watchdog.report_to(&opening.recorder.0);
        all.push(user.kernels().counters(opening.spec.shape.ranks)?);
    }
    Ok(all)
}

fn report(survey: &Survey<'_>, kernels: &str, kinds: u32, needs: &KernelNeeds) -> BringUpReport {
    BringUpReport {
        choices: survey.choices(kernels, kinds),
        algorithm: if survey.levels.domains == 1 { "direct" } else { "hierarchical" },
        window_bytes: needs.window_bytes[..needs.windows as usize].to_vec(),
    }
}

/// Checks that the components can continue without a lost rank, where the config masks losses.
fn check_masking(
    levels: &Levels<'_>,
    kernels: &OpenKernels,
    spec: &UserSpec,
    needs: &KernelNeeds,
) -> Result<()> {
    let found = if let Some(transport) = levels.without(abi::TY_CAP_MASKING) {
        format!(
            "transport `{transport}` does not declare `masking`: that a lost rank delays no other \
             rank, and hides no other failure"
        )
    } else if needs.capabilities & abi::TY_KERNELS_CAP_MASKING == 0 {
        let (name, kernels) = (spec.name, kernels.name());
        format!("a {name} of kernel set `{kernels}` cannot go on without a lost rank")
    } else {
        return Ok(());
    };
    let text = format!("on_failure = \"mask\": {found}");
    Err(Error::new(ErrorKind::Unsupported, "open session", text)
        .with_fix("use on_failure = \"stop\""))
}

/// Checks that a kernel set runs the operations of a user.
fn check_runs(kernels: &OpenKernels, spec: &UserSpec, needs: &KernelNeeds) -> Result<()> {
    if needs.capabilities & spec.capability == spec.capability {
        return Ok(());
    }
    let text = format!("kernel set `{}` has no {}", kernels.name(), spec.name);
    Err(Error::new(ErrorKind::Unsupported, "open session", text)
        .with_fix("use kernel set `cpu`, which has each operation"))
}

/// Checks that a kernel set names a device exactly where it cannot work on host memory.
fn check_device(kinds: u32, needs: &KernelNeeds) -> Result<()> {
    let on_device = kinds & abi::TY_MEMORY_HOST == 0;
    if on_device == (needs.device >= 0) {
        return Ok(());
    }
    let message = format!(
        "found memory kinds {kinds:#x} and device {}; expected a device where host memory is not among \
         the kinds, else -1",
        needs.device
    );
    Err(Error::new(ErrorKind::Plugin, "needs", message)
        .with_fix("report it to the author of the kernel set"))
}

/// Checks that all ranks open the same users with the same components. Returns a number for each, the same on all
/// ranks. Collective.
fn agree(members: &Members<'_>, config: &Config, all: &[Opening]) -> Result<Vec<u64>> {
    let Some((first, others)) = all.split_first() else {
        let text = "found no options; expected those of at least one user";
        return Err(Error::new(ErrorKind::InvalidInput, "open session", text));
    };
    let mut items = agreement();
    let names: Vec<_> = all.iter().map(|opening| opening.spec.name).collect();
    items.push(("users of the session".to_owned(), names.join(", ")));
    items.extend(first.spec.agreement.iter().cloned());
    items.extend(config.agreement());
    let mut numbers = vec![members.agree("session", &items)?];
    for (other, at) in others.iter().zip(2..) {
        let name = format!("{} {at}", other.spec.name);
        numbers.push(members.agree(&name, &other.spec.agreement)?);
    }
    Ok(numbers)
}
