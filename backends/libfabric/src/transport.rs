//! The components: one instance with two names.
//!
//! Queues and rails are separate: a queue belongs to one thread, a rail (one NIC) serves all
//! queues. A thread that posts or polls locks the rail for a batch of commands; a thread that finds
//! it locked leaves the work to the other. So there is one uncontended lock per batch, and none per
//! command. With proxy threads, each of these has its own rails and queues.
//!
//! Watched by the tests in these files, and `tests/{providers,served,allocations}.rs`.

mod backlog;
mod commands;
mod datum;
mod info;
mod instance;
mod interfaces;
mod numa;
mod objects;
mod proxied;
mod queue;
mod rail;
mod shared;
#[cfg(test)]
mod tests;
mod wire;

use std::fmt::Debug;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use tokenyard_core::abi;
use tokenyard_core::gpu_ring::{GpuRing, RingToServe};
use tokenyard_core::nics::Nics;
use tokenyard_core::proxy::Proxy;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, NO_CAPABILITIES, Transport, TransportOpen, Window,
};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::config::{EfaConfig, LibfabricConfig};
use instance::Instance;
pub use wire::check_endpoint;

const MAX_QUEUES: u32 = 64;
const MAX_SIGNALS: u32 = 65_536;
const LARGEST_PUT: u64 = 1 << 40;
/// Providers that a lost peer does not hold up, by experiment: TCP without a layer above it, under
/// its names in different versions of libfabric. `shm` is not among them: its ranks take locks in
/// each other's memory, and a process that is killed while it holds a lock leaves the others in
/// `pthread_spin_lock` for ever.
const MASKING: [&str; 2] = ["net", "tcp"];

/// Any provider, chosen by the config: `tcp`, `shm`, `udp`, `verbs`, ...
pub type Libfabric = Component<AnyProvider>;
/// The provider `efa` of AWS, with device memory.
pub type Efa = Component<EfaProvider>;

/// The differences between the components.
pub trait Preset: Debug + Send + Sync + 'static {
    /// The component's name.
    const NAME: &'static str;
    /// One line for people.
    const ABOUT: &'static str;
    /// The component's config table.
    type Config: DeserializeOwned;
    /// The settings of the table.
    fn settings(config: Self::Config) -> Settings;
}

/// The settings of an instance.
#[derive(Clone, Debug)]
pub struct Settings {
    config: LibfabricConfig,
    /// Whether device memory is requested.
    hmem: bool,
    /// NICs that the topology chose for this rank.
    nics: Nics,
}

/// The preset of [`Libfabric`].
#[derive(Debug)]
pub struct AnyProvider;

impl Preset for AnyProvider {
    const NAME: &'static str = "libfabric";
    const ABOUT: &'static str = "any RDM provider of libfabric: tcp, shm, udp, verbs, ...";
    type Config = LibfabricConfig;

    fn settings(config: LibfabricConfig) -> Settings {
        Settings { config, hmem: true, nics: Nics::default() }
    }
}

/// The preset of [`Efa`].
#[derive(Debug)]
pub struct EfaProvider;

impl Preset for EfaProvider {
    const NAME: &'static str = "efa";
    const ABOUT: &'static str = "AWS Elastic Fabric Adapter (SRD), through libfabric";
    type Config = EfaConfig;

    fn settings(config: EfaConfig) -> Settings {
        let EfaConfig { rails, proxy_threads, queue_depth, get, flush } = config;
        let provider = "efa".into();
        let config = LibfabricConfig { provider, rails, proxy_threads, queue_depth, get, flush };
        AnyProvider::settings(config)
    }
}

/// A transport over libfabric.
#[derive(Debug)]
pub struct Component<P> {
    /// Serves a ring of kernels, instead of the proxy. Ends before the instance.
    served: Option<GpuRing>,
    /// The proxy threads that post and poll, once all peers are connected. They end before the
    /// instance.
    proxy: Option<Proxy>,
    instance: Arc<Instance>,
    proxy_threads: u32,
    /// Peers that are not connected yet.
    missing: u32,
    kinds: u32,
    preset: PhantomData<P>,
}

impl<P> Component<P> {
    /// The instance, for calls of the bring-up, when no other thread has it yet.
    fn instance(&mut self, operation: &'static str) -> Result<&mut Instance> {
        let late = "all peers are connected; expected it before";
        Arc::get_mut(&mut self.instance)
            .ok_or_else(|| Error::new(ErrorKind::Internal, operation, late))
    }
}

