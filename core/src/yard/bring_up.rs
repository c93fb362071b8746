//! Bring-up, in the order that fabrics force on everybody: what is fixed early comes first.
//!
//! load → agree → discover → probe → needs → open → allocate → register → endpoint → exchange →
//! connect → plan. A rank that fails anywhere tells the others, so that nobody waits for it.

use std::sync::{Arc, Mutex};

use super::claims::Claims;
use super::watchdog::{Bounds, Watchdog};
use super::{Parts, Yard};
use crate::abi;
use crate::bootstrap::World;
use crate::config::{Config, PartChoice};
use crate::host::{OpenKernels, OpenTransport, Registry, TransportRef, discover};
use crate::kernels::{KernelNeeds, KernelShape};
use crate::moe::{Shape, TopkScratch};
use crate::topology::{Discover, Place};
use crate::transport::{Capabilities, MemoryNeeds, Team, TransportNeeds, Window};
use crate::{Error, ErrorKind, Result};

/// What a caller chooses for a yard; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct YardOptions {
    /// E, a multiple of the number of ranks.
    pub experts: u32,
    /// K, 1 to 32.
    pub topk: u32,
    /// H in elements.
    pub hidden: u32,
    /// M: the most tokens a rank may bring.
    pub max_tokens: u32,
    /// Operations that may be sent and not yet received, 1 to 16.
    pub in_flight: u32,
    /// Handles that may live at once, 1 to 1024.
    pub handles: u32,
}

impl YardOptions {
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
                    "open yard",
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

/// What was chosen, and where everybody is.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    /// The kernel set.
    pub kernels: String,
    /// The transport that carries the rows.
    pub transport: String,
    /// Why this transport, where there was a choice.
    pub reasons: Vec<String>,
    /// What an operator should look at: tables of parts that nobody provides.
    pub warnings: Vec<String>,
    /// How rows move: `load_store` or `put`.
    pub path: &'static str,
    /// Scale-up domains in the world.
    pub domains: u32,
    /// Place of every rank.
    pub places: Vec<Place>,
    /// Bytes of each window on this rank.
    pub window_bytes: Vec<u64>,
}

impl Yard {
    /// Opens a yard on all ranks of `world`. Collective.
    ///
    /// # Errors
    /// Everything that [`Config`], parts and ranks can disagree on, on every rank, with the fix.
    pub fn open(world: &Arc<World>, config: &Config, options: YardOptions) -> Result<Self> {
        bring_up(world, config, options).inspect_err(|error| {
            // Others wait in the next collective: they must learn why it will never come.
            if error.kind() != ErrorKind::PeerLost && error.kind() != ErrorKind::Mismatch {
                world.report_failure(&error.to_string());
            }
        })
    }
}

fn bring_up(world: &Arc<World>, config: &Config, options: YardOptions) -> Result<Yard> {
    let shape = options.shape(world.ranks())?;
    let registry = Registry::load(&config.plugins)?;
    let kernels_part = registry.kernels(&config.kernels.name)?;
    agree(world, config, &options)?;
    let places = discover_all(world, config, &registry)?;
    let domains = domains(&places)?;
    let level = choose_level(world, config, &registry, domains)?;
    kernels_part.probe(&config.kernels.table)?;

    // Declared first, so that it is dropped last: the kernel set points to its board.
    let bounds = Bounds { deadline: config.world.deadline, late: config.world.late };
    let watchdog = Watchdog::start(world.liveness(), bounds)?;
    let mut kernels =
        kernels_part.open(&config.kernels.table, &kernel_shape(world, &shape, &options))?;
    let needs = kernels.needs(&level.capabilities)?;
    agree_on_windows(world, &level, &needs)?;
    let mut transport = open_transport(world, config, &level, &needs)?;
    let windows = make_windows(&mut kernels, &mut transport, &needs)?;
    connect(world, &mut transport)?;

    plan(&mut kernels, &transport, &windows, &watchdog, bounds)?;
    world.barrier("yard ready")?;

    let report = Report {
        kernels: kernels.name().to_owned(),
        transport: transport.name().to_owned(),
        path: level.path(),
        reasons: level.reasons,
        warnings: unknown_tables(config, &registry),
        domains,
        places,
        window_bytes: windows.iter().map(|w| w.bytes).collect(),
    };
    Ok(Yard {
        parts: Arc::new(Parts {
            transports: vec![transport],
            kernels: Mutex::new(kernels),
            watchdog,
            claims: Claims::new(options.handles),
        }),
        world: Arc::clone(world),
        shape,
        options,
        report,
        scratch: TopkScratch::new(&shape),
        next_operation: 0,
        open_slots: 0,
        closed: None,
    })
}

/// A table of a part that is not chosen may be kept for another day; one whose part nobody provides
/// may also be a misspelt name.
fn unknown_tables(config: &Config, registry: &Registry) -> Vec<String> {
    let parts = registry.parts();
    let unknown = config.unused_tables.iter().filter(|t| !parts.iter().any(|p| p.name == t.part));
    unknown
        .map(|table| {
            let text = format!(
                "{}:{}: no part is called `{}` here; the table [{}.{}] is not used",
                config.name, table.line, table.part, table.section, table.part
            );
            tracing::warn!("{text}");
            text
        })
        .collect()
}

