//! Compiles kernels ahead of a job, over any transport's device API, and without one.

use std::path::PathBuf;

use tokenyard_core::{Result, abi};

use crate::compile::{self, Architecture, Compiled, DeviceApiSource, Program, Role, Rows, Target};
use crate::config::GpuConfig;
use crate::driver::Device;
use crate::kernels::{DeviceApi, gpu_ring_api};
use crate::ops::TABLE;
use crate::platform::{Dialect, Platform};
use crate::probe::{NIC_PROBE, PROBE, RING_PROBE};
use crate::resident::Body;
use crate::transport::peers_device_api;

/// The device API that kernels are compiled over: that of a transport, or the GPU ring where it has
/// none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Over {
    name: String,
    api: Api,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Api {
    Ring,
    Peers,
    /// The device API of a transport.
    Given(DeviceApi),
}

impl Over {
    /// The device API that a transport gives without an instance
    /// ([`device_source`](tokenyard_core::host::TransportRef::device_source)); it may be absent.
    ///
    /// # Errors
    /// `Unsupported`, with the reason why the kernels cannot be compiled over it.
    ///
    /// # Safety
    /// Each pointer of `given` is null, or valid for as many elements as it says.
    pub unsafe fn transport(
        dialect: &Dialect,
        name: &str,
        given: Option<&abi::TyDeviceApi>,
    ) -> Result<Self> {
        let Some(given) = given else { return Ok(Self::gpu_ring()) };
        // SAFETY: by this function's contract.
        let api = unsafe { DeviceApi::without_params(dialect, given)? };
        Ok(Self { name: name.to_owned(), api: Api::Given(api) })
    }

    /// The GPU ring, over which any transport is used through the host.
    pub fn gpu_ring() -> Self {
        Self { name: "gpu ring".to_owned(), api: Api::Ring }
    }

    /// The transport between the GPUs of one machine, under its name on a platform.
    pub fn peers(name: &str) -> Self {
        Self { name: name.to_owned(), api: Api::Peers }
    }

    /// The transport's name, or `gpu ring`.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn source(&self) -> DeviceApiSource<'_> {
        match &self.api {
            Api::Ring => gpu_ring_api(),
            Api::Peers => peers_device_api(),
            Api::Given(api) => api.source(),
        }
    }
}

/// Kernels that a later start finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warmed {
    /// The name that the compiler gives it, such as `sm_90a`.
    pub architecture: String,
    /// The name of the device API that they are compiled over.
    pub over: String,
    /// The rows that they move.
    pub role: Role,
    /// How rows move.
    pub rows: Rows,
    /// Whether they were compiled now, and not in the cache before.
    pub compiled: bool,
    /// The folder that holds them.
    pub folder: PathBuf,
}

/// The statements of a config about the world of its communicators.
#[derive(Clone, Copy, Debug, Default)]
pub struct World {
    /// The number of domains, where it is set.
    pub domains: Option<u32>,
    /// Operations go on without ranks that are lost.
    pub masks: bool,
}

/// The programs that a communicator of these transports may run: inside a domain, and between domains, in
/// the order of choice.
pub fn programs(up: Option<&Over>, out: &[Over], world: World) -> Vec<(Over, Role)> {
    let World { domains, masks } = world;
    let whole = if masks { Role::Masked } else { Role::Direct };
    let mut all = Vec::new();
    if let Some(up) = up {
        // Both a world that turns out to be one domain, and one that does not.
        if domains.is_none_or(|domains| domains == 1) || out.is_empty() {
            all.push((up.clone(), whole));
        }
        if domains != Some(1) && !out.is_empty() {
            all.push((up.clone(), Role::IntraDomain));
        }
    }
    if up.is_none() || domains != Some(1) {
        // Rows are sent without a request, and ranks masked, where kernels store: with one level, which this may be.
        let alone = |over: &Over| up.is_none() && !over.source().puts;
        // A world of one level, or a rail.
        let role = |over: &Over| match up {
            Some(_) => Role::InterDomain,
            None if alone(over) => whole,
            None => Role::Direct,
        };
        all.extend(out.iter().map(|over| (over.clone(), role(over))));
    }
    let mut once = Vec::new();
    all.into_iter().for_each(|program| {
        if !once.contains(&program) {
            once.push(program)
        }
    });
    once
}

