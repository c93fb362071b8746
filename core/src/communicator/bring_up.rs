//! Bring-up, in the order that fabrics require: resources that are fixed early come first.
//!
//! load → agree → discover → probe → needs → open → allocate → register → endpoint → exchange → connect
//! → commit → plan. Where a rank fails at any step, the bring-up fails on all ranks, so that no rank waits for it; the
//! world, and what is open in it, goes on.

use std::sync::Arc;

use super::Communicator;
use super::claims::Claims;
use super::components::Components;
use super::course::Course;
use super::sort;
use crate::abi;
use crate::bootstrap::{Ask, Members, World};
use crate::config::{Config, OnFailure};
use crate::host::{KernelsRef, OpenKernels, Registry};
use crate::kernels::{KernelNeeds, KernelShape, kernel_shape};
use crate::moe::combine::late_weights::LateWeights;
use crate::moe::{Shape, TopkScratch};
use crate::session::attended;
use crate::session::bring_up::{ConnectWith, Survey, agreement, check_mode, together};
use crate::session::levels::Levels;
use crate::session::meeting::meet;
use crate::session::needs::SessionNeeds;
use crate::session::progress::Proxies;
use crate::session::reporter::{Counters, FlightRecorder, Live, OpenRecorder, RingCounts};
use crate::session::stuck::Stuck;
use crate::session::transports::{Transports, WindowMemory};
use crate::session::watchdog::{Bounds, Watchdog, WatchedLinks};
use crate::session::watched_kernels::{PlanWith, ServeWith, WatchedKernels, check_alone};
use crate::session::{Choices, Session, User};
use crate::transport::Window;
use crate::{Error, ErrorKind, Result};

/// A caller's options for a communicator; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommunicatorOptions {
    /// E, a multiple of the number of ranks.
    pub experts: u32,
    /// K, 1 to 32.
    pub topk: u32,
    /// H in elements.
    pub hidden: u32,
    /// M: the most tokens of a rank in one operation.
    pub max_tokens: u32,
    /// Operations that may be sent and not yet received, 1 to 16.
    pub in_flight: u32,
    /// Handles that may live at once, 1 to 1024.
    pub handles: u32,
}

impl CommunicatorOptions {
    /// Options for a shape, with 2 operations in flight and 8 handles.
    pub fn new(experts: u32, topk: u32, hidden: u32, max_tokens: u32) -> Self {
        Self { experts, topk, hidden, max_tokens, in_flight: 2, handles: 8 }
    }

    fn shape(&self, ranks: u32) -> Result<Shape> {
        for (name, value, most) in
            [("in_flight", self.in_flight, 16), ("handles", self.handles, 1024)]
        {
            if value == 0 || value > most {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "open communicator",
                    format!("found {name} = {value}; expected 1 to {most}"),
                ));
            }
        }
        Shape {
            ranks,
            experts: self.experts,
            topk: self.topk,
            hidden: self.hidden,
            max_tokens: self.max_tokens,
        }
        .new()
    }

    fn agreement(&self) -> Vec<(String, String)> {
        [
            ("experts", self.experts),
            ("topk", self.topk),
            ("hidden", self.hidden),
            ("max_tokens", self.max_tokens),
            ("in_flight", self.in_flight),
            ("handles", self.handles),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.to_string()))
        .collect()
    }
}

/// The components that were opened, and the reasons.
#[derive(Clone, Debug, serde::Serialize)]
pub struct BringUpReport {
    /// The chosen components, and the place of every rank.
    #[serde(flatten)]
    pub choices: Choices,
    /// `direct`, or `hierarchical` where a row crosses once per domain and is forwarded there.
    pub algorithm: &'static str,
    /// Bytes of each window on this rank.
    pub window_bytes: Vec<u64>,
}