fn agree(world: &World, config: &Config, options: &YardOptions) -> Result<()> {
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
    world.agree("yard", &items)
}

fn kernel_shape(world: &World, shape: &Shape, options: &YardOptions) -> KernelShape {
    KernelShape {
        size: size_of::<KernelShape>(),
        rank: world.rank(),
        ranks: shape.ranks,
        experts: shape.experts,
        topk: shape.topk,
        hidden: shape.hidden,
        max_tokens: shape.max_tokens,
        in_flight: options.in_flight,
        handles: options.handles,
    }
}

fn discover_all(world: &World, config: &Config, registry: &Registry) -> Result<Vec<Place>> {
    let part = registry.topology(&config.topology.name)?;
    let ask = Discover { rank: world.rank(), ranks: world.ranks(), local_rank: world.local_rank() };
    let mine = discover(&part, &config.topology.table, &ask)?;
    let encode = |e: serde_json::Error| {
        Error::new(ErrorKind::Protocol, "gather places", "a place cannot be read").with_source(e)
    };
    let all = world.all_gather("places", &serde_json::to_vec(&mine).map_err(encode)?)?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(encode)).collect()
}

/// Counts the domains: runs of ranks on one machine. Ranks must be domain-major and domains equal.
fn domains(places: &[Place]) -> Result<u32> {
    let mut sizes: Vec<(&str, usize)> = Vec::new();
    for place in places {
        match sizes.iter().position(|(host, _)| *host == place.host) {
            None => sizes.push((&place.host, 1)),
            Some(last) if last + 1 == sizes.len() => sizes[last].1 += 1,
            Some(_) => {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    "check places",
                    format!("the ranks of machine {} do not follow each other", place.host),
                )
                .with_fix("number ranks machine by machine (srun --distribution=block does)"));
            }
        }
    }
    let equal = sizes.windows(2).all(|pair| pair[0].1 == pair[1].1);
    if !equal {
        let found: Vec<_> = sizes.iter().map(|(host, n)| format!("{n} on {host}")).collect();
        return Err(Error::new(
            ErrorKind::Mismatch,
            "check places",
            format!("domains differ in size: {}; expected equal", found.join(", ")),
        )
        .with_fix("start the same number of ranks on every machine"));
    }
    Ok(sizes.len() as u32)
}

/// The transport that carries the rows.
struct Level<'a> {
    part: TransportRef,
    choice: &'a PartChoice,
    capabilities: Capabilities,
    reasons: Vec<String>,
}

impl Level<'_> {
    fn path(&self) -> &'static str {
        if self.capabilities.flags & abi::TY_CAP_LOAD_STORE != 0 { "load_store" } else { "put" }
    }
}

fn choose_level<'a>(
    world: &World,
    config: &'a Config,
    registry: &Registry,
    domains: u32,
) -> Result<Level<'a>> {
    // Both levels are looked up, so that a wrong name is found even where it would not be used.
    for choice in config.scale_up.iter().chain(&config.scale_out) {
        registry.transport(&choice.name)?;
    }
    match &config.scale_up {
        Some(choice) if domains == 1 => {
            first_that_probes(world, registry, std::slice::from_ref(choice))
        }
        Some(choice) => Err(Error::new(
            ErrorKind::Unsupported,
            "choose parts",
            format!(
                "the ranks are in {domains} domains, and scale-up transport `{}` reaches one; \
                 routing over several domains is not part of this version",
                choice.name
            ),
        )
        .with_fix("run on one machine, or use one scale-out transport with scale_up = \"none\"")),
        None => first_that_probes(world, registry, &config.scale_out),
    }
}

/// The first choice that every rank can use; the reasons against the others are kept.
fn first_that_probes<'a>(
    world: &World,
    registry: &Registry,
    choices: &'a [PartChoice],
) -> Result<Level<'a>> {
    let mut reasons = Vec::new();
    for choice in choices {
        let part = registry.transport(&choice.name)?;
        let mine = part.probe(&choice.table);
        let word = mine.as_ref().map_or_else(ToString::to_string, |_| String::new());
        let all = world.all_gather("probe", word.as_bytes())?;
        let against: Vec<_> = all
            .iter()
            .enumerate()
            .filter(|(_, word)| !word.is_empty())
            .map(|(rank, word)| format!("rank {rank}: {}", String::from_utf8_lossy(word)))
            .collect();
        if let (Ok(capabilities), true) = (mine, against.is_empty()) {
            reasons.push(format!("{}: chosen, it probes on all ranks", choice.name));
            return Ok(Level { part, choice, capabilities, reasons });
        }
        let first = against.first().cloned().unwrap_or_default();
        reasons.push(format!(
            "{}: {} of {} ranks cannot: {first}",
            choice.name,
            against.len(),
            all.len()
        ));
    }
    Err(Error::new(
        ErrorKind::Unavailable,
        "choose transport",
        format!("no transport works on all ranks: {}", reasons.join("; ")),
    )
    .with_fix(
        "mend what the probe names (tokenyard doctor says more), or choose another transport",
    ))
}

