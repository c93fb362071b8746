//! Bring-up, in the order that fabrics require: resources that are fixed early come first.
//!
//! load → agree → discover → probe → needs → open → allocate → register → endpoint → exchange → connect
//! → commit → plan. Where a rank fails at any step, the bring-up fails on all ranks, so that no rank waits for it; the
//! world, and what is open in it, goes on.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::Communicator;
use super::claims::Claims;
use super::components::{Components, OpenComponents};
use crate::abi;
use crate::bootstrap::{Ask, Members, Next, World};
use crate::config::{Config, OnFailure};
use crate::gpu_ring::Counts;
use crate::host::{OpenKernels, Registry};
use crate::kernels::{KernelNeeds, KernelShape, kernel_shape};
use crate::link::Link;
use crate::moe::{Shape, TopkScratch};
use crate::nics::{Nics, rails, share_nics};
use crate::session::attended;
use crate::session::levels::{LevelReport, Levels, OpenWith, windows_of};
use crate::session::places::{discover_all, domains, name_hosts, scattered};
use crate::session::progress::{Progress, Proxies};
use crate::session::reporter::{
    Counters, FlightRecorder, Live, Looking, Meeting, OpenRecorder, RingCounts,
};
use crate::session::stuck::Stuck;
use crate::session::transports::Transports;
use crate::session::watchdog::{Bounds, Watchdog, WatchedLinks};
use crate::topology::Place;
use crate::transport::{NO_CAPABILITIES, Window};
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

/// The chosen components, and the place of every rank.
#[derive(Clone, Debug, serde::Serialize)]
pub struct BringUpReport {
    /// The kernel set.
    pub kernels: String,
    /// The level inside a domain; none where no rows use it.
    pub scale_up: Option<LevelReport>,
    /// The level between domains; none where no rows use it.
    pub scale_out: Option<LevelReport>,
    /// Warnings for the operator: tables of components that no plugin provides.
    pub warnings: Vec<String>,
    /// Scale-up domains in the world.
    pub domains: u32,
    /// `direct`, or `hierarchical` where a row crosses once per domain and is forwarded there.
    pub algorithm: &'static str,
    /// Place of every rank; none for an absent rank.
    pub places: Vec<Option<Place>>,
    /// Bytes of each window on this rank.
    pub window_bytes: Vec<u64>,
}

