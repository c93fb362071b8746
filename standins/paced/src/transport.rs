//! `nvlink`'s windows and signals behind queues with a pace.

use std::sync::{Arc, LazyLock, OnceLock};

use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Transport, TransportNeeds, TransportOpen, Window,
};
use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_cuda::{Nvlink, PLATFORM};
use tokenyard_device_put::nested;
use tokenyard_device_put::twins::{Mirror, defines};
use tokenyard_gpu::driver::{Buffer, Context, Device};
use tokenyard_gpu::twin::stand_in;
use tokenyard_gpu::{Devices, PeersConfig};

use crate::config::{COMPONENT, PacedConfig, Poster};
use crate::engine::{Pacer, REQUEST};
use crate::queues::{Bounds, CAPACITY, Queues};

const SOURCE: &str = include_str!("paced.cuh");
/// Queues that may be used: one for each block that posts.
const MOST_QUEUES: u32 = 16;
/// Words of `DeviceApi::Params` behind those of `nvlink`.
const OWN_PARAMS: usize = 3;

/// The transport; see the crate.
#[derive(Debug)]
pub struct Paced {
    /// Set by `commit`. Dropped first: it uses the rest.
    engine: Option<Pacer>,
    /// The value of `DeviceApi::Params`, and the table that it names.
    device_side: OnceLock<(Vec<u64>, Buffer)>,
    queues: Queues,
    part: Part,
    /// Of a loop: this rank's windows in the place of all others'.
    mirror: Option<Mirror>,
    nvlink: Nvlink,
    context: Arc<Context>,
    config: PacedConfig,
    /// Signals of one queue.
    signals: u32,
    me: u32,
    /// The numbers and places that commands of the host may name.
    bounds: Bounds,
    /// Set once.
    failure: OnceLock<Failure>,
}

/// This rank's part in its rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// One of several ranks that are all there.
    Rank,
    /// The rank of a GPU of a twin: what it puts to others arrives in its own windows, as if they had put it.
    Loop,
    /// A rank that a GPU of a twin stands for: it runs no operation, so an engine would take time from that GPU alone.
    Idle,
}

impl Part {
    /// Of the rank at place `me` of a rail of these world ranks, where the twin has so many GPUs.
    fn new(twin: Option<u32>, me: u32, world_ranks: &[u32]) -> Result<Self> {
        let Some(gpus) = twin else { return Ok(Self::Rank) };
        let rank = world_ranks.get(me as usize).copied().unwrap_or(0);
        match (rank < gpus, me) {
            (false, _) => Ok(Self::Idle),
            (true, 0) => Ok(Self::Loop),
            (true, _) => Err(Error::new(
                ErrorKind::Config,
                "open transport",
                format!(
                    "found rank {rank} at place {me} of its rail; expected the first {gpus} ranks in the first domain"
                ),
            )
            .with_context("transport", COMPONENT)
            .with_fix("give domains at least as many ranks as `twin` names GPUs")),
        }
    }
}

/// The source of the first asynchronous error. Each source repeats its own.
#[derive(Debug)]
enum Failure {
    Windows,
    Engine,
    /// A command of the host, and why.
    Refused(Command, String),
}

/// The first error of all sources: it stays (INV-7).
fn first_error(
    failure: &OnceLock<Failure>,
    windows: impl Fn() -> Result<()>,
    engine: impl Fn() -> Result<()>,
) -> Result<()> {
    if failure.get().is_none() {
        if windows().is_err() {
            drop(failure.set(Failure::Windows));
        } else if engine().is_err() {
            drop(failure.set(Failure::Engine));
        }
    }
    match failure.get() {
        None => Ok(()),
        Some(Failure::Windows) => windows(),
        Some(Failure::Engine) => engine(),
        Some(Failure::Refused(command, why)) => {
            Err(Error::new(ErrorKind::Transport, "execute command", why.clone())
                .with_context("transport", COMPONENT)
                .with_context("op", command.op)
                .with_context("peer", command.peer)
                .with_context("tag", command.tag)
                .with_fix("report this to the author of the kernel set, which posts the command"))
        }
    }
}

fn inner_config(config: &PacedConfig) -> PeersConfig {
    PeersConfig { device: config.device.clone(), ..PeersConfig::default() }
}

/// The device API of `nvlink` in a namespace, then that of this transport.
static DEVICE_API: LazyLock<String> =
    LazyLock::new(|| nested::text(&format!("{REQUEST}\n{SOURCE}")));

impl Paced {
    fn engine(&self) -> Result<&Pacer> {
        self.engine.as_ref().ok_or_else(|| {
            let message = "the engine does not run; expected a commit before it";
            Error::new(ErrorKind::Internal, "use the engine", message)
        })
    }