fn open_transport(
    world: &World,
    config: &Config,
    level: &Level<'_>,
    needs: &KernelNeeds,
) -> Result<OpenTransport> {
    if world.ranks() > level.capabilities.max_peers {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "open transport",
            format!(
                "found {} ranks; transport `{}` reaches at most {}",
                world.ranks(),
                level.choice.name,
                level.capabilities.max_peers
            ),
        ));
    }
    let needs = TransportNeeds {
        windows: needs.windows,
        lanes: needs.lanes,
        signals: needs.signals,
        queue_depth: needs.queue_depth,
        largest_put: needs.largest_put,
        deadline: config.world.deadline,
    };
    level.part.open(&level.choice.table, &Team::world(world.rank(), world.ranks()), &needs)
}

/// Keys of a part's own table may differ per rank, but not what they make of windows and signals:
/// every rank computes the others' offsets from its own.
fn agree_on_windows(world: &World, level: &Level<'_>, needs: &KernelNeeds) -> Result<()> {
    let mut items = vec![
        ("path of rows".to_owned(), level.path().to_owned()),
        ("windows".to_owned(), needs.windows.to_string()),
        ("signals".to_owned(), needs.signals.to_string()),
    ];
    for (id, bytes) in needs.window_bytes.iter().take(needs.windows as usize).enumerate() {
        items.push((format!("bytes of window {id}"), bytes.to_string()));
    }
    world.agree("windows", &items)
}

fn make_windows(
    kernels: &mut OpenKernels,
    transport: &mut OpenTransport,
    needs: &KernelNeeds,
) -> Result<Vec<Window>> {
    let memory: MemoryNeeds = transport.memory_needs()?;
    let owns = transport.capabilities().flags & abi::TY_CAP_OWNS_MEMORY != 0;
    let mut windows = Vec::new();
    for id in 0..needs.windows {
        let bytes = needs.window_bytes[id as usize];
        let window = if owns {
            transport.alloc(id, bytes)?
        } else {
            kernels.allocate(id, bytes, &memory)?
        };
        // SAFETY: window memory belongs to the kernel set or to the transport; `Parts` drops the
        // transport first and the kernel set after it, and so does `bring_up` on an error
        // (locals are dropped in reverse order of declaration).
        unsafe { transport.register(&window)? };
        windows.push(window);
    }
    Ok(windows)
}

fn connect(world: &World, transport: &mut OpenTransport) -> Result<()> {
    let outgoing =
        (0..world.ranks()).map(|peer| transport.endpoint(peer)).collect::<Result<Vec<_>>>()?;
    let incoming = world.exchange("endpoints", outgoing)?;
    for (peer, data) in (0..).zip(&incoming) {
        transport.connect(peer, data).map_err(|e| e.with_rank(peer))?;
    }
    Ok(())
}

fn plan(
    kernels: &mut OpenKernels,
    transport: &OpenTransport,
    windows: &[Window],
    watchdog: &Watchdog,
    bounds: Bounds,
) -> Result<()> {
    let cap = bounds.late + 2 * bounds.deadline;
    let plan = abi::TyPlan {
        size: size_of::<abi::TyPlan>(),
        // SAFETY: `Parts` keeps transport and kernel set together; operations run on the kernel set
        // only while the yard, and so the transport, lives.
        scale_up: unsafe { transport.link() }.as_abi(),
        scale_out: no_link(),
        windows: windows.as_ptr(),
        window_count: windows.len(),
        board: watchdog.board().as_abi(),
        cap_ns: cap.as_nanos().min(u128::from(u64::MAX)) as u64,
    };
    // SAFETY: the transport and the watchdog live in `Parts` beside the kernel set; windows live
    // as long as their owner; the list itself is only read during the call.
    unsafe { kernels.plan(&plan) }
}

fn no_link() -> abi::TyLink {
    abi::TyLink {
        table: std::ptr::null(),
        instance: std::ptr::null_mut(),
        capabilities: crate::transport::NO_CAPABILITIES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(hosts: &[&str]) -> Vec<Place> {
        hosts
            .iter()
            .map(|host| Place {
                host: (*host).to_owned(),
                device: None,
                numa_node: None,
                processors: 1,
            })
            .collect()
    }

    #[test]
    fn domains_are_runs_of_ranks_on_one_machine() {
        assert_eq!(domains(&places(&["a"])).expect("one"), 1);
        assert_eq!(domains(&places(&["a", "a", "b", "b"])).expect("two"), 2);
    }

    #[test]
    fn scattered_ranks_and_unequal_domains_are_refused_with_the_fix() {
        let scattered = domains(&places(&["a", "b", "a", "b"])).expect_err("scattered");
        assert!(scattered.to_string().contains("do not follow each other"), "{scattered}");
        let unequal = domains(&places(&["a", "a", "b"])).expect_err("unequal");
        assert!(unequal.to_string().contains("2 on a, 1 on b"), "{unequal}");
    }
}