impl BringUpReport {
    /// The transports of both levels, in words.
    pub(super) fn transports(&self) -> String {
        let names: Vec<_> = [&self.scale_up, &self.scale_out]
            .into_iter()
            .flatten()
            .map(|level| level.transport.as_str())
            .collect();
        if names.is_empty() { "no transport".to_owned() } else { names.join(" and ") }
    }
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
        let (own, copy) = (Arc::clone(world), config.clone());
        attended::run(world, config, move || Self::open_here(&own, &copy, options))
    }

    fn open_here(
        world: &Arc<World>,
        config: &Config,
        options: CommunicatorOptions,
    ) -> Result<Self> {
        let mut ask = Ask::First;
        loop {
            let members = world.admit(ask)?;
            let error = match bring_up(world, &members, config, options) {
                Ok(comm) => return Ok(comm),
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
}

impl Communicator {
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
    options: CommunicatorOptions,
) -> Result<Communicator> {
    check_mode(world, config)?;
    let shape = options.shape(world.ranks())?;
    let recorder = OpenRecorder(FlightRecorder::new(world, config, options.in_flight)?);
    let registry = Registry::for_config(config)?;
    let kernels_component = registry.choose_kernels(&config.kernels)?;
    let number = agree(members, config, &options)?;
    meet(members, &recorder.0)?;
    let mut places = discover_all(members, config, &registry)?;
    name_hosts(&mut places, recorder.0.meeting.get().map_or(&[], |meeting| &meeting.ranks));
    share_nics(&mut places);
    let domains = match (&config.scale_up, config.domains) {
        // No row is routed by domains.
        (None, None) => scattered(&places),
        (_, wanted) => domains(&places, wanted).map_err(|error| config.at_domains(error))?,
    };
    let mut warnings = unknown_tables(config, &registry);
    let mut levels = Levels::choose(members, config, &registry, domains)?;
    let transports_use = levels.go_by_nics();
    warnings.extend(rails::even_out(&mut places, domains, transports_use)?);
    if let Some(Some(mine)) = places.get(world.rank() as usize) {
        let any_rails = rails::any_rails(&places);
        levels.use_nics(&Nics { names: mine.nics.clone(), any_rails });
    }
    if world.on_failure() == OnFailure::Mask && levels.domains > 1 {
        levels.put_only();
    }
    let kinds = kernels_component.probe(&config.kernels.table)?;

    // Declared first, so that it is dropped last: the kernel set points to its board.
    let bounds = Bounds { deadline: config.world.deadline, late: config.world.late };
    let headway = world.liveness().headway(number);
    let stuck = Stuck::default();
    let watchdog = Watchdog::start(world, headway, bounds, members.membership().clone())?;
    let mut watchdog = stuck.keep(watchdog);
    let of_rank_0 = kernel_shape(&shape, levels.domains, options.in_flight, options.handles);
    let kernel_shape = KernelShape { rank: world.rank(), ..of_rank_0 };
    let mut kernels = stuck.keep(kernels_component.open(&config.kernels.table, &kernel_shape)?);
    let needs = kernels.needs(&levels.limits())?;
    check_masking(&levels, &kernels, world.on_failure(), &needs)?;
    check_device(kinds, &needs)?;
    if levels.domains > 1 {
        kernels.compose(world.rank(), world.on_failure() == OnFailure::Mask);
    }
    levels.agree(members, &needs)?;
    let mut transports =
        stuck.keep(levels.open(&OpenWith { members, needs: &needs, deadline: bounds.deadline })?);
    let windows = transports.allocate_windows(&mut kernels, &needs)?;
    // To register may be collective on a fabric, where a rank without memory would leave the others waiting.
    members.barrier("window memory")?;
    transports.register_windows(&windows, &needs)?;
    levels.connect(members, &mut transports, &stuck)?;
    let names = levels.link_names(&transports);
    watchdog.name_links(WatchedLinks { names, domains: levels.domains });

    let cap = bounds.cap(world.on_failure());
    plan(&mut kernels, &transports, &windows, &watchdog, cap)?;
    let level_windows = level_windows(&needs, &windows);
    // SAFETY: `Components` stops the threads before it drops transports and kernel set, and so does an error
    // here; where a thread is stuck, both are leaked.
    let (proxies, rings) =
        unsafe { start_proxies(&mut kernels, &mut transports, &level_windows, &levels, &stuck)? };
    // SAFETY: as above.
    let progress = unsafe { Progress::start(transports.links().into_iter().flatten(), &stuck)? };
    watchdog.report_to(&recorder.0);
    let counters = kernels.counters(shape.ranks)?;
    // SAFETY: reports stop reading before `Components` drops transports and kernel set, and no step fails
    // before `Components` is made.
    let looking = unsafe { look_at(&recorder.0, &watchdog, &transports, counters, rings) };
    let components = Arc::new(Components {
        looking,
        stuck,
        open: OpenComponents {
            _progress: progress,
            _proxies: proxies,
            _transports: transports,
            kernels: Mutex::new(kernels),
            watchdog,
            claims: Claims::new(options.handles),
            device: (needs.device >= 0).then_some(needs.device),
            forms: needs.capabilities,
        },
    });
    members.barrier("communicator ready")?;
    recorder.0.track.opened();

    let (scale_up, scale_out) = levels.reports();
    let report = BringUpReport {
        kernels: components.kernels().name().to_owned(),
        scale_up,
        scale_out,
        warnings,
        domains,
        algorithm: if levels.domains == 1 { "direct" } else { "hierarchical" },
        places,
        window_bytes: windows.iter().map(|w| w.bytes).collect(),
    };
    Ok(Communicator {
        recorder,
        components,
        world: Arc::clone(world),
        config: config.clone(),
        shape,
        options,
        report,
        scratch: TopkScratch::new(&shape),
        late_weights: Vec::new(),
        next_operation: 0,
        open_slots: 0,
        took_back: false,
        abandoned: Arc::default(),
        closed: None,
    })
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

/// Checks that the world was joined with the mode of this config.
fn check_mode(world: &World, config: &Config) -> Result<()> {
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

fn agree(members: &Members<'_>, config: &Config, options: &CommunicatorOptions) -> Result<u64> {
    let mut items = vec![
        ("tokenyard version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        (
            "transport ABI".to_owned(),
            format!("{}.{}", abi::TY_TRANSPORT_MAJOR, abi::TY_TRANSPORT_MINOR),
        ),
        (
            "kernel set ABI".to_owned(),
            format!("{}.{}", abi::TY_KERNELS_MAJOR, abi::TY_KERNELS_MINOR),
        ),
    ];
    items.extend(options.agreement());
    items.extend(config.agreement());
    members.agree("communicator", &items)
}

/// Lets reports read the components.
///
/// # Safety
/// The value is dropped before the transports and the kernel set.
unsafe fn look_at(
    recorder: &Arc<FlightRecorder>,
    watchdog: &Watchdog,
    transports: &Transports,
    counters: Option<abi::TyCounters>,
    rings: [Option<RingCounts>; 2],
) -> Looking {
    // SAFETY: by this function's contract.
    let links = unsafe { transports.links() };
    // SAFETY: as above.
    let counters = counters.map(|counters| unsafe { Counters::new(counters) });
    recorder.look_at(Live { watched: watchdog.watched(), links, counters, rings })
}

/// Exchanges host and process of all ranks, and a name for the job: that of rank 0, or of the first
/// present rank. Collective.
fn meet(members: &Members<'_>, recorder: &FlightRecorder) -> Result<()> {
    let mine = serde_json::json!({
        "host": crate::machine::host_name(),
        "pid": std::process::id(),
        "job": job_name()?,
    });
    let all = members.all_gather("reports", mine.to_string().as_bytes())?;
    let reports: Vec<Option<serde_json::Value>> =
        all.iter().map(|bytes| serde_json::from_slice(bytes).ok()).collect();
    let text = |value: &serde_json::Value, key: &str, allowed: fn(char) -> bool| -> String {
        let text = value[key].as_str().unwrap_or_default();
        text.chars().filter(|c| allowed(*c)).take(255).collect()
    };
    let place = |value: &serde_json::Value| {
        (text(value, "host", |c| !c.is_control()), value["pid"].as_u64().unwrap_or(0) as u32)
    };
    let job = reports.iter().flatten().next();
    let job = job.map(|value| text(value, "job", |c| c.is_ascii_alphanumeric() || c == '-'));
    let ranks = reports.iter().map(|value| value.as_ref().map(place)).collect();
    // The recorder's only meeting, so the cell is empty.
    let _ = recorder.meeting.set(Meeting { job: job.unwrap_or_default(), ranks });
    Ok(())
}

/// The scheduler's name of the job, where there is one, and eight random digits that distinguish
/// communicators.
fn job_name() -> Result<String> {
    let names = ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE"];
    let name = names.iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default();
    let name: String =
        name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(40).collect();
    let digits = getrandom::u32().map_err(|error| {
        Error::new(ErrorKind::System, "name job", format!("no random bytes: {error}"))
    })?;
    Ok(if name.is_empty() { format!("{digits:08x}") } else { format!("{name}-{digits:08x}") })
}

fn plan(
    kernels: &mut OpenKernels,
    transports: &Transports,
    windows: &[Window],
    watchdog: &Watchdog,
    cap: Duration,
) -> Result<()> {
    // SAFETY: `Components` owns transports and kernel set together; operations run on the kernel set
    // only while the communicator, and so every transport, lives.
    let [scale_up, scale_out] = unsafe { transports.links() };
    let as_abi = |link: Option<Link>| link.map_or(NO_LINK, |link| link.as_abi());
    let plan = abi::TyPlan {
        size: size_of::<abi::TyPlan>(),
        scale_up: as_abi(scale_up),
        scale_out: as_abi(scale_out),
        windows: windows.as_ptr(),
        window_count: windows.len(),
        board: watchdog.board().as_abi(),
        lost: watchdog.lost_table(),
        cap_ns: cap.as_nanos().min(u128::from(u64::MAX)) as u64,
    };
    // SAFETY: the transports and the watchdog live in `Components` beside the kernel set; windows live
    // as long as their owner; the list itself is only read during the call.
    unsafe { kernels.plan(&plan) }
}

/// The windows of each level: scale-up, scale-out.
fn level_windows(needs: &KernelNeeds, windows: &[Window]) -> [Vec<Window>; 2] {
    [abi::TY_LEVEL_SCALE_UP, abi::TY_LEVEL_SCALE_OUT]
        .map(|level| windows_of(needs, level).map(|id| windows[id as usize]).collect())
}

/// Finds threads for the command rings of kernels that post through the host: the transport's own, or core's.
///
/// # Safety
/// The value is dropped before the transports and the kernel set, which are leaked if `stuck` is set
/// then.
unsafe fn start_proxies(
    kernels: &mut OpenKernels,
    transports: &mut Transports,
    level_windows: &[Vec<Window>; 2],
    levels: &Levels<'_>,
    stuck: &Stuck,
) -> Result<(Proxies, [Option<RingCounts>; 2])> {
    let (mut proxies, mut rings) = (Proxies::new(stuck), [None, None]);
    for level in [abi::TY_LEVEL_SCALE_UP, abi::TY_LEVEL_SCALE_OUT] {
        let Some(transport) = transports.of_level(level) else { continue };
        let largest_put = transport.capabilities().largest_put;
        let Some(ring) = kernels.gpu_ring(level)? else { continue };
        let (windows, ranks) = (&level_windows[level as usize], levels.ranks(level));
        let counts = Arc::new(Counts::new(&ring, ranks.len() as u32));
        let (counters, raised) = counts.words();
        let serve = abi::TyServeRing {
            size: size_of::<abi::TyServeRing>(),
            ring: &raw const ring,
            counters,
            raised,
            windows: windows.as_ptr(),
            window_count: windows.len(),
            largest_put,
            peers: ranks.len() as u32,
            reserved: 0,
        };
        // SAFETY: by this function's contract; the kernel set holds the ring until it is closed, the
        // transports hold the counts.
        let own = unsafe { transports.serve_ring(&serve, Arc::clone(&counts))? };
        own.into_iter().for_each(|(name, proxy)| proxies.push(name, proxy));
        rings[level as usize] = Some(RingCounts { counts, ranks: ranks.to_vec() });
    }
    Ok((proxies, rings))
}

const NO_LINK: abi::TyLink = abi::TyLink {
    table: std::ptr::null(),
    instance: std::ptr::null_mut(),
    capabilities: NO_CAPABILITIES,
};
