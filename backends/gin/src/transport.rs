//! The `gin` transport: one NCCL communicator for each team, its windows, and the parameters that kernels get.

mod communicator;
mod device_side;
mod ending;
mod memory;

use std::sync::{Arc, LazyLock, OnceLock};

use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, NO_CAPABILITIES, NO_WINDOW, Team, Transport,
    TransportNeeds, TransportOpen, Window,
};
use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_gpu::driver::{Context, Device};
use tokenyard_sys_nccl::{Nccl, UniqueId};

use crate::config::{COMPONENT, GinConfig, GinType};
use crate::headers::Installed;
use crate::rules;
use communicator::{Communicator, Join};
pub use device_side::DeviceSide;
use device_side::Params;
use memory::OwnedWindow;

/// Bytes that each rank sends to the others: the version of the library, and the id that rank 0 draws.
const CARD_BYTES: usize = 4 + 128;
/// The content of an endpoint. The id has all that a peer needs, so an endpoint adds nothing.
const ENDPOINT: &[u8] = b"gin";
/// NCCL's proxy splits longer puts, which then take more commands than they have credits for.
const LARGEST_PUT: u64 = 1 << 30;
/// A signal's id has 24 bits in NCCL's proxy; the limit of the core is lower.
const SIGNALS: u32 = 65_536;

/// The transport whose kernels put through NCCL.
#[derive(Debug)]
pub struct Gin {
    /// Dropped first: it waits for kernels, which use the rest.
    communicator: Option<Communicator>,
    device_side: OnceLock<DeviceSide>,
    /// The windows that NCCL has not registered yet.
    windows: Vec<OwnedWindow>,
    context: Arc<Context>,
    ordinal: u32,
    nccl: Arc<Nccl>,
    include: String,
    id: UniqueId,
    config: GinConfig,
    team: Team,
    needs: TransportNeeds,
}

impl Transport for Gin {
    const NAME: &'static str = COMPONENT;
    const ABOUT: &'static str =
        "NCCL's GPU-Initiated Networking: kernels put, over any fabric that NCCL has a plugin for";
    type Config = GinConfig;

    fn configure(table: &ComponentTable) -> Result<GinConfig> {
        GinConfig::read(table)
    }

    /// Whether the ranks have GIN is known only once they have a communicator: `commit` reports it.
    fn probe(config: &GinConfig) -> Result<Capabilities> {
        Installed::new(config)?;
        // Any device will do here: `open` says which one a rank drives.
        Device::choose(&tokenyard_cuda::PLATFORM, Some(0))?;
        Ok(Capabilities {
            flags: abi::TY_CAP_DEVICE_API | abi::TY_CAP_BOUNDED_PUT | abi::TY_CAP_OWNS_MEMORY,
            memory_kinds: abi::TY_MEMORY_CUDA,
            max_peers: 1024,
            // Signals belong to a context of NCCL's, and all blocks share one.
            max_queues: 1,
            max_signals: SIGNALS,
            max_queue_depth: config.queue_depth.unwrap_or(256),
            max_windows: abi::TY_MAX_WINDOWS as u32,
            largest_put: LARGEST_PUT,
            ..NO_CAPABILITIES
        })
    }

