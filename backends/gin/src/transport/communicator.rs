//! A communicator of NCCL: how the ranks join it, its properties and its health.

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokenyard_core::transport::{Team, TransportNeeds};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_gpu::driver::Context;
use tokenyard_sys_nccl::{CommProperties, Config, DevCommRequirements, Nccl, UniqueId, consts};

use super::ending::{self, Held};
use super::memory::OwnedWindow;
use crate::config::GinType;

/// The time between two looks at a call that continues in the background.
const LOOK: Duration = Duration::from_millis(1);

/// The arguments with which a rank joins.
#[derive(Debug)]
pub(super) struct Join<'a> {
    pub(super) nccl: &'a Arc<Nccl>,
    pub(super) context: &'a Arc<Context>,
    pub(super) id: UniqueId,
    pub(super) team: &'a Team,
    pub(super) deadline: Duration,
}

/// The parts of a communicator that kernels need.
#[derive(Debug)]
pub(super) struct DeviceParts {
    /// An `ncclDevComm` of the library's version.
    pub(super) comm: Vec<u64>,
    /// `ncclWindow_t` by id.
    pub(super) windows: Vec<u64>,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Communicator {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    deadline: Duration,
    /// None once the communicator has ended. Behind a lock, because any thread may ask for its health.
    held: Mutex<Option<Held>>,
    gin_type: Option<GinType>,
    failure: OnceLock<String>,
}

/// NCCL's words for a status.
fn words(nccl: &Nccl, comm: *mut c_void, status: u32) -> String {
    // SAFETY: both calls give texts of NCCL's own, for any status, and for a communicator or null.
    let [what, last] = unsafe { [(nccl.get_error_string)(status), (nccl.get_last_error)(comm)] }
        .map(|text| {
            if text.is_null() {
                return String::new();
            }
            // SAFETY: as above.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        });
    if last.is_empty() { what } else { format!("{what}; last error: {last}") }
}

/// Turns a status into an error that names the call.
pub(super) fn check(nccl: &Nccl, comm: *mut c_void, call: &'static str, status: u32) -> Result<()> {
    if status == consts::SUCCESS {
        return Ok(());
    }
    let message = format!("found status {status} ({}); expected 0", words(nccl, comm, status));
    Err(Error::new(ErrorKind::System, call, message)
        .with_fix("see NCCL's own log: NCCL_DEBUG=INFO"))
}

impl Communicator {
    /// Joins the team's communicator. Collective; ends within the deadline.
    pub(super) fn join(join: &Join<'_>) -> Result<Self> {
        let Join { nccl, context, id, team, deadline } = *join;
        let this = Self {
            nccl: Arc::clone(nccl),
            context: Arc::clone(context),
            deadline,
            held: Mutex::new(None),
            gin_type: None,
            failure: OnceLock::new(),
        };
        let _entered = context.enter()?;
        // Blocking calls have no deadline.
        let mut config = Config { blocking: 0, ..Config::default() };
        let mut comm = std::ptr::null_mut();
        let (ranks, me) = (team.world_ranks.len() as i32, team.me as i32);
        // SAFETY: the config is NCCL's, of the oldest version that is taken; a place for the result.
        let status = unsafe { (nccl.comm_init_rank_config)(&mut comm, ranks, id, me, &mut config) };
        if !comm.is_null() {
            *this.held() = Some(Held::new(nccl, context, comm));
        }
        this.settle("ncclCommInitRankConfig", status)?;
        if comm.is_null() {
            let message = "found no communicator, though NCCL says success; expected one";
            return Err(Error::new(ErrorKind::System, "ncclCommInitRankConfig", message));
        }
        Ok(this)
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn comm(&self) -> *mut c_void {
        self.held().as_ref().map_or(std::ptr::null_mut(), |held| held.comm)
    }

    /// Waits until a call that returned at once has ended. It waits after success, too: some calls return success
    /// before they have ended.
    fn settle(&self, call: &'static str, status: u32) -> Result<()> {
        let comm = self.comm();
        if comm.is_null() || ![consts::SUCCESS, consts::IN_PROGRESS].contains(&status) {
            return check(&self.nccl, comm, call, status);
        }
        let until = Instant::now() + self.deadline;
        loop {
            let mut state = consts::IN_PROGRESS;
            // SAFETY: a communicator that lives, and a place for the result.
            let asked = unsafe { (self.nccl.comm_get_async_error)(comm, &mut state) };
            check(&self.nccl, comm, "ncclCommGetAsyncError", asked)?;
            match state {
                consts::IN_PROGRESS if Instant::now() > until => {
                    let message = format!(
                        "{call} has not ended in {:?}: a rank of the team has not come, or NCCL cannot reach it",
                        self.deadline
                    );
                    return Err(Error::new(ErrorKind::Deadline, "commit", message).with_fix(
                        "see which ranks are there (NCCL_DEBUG=INFO), and NCCL_SOCKET_IFNAME",
                    ));
                }
                consts::IN_PROGRESS => std::thread::sleep(LOOK),
                state => return check(&self.nccl, comm, call, state),
            }
        }
    }

    /// The properties of the communicator.
    pub(super) fn properties(&self) -> Result<CommProperties> {
        let _entered = self.context.enter()?;
        let (mut properties, comm) = (CommProperties::default(), self.comm());
        // SAFETY: a communicator that lives; the structure is NCCL's, of the oldest version that is taken.
        let status = unsafe { (self.nccl.comm_query_properties)(comm, &mut properties) };
        self.settle("ncclCommQueryProperties", status)?;
        Ok(properties)
    }

    /// Registers a window. Collective, in order of ids.
    pub(super) fn register(&self, window: OwnedWindow) -> Result<()> {
        let _entered = self.context.enter()?;
        let (comm, at, bytes) = (self.comm(), window.pointer().cast(), window.bytes());
        // Stored before the call: NCCL may still register the memory after the wait has failed.
        if let Some(held) = self.held().as_mut() {
            held.memory.push(window);
        }
        // NCCL may write the result after the call has returned.
        let mut registered = Box::new(std::ptr::null_mut());
        let flags = consts::WIN_COLL_SYMMETRIC;
        // SAFETY: memory that `held` frees behind the communicator; a place for the result.
        let status =
            unsafe { (self.nccl.comm_window_register)(comm, at, bytes, &mut *registered, flags) };
        if let Err(error) = self.settle("ncclCommWindowRegister", status) {
            // NCCL may still write the result.
            Box::leak(registered);
            return Err(error);
        }
        // Where NCCL cannot register, it returns success and no window.
        if registered.is_null() {
            let message = "found no window, though NCCL says success; expected one";
            return Err(Error::new(ErrorKind::Unavailable, "ncclCommWindowRegister", message)
                .with_fix(
                    "set neither NCCL_CUMEM_ENABLE=0 nor NCCL_WIN_ENABLE=0; see NCCL_DEBUG=INFO",
                ));
        }
        if let Some(held) = self.held().as_mut() {
            held.windows.push(*registered);
        }
        Ok(())
    }

    /// Makes the device communicator: one context of `found`, with as many signals as are needed. Collective.
    pub(super) fn create_device_side(
        &mut self,
        needs: &TransportNeeds,
        found: GinType,
        depth: u32,
    ) -> Result<()> {
        let bytes = self.properties()?.dev_comm_runtime_version_size;
        let _entered = self.context.enter()?;
        let requirements = DevCommRequirements {
            gin_context_count: 1,
            gin_signal_count: needs.signals as i32,
            gin_connection_type: consts::GIN_CONNECTION_FULL,
            gin_exclusive_contexts: true,
            gin_queue_depth: if found == GinType::Proxy { 0 } else { depth as i32 },
            gin_strong_signals_required: false,
            gin_va_signals_required: false,
            gin_type: found.code(),
            use_runtime_version: true,
            ..DevCommRequirements::default()
        };
        let comm = self.comm();
        // NCCL may write the result after the call has returned.
        let mut made = vec![0_u64; bytes.div_ceil(8)];
        // SAFETY: a communicator that lives; room for as many bytes as it says.
        let status =
            unsafe { (self.nccl.dev_comm_create)(comm, &requirements, made.as_mut_ptr().cast()) };
        if let Err(error) = self.settle("ncclDevCommCreate", status) {
            // NCCL may still write the result.
            made.leak();
            return Err(error);
        }
        if let Some(held) = self.held().as_mut() {
            held.dev_comm = Some(made);
        }
        self.gin_type = Some(found);
        tracing::debug!(
            "NCCL {}: GIN by {}, {} signals",
            self.nccl.version_text(),
            found.name(),
            needs.signals
        );
        Ok(())
    }

    /// The type by which kernels post, once there is a device communicator.
    pub(super) fn gin_type(&self) -> Option<GinType> {
        self.gin_type
    }

    /// The type by which kernels post, and the parts that they need.
    pub(super) fn device_parts(&self) -> Option<(GinType, DeviceParts)> {
        let held = self.held();
        let held = held.as_ref()?;
        let comm = held.dev_comm.clone()?;
        let windows = held.windows.iter().map(|window| *window as u64).collect();
        Some((self.gin_type?, DeviceParts { comm, windows }))
    }

    /// The first error of NCCL's threads and of its contexts (INV-7).
    pub(super) fn health(&self) -> Result<()> {
        if self.failure.get().is_none() {
            let comm = self.comm();
            let mut state = consts::SUCCESS;
            if !comm.is_null() && self.gin_type.is_some() {
                // SAFETY: a communicator that lives, and a place for the result.
                let asked = unsafe { (self.nccl.comm_get_async_error)(comm, &mut state) };
                state = if asked == consts::SUCCESS { state } else { asked };
            }
            if ![consts::SUCCESS, consts::IN_PROGRESS].contains(&state) {
                let text = words(&self.nccl, comm, state);
                let _ = self.failure.set(format!("NCCL has failed with status {state} ({text})"));
            }
        }
        match self.failure.get() {
            None => Ok(()),
            Some(text) => Err(Error::new(ErrorKind::Transport, "health", text.clone())
                .with_fix("see NCCL's own log (NCCL_DEBUG=INFO), and the NIC's counters")),
        }
    }
}

impl Drop for Communicator {
    /// NCCL's calls that end a communicator wait for peers, and have hung: see [`ending`].
    fn drop(&mut self) {
        let is_well = self.gin_type.is_some() && self.health().is_ok();
        if let Some(held) = self.held().take() {
            ending::end(held, is_well, self.deadline);
        }
    }
}
