//! `nvlink`'s windows and signals behind queues with a pace.

use std::sync::{Arc, LazyLock, OnceLock};

use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Transport, TransportNeeds, TransportOpen, Window,
};
use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_cuda::{Nvlink, PLATFORM};
use tokenyard_device_put::nested;
use tokenyard_gpu::driver::{Buffer, Context, Device};
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
        let table = self.queues.for_kernels(&self.context, self.engine()?.failed())?;
        let own: [u64; OWN_PARAMS] = [
            table.address(),
            u64::from(CAPACITY - 1) | u64::from(self.signals) << 32,
            self.me.into(),
        ];
        Ok((nested::params(&self.nvlink, &own)?, table))
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
        let windows = self.nvlink.device_api()?;
        // SAFETY: `nvlink` and the queues outlive the engine, by the order of the fields.
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
        Ok(abi::TyDeviceApi { params: params.as_ptr().cast(), ..Self::device_source()? })
    }

    fn device_source() -> Result<abi::TyDeviceApi> {
        nested::device_source(&DEVICE_API, OWN_PARAMS)
    }

    fn link_name(&self, peer: u32) -> String {
        let PacedConfig { rate, latency_us, .. } = self.config;
        let below = self.nvlink.link_name(peer);
        let text =
            format!("paced (a stand-in for a NIC, {rate} GB/s, {latency_us} us) over {below}");
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