impl Communicator {
    /// Opens a communicator on all ranks of `world`. Collective. Where losses are masked, ranks that wait to
    /// come back do so here, and a rank that is lost meanwhile is left out.
    ///
    /// # Errors
    /// Every disagreement of [`Config`], components and ranks, on every rank, with the fix. An error of one rank
    /// alone is [`ErrorKind::Refused`] on the others, and the world goes on. [`ErrorKind::Transport`] names a
    /// component that does not return from a call within `late_ms`; this rank then leaves the world.
    pub fn open(world: &Arc<World>, config: &Config, options: CommunicatorOptions) -> Result<Self> {
        let opened = Self::open_all(world, config, &[options])?;
        opened.into_iter().next().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "open communicator", "the bring-up gave none")
        })
    }

    /// Opens communicators that share one session: one set of transports and connections. They
    /// come in the order of `all`. Each has its own kernel set, windows, queues and signals, so each may have
    /// another M, hidden size, top-k or number of experts. Collective, as [`open`](Self::open).
    ///
    /// Afterwards each is a communicator of its own: another thread may use it, ranks may use them in any order,
    /// and a refused call in one does not concern the others. Close or drop them in any order. The last one closes
    /// the transports. [`renew`](Self::renew) opens a session for that communicator alone.
    ///
    /// Fabrics fix windows, queues and signals before ranks connect, so no communicator joins an open session.
    ///
    /// # Errors
    /// As [`open`](Self::open). [`ErrorKind::InvalidInput`] without options. [`ErrorKind::Unsupported`] where all
    /// together need more windows, queues or signals than a transport has, and for several communicators with
    /// kernels of a device, which number them from 0.
    pub fn open_all(
        world: &Arc<World>,
        config: &Config,
        all: &[CommunicatorOptions],
    ) -> Result<Vec<Self>> {
        let (own, copy, all) = (Arc::clone(world), config.clone(), all.to_vec());
        attended::run(world, config, move || {
            together(&own, &copy, |members| bring_up(&own, members, &copy, &all))
        })
    }

    /// Takes part in the bring-up that the other ranks begin, with a refusal, where this rank has no options to
    /// [`open`](Self::open) one with. For callers that read arguments before core can. Returns `why`.
    pub fn refuse_open(world: &World, why: Error) -> Error {
        match world.admit(Ask::First) {
            Ok(members) => members.refuse(&why),
            // All ranks know of it.
            Err(error) => tracing::debug!("refusing a bring-up that does not begin: {error}"),
        }
        why
    }
}

fn bring_up(
    world: &Arc<World>,
    members: &Members<'_>,
    config: &Config,
    all: &[CommunicatorOptions],
) -> Result<Vec<Communicator>> {
    check_mode(world, config)?;
    let opening = |options: &CommunicatorOptions| Opening::new(world, config, options);
    let openings = all.iter().map(opening).collect::<Result<Vec<_>>>()?;
    let registry = Registry::for_config(config)?;
    let component = registry.choose_kernels(&config.kernels)?;
    let numbers = agree(members, config, all)?;
    let meeting = meet(members)?;
    for (at, opening) in openings.iter().enumerate() {
        // The recorder's only meeting, so the cell is empty.
        let _ = opening.recorder.0.meeting.set(meeting.of(at));
    }
    let survey = Survey::gather(members, config, &registry, &meeting)?;
    let kinds = component.probe(&config.kernels.table)?;
    check_alone(component.name(), kinds, all.len())?;

    let bounds = Bounds { deadline: config.world.deadline, late: config.world.late };
    let stuck = Stuck::default();
    let step = Step { world, config, survey: &survey, kinds, bounds, stuck: &stuck };
    // Declared first, so that they are dropped last: the windows are their memory.
    let mut users = step.open_kernels(members, component, &openings, &numbers)?;
    let asked = step.ask_needs(&users)?;
    let needs = SessionNeeds::sum(&asked, &survey.levels.limits())?;
    let mut memories: Vec<_> = users.iter_mut().map(|user| user as &mut dyn WindowMemory).collect();
    let with = ConnectWith { needs: &needs, deadline: bounds.deadline, stuck: &stuck };
    let (mut transports, windows) = survey.connect(members, &mut memories, &with)?;
    let granted = Granted { needs: &needs, windows: &windows };
    // SAFETY: `Session` owns transports and users together, and operations run only while a communicator, and
    // so the session, lives.
    unsafe { step.plan(&mut users, &transports, granted)? };
    let mut proxies = Proxies::new(&stuck);
    // SAFETY: `Session` stops the threads before it drops transports and users, and so does an error here;
    // where a thread is stuck, both are leaked.
    let rings = unsafe { step.serve_rings(&users, &mut transports, granted, &mut proxies)? };
    let counters = counters(&users, &openings)?;
    // SAFETY: reports stop reading before `Components` drops session and kernel set, and no step fails before
    // `Components` is made.
    let links = unsafe { transports.links() };
    let users: Vec<_> = users.into_iter().map(Arc::new).collect();
    let owners = users.iter().map(|user| Arc::clone(user) as User).collect();
    let session = Arc::new(Session::new(owners, transports, proxies, &stuck)?);

    let mut communicators = Vec::new();
    let parts = users.into_iter().zip(counters).zip(rings).zip(openings).zip(&asked);
    for ((((user, counters), rings), opening), needs) in parts {
        // SAFETY: as above.
        let counters = counters.map(|counters| unsafe { Counters::new(counters) });
        let live = Live { watched: user.watchdog.watched(), links, counters, rings };
        let components = Arc::new(Components {
            looking: opening.recorder.0.look_at(live),
            session: Arc::clone(&session),
            user,
            claims: Claims::new(opening.options.handles),
            shape: opening.shape,
            transports: survey.levels.transports(),
            device: (needs.device >= 0).then_some(needs.device),
            forms: needs.capabilities,
        });
        communicators.push(step.finish(opening, components, needs));
    }
    members.barrier("communicator ready")?;
    communicators.iter().for_each(|communicator| communicator.course.recorder.0.track.opened());
    Ok(communicators)
}