    /// `DeviceApi::Params` of `paced.cuh`, and the table of queues.
    fn params(&self) -> Result<(Vec<u64>, Buffer)> {
        // No kernel of a rank that is idle looks at it.
        let failed = if self.part == Part::Idle { 0 } else { self.engine()?.failed() };
        let table = self.queues.for_kernels(&self.context, failed)?;
        let own: [u64; OWN_PARAMS] = [
            table.address(),
            u64::from(CAPACITY - 1) | u64::from(self.signals) << 32,
            self.me.into(),
        ];
        let params = match &self.mirror {
            Some(mirror) => [mirror.params(), &own].concat(),
            None => nested::params(&self.nvlink, &own)?,
        };
        Ok((params, table))
    }

    /// `nvlink` knows no queues: each has signals of its own there.
    fn below_signal(&self, queue: u32, signal: u32) -> u32 {
        queue * self.signals + signal
    }
}

impl Transport for Paced {
    const NAME: &'static str = COMPONENT;
    const ABOUT: &'static str =
        "a stand-in for a NIC: a kernel beside others moves bytes at a set rate and latency";
    type Config = PacedConfig;

    fn configure(table: &ComponentTable) -> Result<PacedConfig> {
        PacedConfig::read(table)
    }

    fn probe(config: &PacedConfig) -> Result<Capabilities> {
        let found = Nvlink::probe(&inner_config(config))?;
        let by = match config.posts {
            Poster::Kernels => abi::TY_CAP_DEVICE_API,
            Poster::Host => 0,
        };
        Ok(Capabilities {
            // The memory of a lost peer outlives it: only a get shows that its puts arrive.
            flags: by | abi::TY_CAP_BOUNDED_PUT | abi::TY_CAP_GET,
            max_queues: MOST_QUEUES,
            max_queue_depth: CAPACITY,
            max_signals: found.max_signals / MOST_QUEUES,
            ..found
        })
    }

    fn open(config: PacedConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, needs, .. } = *open;
        let inner = inner_config(&config);
        let device = inner.device.as_ref().map(Devices::mine).or(open.device);
        let context = Context::retain(Device::choose(&PLATFORM, device)?)?;
        let below = TransportNeeds { signals: needs.queues * needs.signals, ..*needs };
        Ok(Self {
            engine: None,
            part: Part::new(config.twin, team.me, &team.world_ranks)?,
            mirror: None,
            device_side: OnceLock::new(),
            queues: Queues::new(&context, needs.queues, config.posts == Poster::Host)?,
            nvlink: Nvlink::open(inner, &TransportOpen { needs: &below, ..*open })?,
            config: PacedConfig { seed: config.seed ^ u64::from(team.me) << 32, ..config },
            signals: needs.signals,
            me: team.me,
            bounds: Bounds {
                peers: team.world_ranks.len() as u32,
                signals: needs.signals,
                windows: Vec::new(),
            },
            failure: OnceLock::new(),
            context,
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.nvlink.memory_needs()
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.nvlink.register(window) }?;
        self.bounds.windows.push(window.bytes);
        Ok(())
    }

    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        self.nvlink.endpoint(peer)
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        self.nvlink.connect(peer, data)
    }

    fn commit(&mut self) -> Result<()> {
        self.nvlink.commit()?;
        if self.part == Part::Idle {
            return Ok(());
        }
        let mut windows = self.nvlink.device_api()?;
        if self.part == Part::Loop {
            let sizes = [self.bounds.windows.len() as u32, self.bounds.peers];
            let of_this_rank = |peer| stand_in(1, 0, peer);
            let mirror = Mirror::new(&self.nvlink, &self.context, sizes, of_this_rank)?;
            windows.params = self.mirror.insert(mirror).params().as_ptr().cast();
        }
        // SAFETY: `nvlink`, the queues and the mirror outlive the engine, by the order of the fields.
        let engine = unsafe {
            Pacer::start(&self.context, &windows, &self.queues, &self.config, self.signals)?
        };
        self.engine = Some(engine);
        Ok(())
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        if let Some(own) = self.queues.host.get(queue as usize) {
            self.engine().and_then(Pacer::health).map_err(|_| abi::TY_TRANSPORT)?;
            let check = |command: &Command| match self.bounds.check(command) {
                Ok(()) => true,
                Err(why) => {
                    drop(self.failure.set(Failure::Refused(*command, why)));
                    false
                }
            };
            return Ok(own.post(commands, check, |signal| self.below_signal(queue, signal)));
        }
        // The queues are the kernels': the host's own commands have no pace.
        for (done, command) in commands.iter().enumerate() {
            let signal = self.below_signal(queue, command.signal);
            // SAFETY: by this function's contract.
            let accepted = unsafe { self.nvlink.post(queue, &[Command { signal, ..*command }])? };
            if accepted == 0 {
                return Ok(done);
            }
        }
        Ok(commands.len())
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        match self.queues.host.get(queue as usize) {
            Some(own) => {
                let count = own.poll(events);
                if count == 0 {
                    self.engine().and_then(Pacer::health).map_err(|_| abi::TY_TRANSPORT)?;
                }
                Ok(count)
            }
            None => self.nvlink.poll(queue, events),
        }
    }

    fn read_signal(&self, queue: u32, id: u32) -> u64 {
        self.nvlink.read_signal(queue, self.below_signal(queue, id))
    }

    fn health(&self) -> Result<()> {
        let engine = || self.engine.as_ref().map_or(Ok(()), Pacer::health);
        first_error(&self.failure, || self.nvlink.health(), engine)
    }

    fn device_api(&self) -> Result<abi::TyDeviceApi> {
        let (params, _) = match self.device_side.get() {
            Some(made) => made,
            None => {
                let made = self.params()?;
                self.device_side.get_or_init(|| made)
            }
        };
        let source = Self::device_source()?;
        let twin = if self.part == Part::Rank { None } else { Some(defines(1)) };
        Ok(abi::TyDeviceApi {
            params: params.as_ptr().cast(),
            defines: twin.map_or(source.defines, <[_]>::as_ptr),
            define_count: twin.map_or(source.define_count, <[_]>::len),
            ..source
        })
    }

    fn device_source() -> Result<abi::TyDeviceApi> {
        nested::device_source(&DEVICE_API, OWN_PARAMS)
    }

    fn link_name(&self, peer: u32) -> String {
        let PacedConfig { rate, latency_us, .. } = self.config;
        let below = self.nvlink.link_name(peer);
        let twin = if self.part == Part::Rank { "" } else { ", a loop" };
        let text = format!(
            "paced (a stand-in for a NIC, {rate} GB/s, {latency_us} us{twin}) over {below}"
        );
        match self.engine.as_ref().map(Pacer::lateness) {
            Some(Ok(late)) if late.signals > 0 => format!("{text}; {late}"),
            _ => text,
        }
    }
}