    fn open(config: GinConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, needs, device, exchange } = *open;
        let ordinal = device.ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "open",
                "found kernels on the host; expected a GPU's",
            )
            .with_fix("set use = \"cuda\" in [kernels]")
        })?;
        let Installed { nccl, include } = Installed::new(&config)?;
        let context = Context::retain(Device::choose(&tokenyard_cuda::PLATFORM, device)?)?;
        let mine = card(&nccl, team.me, &context)?;
        let id = id_of(&exchange.all_gather(&mine)?, team)?;
        Ok(Self {
            device_side: OnceLock::new(),
            communicator: None,
            windows: Vec::new(),
            context,
            ordinal,
            nccl: Arc::new(nccl),
            include: include.display().to_string(),
            id,
            config,
            team: team.clone(),
            needs: *needs,
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        MemoryNeeds {
            size: size_of::<MemoryNeeds>(),
            kinds: abi::TY_MEMORY_CUDA,
            handles: 0,
            alignment: memory::GRANULARITY,
        }
    }

    fn alloc(&mut self, id: u32, bytes: u64) -> Result<Window> {
        let window = OwnedWindow::new(&self.nccl, &self.context, bytes)?;
        let described = Window {
            id,
            kind: abi::TY_MEMORY_CUDA,
            pointer: window.pointer(),
            bytes: window.bytes() as u64,
            device: self.ordinal as i32,
            ..NO_WINDOW
        };
        self.windows.push(window);
        Ok(described)
    }

    /// NCCL registers windows in [`commit`](Self::commit), once there is a communicator.
    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        let owned = self.windows.get(window.id as usize);
        if owned.is_some_and(|owned| owned.pointer() == window.pointer) {
            return Ok(());
        }
        let message =
            format!("found window {} of other memory; expected that of `alloc`", window.id);
        Err(Error::new(ErrorKind::Internal, "register", message))
    }

    fn endpoint(&mut self, _: u32) -> Result<Vec<u8>> {
        Ok(ENDPOINT.to_vec())
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        if data == ENDPOINT {
            return Ok(());
        }
        let message = format!("found {} bytes; expected the endpoint of gin", data.len());
        let error = Error::new(ErrorKind::Protocol, "connect", message);
        Err(match self.team.world_ranks.get(peer as usize) {
            Some(rank) => error.with_rank(*rank),
            None => error,
        })
    }

    fn commit(&mut self) -> Result<()> {
        let join = Join {
            nccl: &self.nccl,
            context: &self.context,
            id: self.id,
            team: &self.team,
            deadline: self.needs.deadline,
        };
        let communicator = self.communicator.insert(Communicator::join(&join)?);
        let found = rules::choose(&communicator.properties()?, self.config.gin_type)?;
        for window in self.windows.drain(..) {
            communicator.register(window)?;
        }
        let depth = rules::depth(&self.config, found);
        communicator.create_device_side(&self.needs, found, depth)?;
        Ok(())
    }

    /// The host posts nothing: only kernels post through GIN.
    unsafe fn post(&self, _: u32, _: &[Command]) -> std::result::Result<usize, i32> {
        Err(abi::TY_UNSUPPORTED)
    }

    fn poll(&self, _: u32, _: &mut [Event]) -> std::result::Result<usize, i32> {
        Err(abi::TY_UNSUPPORTED)
    }

    /// Only kernels read signals, because only NCCL's device code knows where the signals are.
    fn read_signal(&self, _: u32, _: u32) -> u64 {
        0
    }

    fn health(&self) -> Result<()> {
        self.communicator.as_ref().map_or(Ok(()), Communicator::health)
    }

    fn device_api(&self) -> Result<abi::TyDeviceApi> {
        let device_side = match self.device_side.get() {
            Some(device_side) => device_side,
            None => {
                let made = self.make_device_side()?;
                self.device_side.get_or_init(|| made)
            }
        };
        Ok(device_side.device_api())
    }

    /// Uses the library and the headers that are found without a config, for `type = "auto"`.
    fn device_source() -> Result<abi::TyDeviceApi> {
        static FOUND: LazyLock<std::result::Result<DeviceSide, String>> = LazyLock::new(|| {
            let found = Installed::new(&GinConfig::default()).map_err(|e| e.to_string())?;
            let include = found.include.display().to_string();
            Ok(DeviceSide::source_only(include, GinType::Auto))
        });
        match &*FOUND {
            Ok(found) => Ok(found.device_api()),
            Err(text) => Err(Error::new(ErrorKind::Unavailable, "device_source", text.clone())),
        }
    }

    fn link_name(&self, peer: u32) -> String {
        let rank = self.team.world_ranks.get(peer as usize);
        format!(
            "NCCL {} GIN ({}) to rank {}",
            self.nccl.version_text(),
            self.communicator
                .as_ref()
                .and_then(Communicator::gin_type)
                .map_or("not joined", GinType::name),
            rank.map_or("?".to_owned(), u32::to_string)
        )
    }
}