impl<P: Preset> Transport for Component<P>
where
    P::Config: Clone,
{
    const NAME: &'static str = P::NAME;
    const ABOUT: &'static str = P::ABOUT;
    type Config = P::Config;

    fn probe(config: &P::Config) -> Result<Capabilities> {
        let settings = P::settings(config.clone());
        let rails = info::choose(&settings)?;
        let largest = rails.iter().map(info::Info::largest_put).min().unwrap_or(0);
        let get = if settings.config.get { abi::TY_CAP_GET } else { 0 };
        // Proxy threads drive the instance themselves.
        let manual =
            if settings.config.proxy_threads == 0 { abi::TY_CAP_MANUAL_PROGRESS } else { 0 };
        let provider = rails.first().map(info::Info::provider).unwrap_or_default();
        let masking = if MASKING.contains(&provider.as_str()) { abi::TY_CAP_MASKING } else { 0 };
        let placed =
            if info::goes_by_places(&settings, &rails) { abi::TY_CAP_PLACED_NICS } else { 0 };
        Ok(Capabilities {
            flags: abi::TY_CAP_IMMEDIATE | masking | manual | get | placed,
            memory_kinds: memory_kinds(&rails),
            max_peers: datum::MAX_PEERS,
            max_queues: MAX_QUEUES,
            max_signals: MAX_SIGNALS,
            max_queue_depth: settings.config.queue_depth,
            max_windows: wire::MAX_WINDOWS,
            largest_put: largest.min(LARGEST_PUT),
            ..NO_CAPABILITIES
        })
    }

    fn open(config: P::Config, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, needs, .. } = *open;
        let settings = Settings { nics: team.nics.clone(), ..P::settings(config) };
        let rails = info::choose(&settings)?;
        let kinds = memory_kinds(&rails);
        Ok(Self {
            served: None,
            proxy: None,
            instance: Arc::new(Instance::open(rails, &settings, team, needs)?),
            proxy_threads: settings.config.proxy_threads,
            missing: team.world_ranks.len() as u32,
            kinds,
            preset: PhantomData,
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        MemoryNeeds {
            size: size_of::<MemoryNeeds>(),
            kinds: self.kinds,
            handles: 0,
            alignment: size_of::<u64>() as u64,
        }
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: the window outlives `self`, by this function's contract.
        unsafe { self.instance("register")?.register(window) }
    }

    fn endpoint(&mut self, _: u32) -> Result<Vec<u8>> {
        self.instance("endpoint")?.endpoint()
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        self.instance("connect")?.connect(peer, data)?;
        self.missing = self.missing.saturating_sub(1);
        if self.missing > 0 {
            return Ok(());
        }
        self.instance("connect")?.forget_names();
        if self.proxy_threads > 0 {
            self.proxy = Some(proxied::start(&self.instance, self.proxy_threads)?);
        }
        Ok(())
    }

    /// One thread takes the kernels' commands and posts them on all rails. This saves the hop
    /// through a proxy thread.
    fn serve_ring(&mut self, ring: RingToServe) -> Result<bool> {
        if self.proxy.take().is_none() {
            return Ok(false);
        }
        self.served = Some(proxied::serve(&self.instance, ring)?);
        Ok(true)
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        // SAFETY: by this function's contract.
        unsafe {
            match &self.proxy {
                None => self.instance.post(queue, commands, self.instance.all_rails()),
                Some(proxy) => proxy.post(queue, commands),
            }
        }
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        match &self.proxy {
            None => {
                self.instance.progress(self.instance.all_rails());
                self.instance.take_events(queue, events)
            }
            Some(proxy) => proxy.poll(queue, events),
        }
    }

    // The call is inlined into the slot of the table, also where a plugin's crate makes the table.
    #[inline]
    fn read_signal(&self, _: u32, id: u32) -> u64 {
        self.instance.shared.total(id)
    }

    fn health(&self) -> Result<()> {
        // The failure of a thread is about no peer, so no peer's failure hides it.
        self.proxy.as_ref().map_or(Ok(()), Proxy::health)?;
        self.instance.shared.health()
    }

    fn progress(&self) -> std::result::Result<bool, i32> {
        Ok(self.proxy.is_none() && self.instance.progress(self.instance.all_rails()))
    }

    fn link_name(&self, peer: u32) -> String {
        self.instance.link_name(peer).to_owned()
    }
}

/// Kinds of memory that all rails can register.
fn memory_kinds(rails: &[info::Info]) -> u32 {
    let mut kinds = abi::TY_MEMORY_HOST;
    if rails.iter().all(info::Info::has_hmem) {
        // The provider reports that it accepts device memory, but not of which vendor; the device
        // files of the drivers show that.
        for (device, kind) in
            [("/dev/nvidiactl", abi::TY_MEMORY_CUDA), ("/dev/kfd", abi::TY_MEMORY_HIP)]
        {
            if Path::new(device).exists() {
                kinds |= kind;
            }
        }
    }
    kinds
}