/// A communicator that is being opened.
struct Opening {
    options: CommunicatorOptions,
    shape: Shape,
    recorder: OpenRecorder,
}

impl Opening {
    fn new(world: &Arc<World>, config: &Config, options: &CommunicatorOptions) -> Result<Self> {
        let shape = options.shape(world.ranks())?;
        let recorder = FlightRecorder::new(world, config, options.in_flight, sort::NAMES)?;
        Ok(Self { options: *options, shape, recorder: OpenRecorder(recorder) })
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
    /// Opens a kernel set with a watchdog for each communicator.
    fn open_kernels(
        &self,
        members: &Members<'_>,
        component: KernelsRef,
        openings: &[Opening],
        numbers: &[u64],
    ) -> Result<Vec<WatchedKernels>> {
        let mut users = Vec::new();
        for (Opening { options, shape, .. }, number) in openings.iter().zip(numbers) {
            let headway = self.world.liveness().headway(*number);
            let lost = members.membership().clone();
            let watchdog = Watchdog::start(self.world, headway, self.bounds, lost)?;
            let domains = self.survey.levels.domains;
            let of_rank_0 = kernel_shape(shape, domains, options.in_flight, options.handles);
            let kernel_shape = KernelShape { rank: self.world.rank(), ..of_rank_0 };
            let kernels = component.open(&self.config.kernels.table, &kernel_shape)?;
            users.push(WatchedKernels::new(kernels, watchdog, self.stuck));
        }
        Ok(users)
    }

    /// Asks the kernel sets what they need, and checks that it fits config and levels.
    fn ask_needs(&self, users: &[WatchedKernels]) -> Result<Vec<KernelNeeds>> {
        let (levels, on_failure) = (&self.survey.levels, self.world.on_failure());
        let mut asked = Vec::new();
        for user in users {
            let mut kernels = user.kernels();
            let needs = kernels.needs(&levels.limits())?;
            check_masking(levels, &kernels, on_failure, &needs)?;
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

    fn finish(
        &self,
        opening: Opening,
        components: Arc<Components>,
        needs: &KernelNeeds,
    ) -> Communicator {
        let Opening { options, shape, recorder } = opening;
        let name = components.kernels().name();
        Communicator {
            report: report(self.survey, name, self.kinds, needs),
            course: Course::new(recorder, components, Arc::clone(self.world), options.in_flight),
            config: self.config.clone(),
            options,
            scratch: TopkScratch::new(&shape),
            late_weights: LateWeights::default(),
        }
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
        all.push(user.kernels().counters(opening.shape.ranks)?);
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
    on_failure: OnFailure,
    needs: &KernelNeeds,
) -> Result<()> {
    if on_failure == OnFailure::Stop {
        return Ok(());
    }
    let found = if let Some(transport) = levels.without(abi::TY_CAP_MASKING) {
        format!(
            "transport `{transport}` does not declare `masking`: that a lost rank delays no other \
             rank, and hides no other failure"
        )
    } else if needs.capabilities & abi::TY_KERNELS_CAP_MASKING == 0 {
        format!("kernel set `{}` cannot go on without a lost rank", kernels.name())
    } else {
        return Ok(());
    };
    let text = format!("on_failure = \"mask\": {found}");
    Err(Error::new(ErrorKind::Unsupported, "open communicator", text)
        .with_fix("use on_failure = \"stop\""))
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

/// Checks that all ranks open the same communicators with the same components. Returns a number for each, the same
/// on all ranks. Collective.
fn agree(members: &Members<'_>, config: &Config, all: &[CommunicatorOptions]) -> Result<Vec<u64>> {
    let Some((first, others)) = all.split_first() else {
        let text = "found no options; expected those of at least one communicator";
        return Err(Error::new(ErrorKind::InvalidInput, "open communicators", text));
    };
    let mut items = agreement();
    items.push(("communicators of the session".to_owned(), all.len().to_string()));
    items.extend(first.agreement());
    items.extend(config.agreement());
    let mut numbers = vec![members.agree("communicator", &items)?];
    for (other, at) in others.iter().zip(2..) {
        numbers.push(members.agree(&format!("communicator {at}"), &other.agreement())?);
    }
    Ok(numbers)
}