/// Compiles programs into the cache, unless the cache has them: for the GPU that this process would
/// drive, or for an architecture, which needs no GPU.
///
/// # Errors
/// No compiler, no GPU, an error of the compiler, a cache that cannot be used.
pub fn warm(
    platform: &'static Platform,
    config: &GpuConfig,
    architecture: Option<Architecture>,
    programs: &[(Over, Role)],
) -> Result<Vec<Warmed>> {
    config.check(&platform.names)?;
    let architecture = match architecture {
        Some(architecture) => architecture,
        None => {
            platform.driver.load(config.libraries.as_deref())?;
            Device::choose(platform, config.ordinal())?.facts()?.architecture
        }
    };
    let folder = compile::folder(platform, config)?;
    let warm = |(over, role): &(Over, Role)| {
        let source = over.source();
        let (_, compiled) = compile::kernels(platform, config, architecture, source, *role)?;
        Ok(Warmed {
            architecture: architecture.name(),
            over: over.name.clone(),
            role: *role,
            rows: compile::rows_of(config, architecture, source.by_host)?,
            compiled,
            folder: folder.clone(),
        })
    };
    let warmed = programs.iter().map(warm).collect::<Result<_>>()?;
    // A table between GPUs of one machine has kernels of its own.
    if programs.iter().any(|(over, _)| over.api == Api::Peers) {
        compile::beside(platform, config, architecture, &TABLE)?;
    }
    Ok(warmed)
}

/// Compiles the kernels over a device API, without a GPU and without the cache: for tests, and for callers
/// that want to know registers and spills.
///
/// # Errors
/// No compiler, or its error.
pub fn compile(target: Target<'_>, over: &Over, role: Role) -> Result<Compiled> {
    Program::new(target, over.source(), role).compile(target.compiler)
}

/// Compiles the kernels that measure a link between the GPUs of one machine, as [`compile()`] does.
///
/// # Errors
/// No compiler, or its error.
pub fn compile_probe(target: Target<'_>) -> Result<Compiled> {
    Program::probe(target, peers_device_api(), &PROBE).compile(target.compiler)
}

/// Compiles the kernels that measure the ring of the host, to show their use of resources.
///
/// # Errors
/// No compiler, or its error.
pub fn compile_ring_probe(target: Target<'_>) -> Result<Compiled> {
    Program::probe(target, gpu_ring_api(), &RING_PROBE).compile(target.compiler)
}

/// Compiles the kernels that put in a loop, over a transport's device API, to show their use of resources.
///
/// # Errors
/// No compiler, or its error.
pub fn compile_nic_probe(target: Target<'_>, over: &Over) -> Result<Compiled> {
    Program::probe(target, over.source(), &NIC_PROBE).compile(target.compiler)
}

/// Compiles the kernels of a table, to show their use of resources.
///
/// # Errors
/// No compiler, or its error.
pub fn compile_table(target: Target<'_>) -> Result<Compiled> {
    Program::beside(target, &TABLE).compile(target.compiler)
}