impl Gin {
    fn make_device_side(&self) -> Result<DeviceSide> {
        let parts = self.communicator.as_ref().and_then(Communicator::device_parts);
        let (found, parts) = parts.ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                "device_api",
                "found no device communicator; expected `commit` before",
            )
        })?;
        let peers = self.team.world_ranks.len() as u32;
        let limit = rules::credits(rules::depth(&self.config, found));
        let params = Params::new(&self.context, &parts, [limit, self.team.me, peers])?;
        Ok(DeviceSide::new(self.include.clone(), self.config.gin_type, params))
    }
}

/// The bytes that this rank sends to the others. Rank 0 draws the id, and NCCL waits for all ranks behind that id.
fn card(nccl: &Nccl, me: u32, context: &Context) -> Result<Vec<u8>> {
    let mut card = nccl.version().to_ne_bytes().to_vec();
    card.resize(CARD_BYTES, 0);
    if me == 0 {
        let _entered = context.enter()?;
        let mut id = UniqueId { internal: [0; 128] };
        // SAFETY: room for an id.
        let status = unsafe { (nccl.get_unique_id)(&mut id) };
        communicator::check(nccl, std::ptr::null_mut(), "ncclGetUniqueId", status)?;
        for (to, from) in card[4..].iter_mut().zip(id.internal) {
            *to = from.cast_unsigned();
        }
    }
    Ok(card)
}

/// The id of rank 0, if all ranks have the same library.
fn id_of(cards: &[Vec<u8>], team: &Team) -> Result<UniqueId> {
    let version = |card: &Vec<u8>| card.get(..4).map(<[u8]>::to_vec);
    let first = cards.first().filter(|card| card.len() == CARD_BYTES).ok_or_else(|| {
        Error::new(ErrorKind::Protocol, "open", "found no id of rank 0 of the team; expected one")
    })?;
    if let Some(peer) = cards.iter().position(|card| version(card) != version(first)) {
        let text = |card: &Vec<u8>| {
            let code =
                card.get(..4).and_then(|bytes| bytes.try_into().ok()).map_or(0, i32::from_ne_bytes);
            crate::headers::version_text(code)
        };
        let rank = |peer: usize| team.world_ranks.get(peer).copied().unwrap_or(0);
        let message = format!(
            "found NCCL {} on rank {}, and {} on rank {}; expected the same version on all ranks",
            text(&cards[peer]),
            rank(peer),
            text(first),
            rank(0)
        );
        return Err(Error::new(ErrorKind::Mismatch, "open", message)
            .with_rank(rank(peer))
            .with_fix("install the same NCCL on all nodes, or name it by `nccl_library`"));
    }
    let mut id = UniqueId { internal: [0; 128] };
    for (to, from) in id.internal.iter_mut().zip(&first[4..]) {
        *to = from.cast_signed();
    }
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card_of(version: i32, id: u8) -> Vec<u8> {
        version.to_ne_bytes().into_iter().chain([id; 128]).collect()
    }

    #[test]
    fn all_ranks_join_by_the_id_of_the_first() {
        let cards = [card_of(23_203, 200), card_of(23_203, 0)];
        let id = id_of(&cards, &Team::world(1, 2)).unwrap();
        assert!(id.internal.iter().all(|byte| byte.cast_unsigned() == 200));
    }

    #[test]
    fn ranks_with_another_nccl_are_named_with_both_versions() {
        let cards = [card_of(23_203, 1), card_of(23_203, 0), card_of(23_102, 0)];
        let error = id_of(&cards, &Team::new(0, vec![4, 8, 12])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = error.to_string();
        assert!(text.contains("NCCL 2.31.2 on rank 12, and 2.32.3 on rank 4"), "{text}");
        assert_eq!(id_of(&[], &Team::world(0, 1)).unwrap_err().kind(), ErrorKind::Protocol);
    }
}