impl Drop for Paced {
    fn drop(&mut self) {
        let found = self.engine.as_ref().map(Pacer::lateness);
        match found {
            Some(Ok(late)) if late.signals > 0 => tracing::info!(
                "paced, a stand-in: {} signals were late by {:.2} us in the mean and {:.2} us at most",
                late.signals,
                late.all_ns as f64 / late.signals as f64 / 1e3,
                late.most_ns as f64 / 1e3
            ),
            Some(Err(error)) => tracing::warn!("the lateness of paced is not known: {error}"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokenyard_core::transport::NO_COMMAND;

    use super::*;

    #[test]
    fn of_a_twin_the_rails_of_the_first_ranks_are_loops_and_other_ranks_are_idle() {
        let part = |twin, me, ranks: &[u32]| Part::new(twin, me, ranks);
        assert_eq!(part(None, 1, &[1, 9]).unwrap(), Part::Rank);
        assert_eq!(part(Some(2), 0, &[1, 9]).unwrap(), Part::Loop);
        assert_eq!(part(Some(2), 1, &[1, 9]).unwrap(), Part::Idle);
        assert_eq!(part(Some(2), 0, &[2, 10]).unwrap(), Part::Idle);
        let text = part(Some(4), 1, &[0, 2]).unwrap_err().to_string();
        assert!(text.contains("found rank 2 at place 1 of its rail"), "{text}");
    }

    #[test]
    fn the_first_error_of_all_sources_stays_and_a_refusal_names_the_transport_and_a_fix() {
        let ended = Cell::new([false; 2]);
        let source = |index: usize| {
            let ended = &ended;
            move || match ended.get()[index] {
                true => Err(Error::new(ErrorKind::Transport, "test", ["windows", "engine"][index])),
                false => Ok(()),
            }
        };
        let health = |failure: &OnceLock<Failure>| first_error(failure, source(0), source(1));
        let failure = OnceLock::new();
        assert!(health(&failure).is_ok());
        failure.set(Failure::Refused(NO_COMMAND, "found op 9".to_owned())).unwrap();
        ended.set([true, true]);
        let error = health(&failure).unwrap_err();
        assert_eq!((error.message(), error.fix().is_some()), ("found op 9", true));
        assert!(error.to_string().contains(COMPONENT), "{error}");

        let failure = OnceLock::new();
        ended.set([false, true]);
        assert_eq!(health(&failure).unwrap_err().message(), "engine");
        ended.set([true, true]);
        assert!(failure.set(Failure::Refused(NO_COMMAND, String::new())).is_err());
        assert_eq!(health(&failure).unwrap_err().message(), "engine");
    }
}