/// Compiles a kernel that stays, over loads and stores, to show its use of resources.
///
/// # Errors
/// No compiler, or its error.
pub fn compile_resident(target: Target<'_>, body: &Body, args_bytes: usize) -> Result<Compiled> {
    Program::probe(target, peers_device_api(), &body.source(args_bytes)).compile(target.compiler)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::tests::DIALECT;

    const SOURCE: &str = "struct DeviceApi { /* a vendor's own */ };";
    const DEFINE: &str = "VENDOR_QUEUES=4";

    fn given() -> abi::TyDeviceApi {
        static DEFINES: [Text; 1] =
            [Text(abi::TyStr { data: DEFINE.as_ptr(), bytes: DEFINE.len() })];
        abi::TyDeviceApi {
            size: size_of::<abi::TyDeviceApi>(),
            version: abi::TY_DEVICE_API_VERSION,
            dialect: abi::TY_DIALECT_CUDA,
            compiler: abi::TY_COMPILER_NVRTC,
            flags: abi::TY_DEVICE_API_LOAD_STORE,
            source: abi::TyStr { data: SOURCE.as_ptr(), bytes: SOURCE.len() },
            include_folders: std::ptr::null(),
            include_folder_count: 0,
            defines: (&raw const DEFINES).cast(),
            define_count: 1,
            params: std::ptr::null(),
            param_bytes: 24,
            param_alignment: 8,
        }
    }

    #[repr(transparent)]
    struct Text(abi::TyStr);
    // SAFETY: it points to a constant.
    unsafe impl Sync for Text {}

    fn vendor(name: &str) -> Over {
        // SAFETY: every pointer is null or points to a constant of its length.
        unsafe { Over::transport(&DIALECT, name, Some(&given())) }.unwrap()
    }

    #[test]
    fn a_transport_of_any_name_is_compiled_over_its_own_device_api() {
        let source = vendor("strangers-nic");
        let source = source.source();
        assert_eq!((source.text, source.param_bytes, source.puts), (SOURCE, 24, false));
        assert_eq!(source.defines, [DEFINE]);
        // SAFETY: as above.
        let ring = unsafe { Over::transport(&DIALECT, "libfabric", None) }.unwrap();
        assert_eq!((ring.name(), ring.source().puts), ("gpu ring", true));
    }

    #[test]
    fn what_warms_and_what_runs_name_the_same_program() {
        let bytes = [0_u8; 24];
        let opened = abi::TyDeviceApi { params: bytes.as_ptr(), ..given() };
        // SAFETY: as above; the parameters live until the end of the test.
        let opened = unsafe { DeviceApi::read(&DIALECT, &opened) }.unwrap();
        let warmed = vendor("strangers-nic");
        let [ran, warmed] = [opened.source(), warmed.source()];
        assert_eq!((ran.text, ran.defines), (warmed.text, warmed.defines));
        assert_eq!((ran.param_bytes, ran.puts), (warmed.param_bytes, warmed.puts));
    }

    #[test]
    fn a_config_names_every_program_that_its_communicators_may_run() {
        use Role::*;
        let (peers, ring) = (vendor("nvlink"), Over::gpu_ring());
        let named = |up: Option<&Over>, out: &[Over], domains| {
            let all = programs(up, out, World { domains, masks: false }).into_iter();
            all.map(|(over, role)| (over.name, role)).collect::<Vec<_>>()
        };
        let p = |name: &str, role| (name.to_owned(), role);
        assert_eq!(named(Some(&peers), &[], None), [p("nvlink", Direct)]);
        assert_eq!(named(None, std::slice::from_ref(&ring), None), [p("gpu ring", Direct)]);
        let both = named(Some(&peers), std::slice::from_ref(&ring), Some(2));
        assert_eq!(both, [p("nvlink", IntraDomain), p("gpu ring", InterDomain)]);
        let any = named(Some(&peers), &[ring.clone(), ring.clone()], None);
        let inside = [p("nvlink", Direct), p("nvlink", IntraDomain)];
        assert_eq!(any, [&inside[..], &[p("gpu ring", InterDomain)]].concat());
        assert_eq!(
            named(Some(&peers), std::slice::from_ref(&ring), Some(1)),
            [p("nvlink", Direct)]
        );
        let same = named(Some(&peers), std::slice::from_ref(&peers), Some(2));
        assert_eq!(same, [p("nvlink", IntraDomain), p("nvlink", InterDomain)]);
    }

    #[test]
    fn a_config_with_masks_names_the_program_that_has_them() {
        let (peers, ring) = (vendor("nvlink"), Over::gpu_ring());
        let masks = World { domains: None, masks: true };
        assert_eq!(programs(Some(&peers), &[], masks), [(peers.clone(), Role::Masked)]);
        assert_eq!(programs(None, std::slice::from_ref(&peers), masks), [(peers, Role::Masked)]);
        assert_eq!(programs(None, std::slice::from_ref(&ring), masks), [(ring, Role::Direct)]);
    }
}
