//! Lists libfabric's providers and interfaces, and chooses the rails.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokenyard_core::nics::{ListedNic, NicSearch, Nics};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_fabric::Library;
use tokenyard_sys_fabric::consts::*;
use tokenyard_sys_fabric::types::{FI_BUS_PCI, fi_info};

use super::{Settings, interfaces, numa};
use crate::config::{Flush, MAX_RAILS, Rails};

/// Providers that drive no NIC of their own: their interfaces share one network stack, so the
/// operator must ask for more than one rail.
const WITHOUT_NIC: [&str; 5] = ["tcp", "udp", "shm", "net", "sockets"];

/// Providers whose domains have the names of NICs in `/sys/class/infiniband`. Others (`psm3`,
/// `ucx`, `cxi` and future ones) may use other names, so a NIC that they do not list may be there.
const NAMED_AS_NICS: [&str; 2] = ["verbs", "efa"];

/// How long an interface that is up may take to get an address.
const ADDRESS_WAIT: Duration = Duration::from_secs(2);

/// The most packets that `ofi_rxd` may have under way without an answer. With its own 128, a socket's buffer
/// overflows; libfabric 1.17 then stops for good in every sixth test of 65,536 signals, with 1,024 in each.
const MOST_UNACKED: u32 = 64;

/// The modes of memory registration that this backend supports.
const MR_MODE: i32 =
    FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT | FI_MR_HMEM;

const PACKAGE: &str = "install libfabric 1.17 or later (Debian, Ubuntu: apt-get install libfabric1; \
     on AWS the EFA installer brings its own), and put it where the dynamic loader looks";

/// One interface of a provider: a copy of its `fi_info`.
#[derive(Debug)]
pub(super) struct Info {
    library: &'static Library,
    raw: NonNull<fi_info>,
}

// SAFETY: a plain structure that no other code holds.
unsafe impl Send for Info {}
// SAFETY: shared access only reads it, see `Info::raw`.
unsafe impl Sync for Info {}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: made by `dupinfo`, freed once.
        unsafe { self.library.freeinfo(self.raw.as_ptr()) }
    }
}

impl Info {
    pub(super) fn library(&self) -> &'static Library {
        self.library
    }

    /// The pointer, for calls that open objects; they do not change the structure.
    pub(super) fn raw(&self) -> *mut fi_info {
        self.raw.as_ptr()
    }

    fn get(&self) -> &fi_info {
        // SAFETY: valid while `self` lives; no code writes it.
        unsafe { self.raw.as_ref() }
    }

    /// The provider with its layers, for example `tcp;ofi_rxm`.
    pub(super) fn provider(&self) -> String {
        // SAFETY: libfabric fills all attribute structures of what it returns.
        text(unsafe { (*self.get().fabric_attr).prov_name })
    }

    /// The interface.
    pub(super) fn domain(&self) -> String {
        // SAFETY: as in `provider`.
        text(unsafe { (*self.get().domain_attr).name })
    }

    fn fabric(&self) -> String {
        // SAFETY: as in `provider`.
        text(unsafe { (*self.get().fabric_attr).name })
    }

    /// Whether the provider is a layer over another one's connections.
    pub(super) fn is_layered(&self) -> bool {
        self.provider().contains(';')
    }

    /// Whether that layer is `ofi_rxm`.
    pub(super) fn is_over_connections(&self) -> bool {
        self.provider().contains("ofi_rxm")
    }

    pub(super) fn mr_mode(&self) -> i32 {
        // SAFETY: as in `provider`.
        unsafe { (*self.get().domain_attr).mr_mode }
    }

    /// Bytes of a registration key.
    pub(super) fn key_bytes(&self) -> usize {
        // SAFETY: as in `provider`.
        unsafe { (*self.get().domain_attr).mr_key_size }
    }

    pub(super) fn inject_bytes(&self) -> usize {
        // SAFETY: as in `provider`.
        unsafe { (*self.get().tx_attr).inject_size }
    }

    /// The largest write, in bytes, with one completion at the target.
    pub(super) fn largest_put(&self) -> u64 {
        // SAFETY: as in `provider`.
        unsafe { (*self.get().ep_attr).max_msg_size as u64 }
    }

    fn cq_data_bytes(&self) -> usize {
        // SAFETY: as in `provider`.
        unsafe { (*self.get().domain_attr).cq_data_size }
    }

    /// Whether addresses are text, of any length, that ends with a zero byte.
    pub(super) fn has_text_addresses(&self) -> bool {
        self.get().addr_format == FI_ADDR_STR
    }

    /// Whether contexts may be shared by operations, because the provider does not write them.
    pub(super) fn leaves_contexts(&self) -> bool {
        self.get().mode & (FI_CONTEXT | FI_CONTEXT2) == 0
    }

    pub(super) fn has_hmem(&self) -> bool {
        self.get().caps & FI_HMEM != 0
    }

    /// The processors near the NIC; empty where they are unknown.
    pub(super) fn cpus(&self) -> Vec<u32> {
        // SAFETY: libfabric fills the structures of a NIC that it names, or leaves null.
        let pci = unsafe {
            let nic = self.get().nic.as_ref();
            nic.and_then(|nic| nic.bus_attr.as_ref())
                .filter(|bus| bus.bus_type == FI_BUS_PCI)
                .map(|bus| bus.pci)
        };
        numa::cpus(pci, &self.domain())
    }

    /// Whether this process may run near the NIC; true if that is unknown.
    fn is_near(&self) -> bool {
        let cpus = self.cpus();
        cpus.is_empty() || cpus.into_iter().any(numa::allowed)
    }

    /// Whether libfabric's own protocol over datagrams carries it.
    fn is_over_datagrams(&self) -> bool {
        self.provider().split(';').any(|layer| layer == "ofi_rxd")
    }

    /// Whether this is the interface that only reaches this machine.
    fn is_loopback(&self) -> bool {
        self.domain() == "lo"
    }
}

fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: libfabric's names end with a zero byte and live as long as their structure.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// The interfaces that `settings` name, one per rail.
///
/// # Errors
/// [`ErrorKind::Unavailable`] with the fix: no library, no such provider here, no such interface.
pub(super) fn choose(settings: &Settings) -> Result<Vec<Info>> {
    let library = Library::open().map_err(|e| {
        Error::new(ErrorKind::Unavailable, "probe", e.to_string()).with_fix(PACKAGE)
    })?;
    let mut found = query(library, settings)?;
    if found.iter().any(Info::is_over_datagrams) {
        let unacked = std::env::var("FI_OFI_RXD_MAX_UNACKED").ok();
        static WARNED: Once = Once::new();
        if let Some(warning) = too_many_unacked(unacked.as_deref()) {
            WARNED.call_once(|| tracing::warn!("{warning}"));
        }
    }
    if settings.config.rails == Rails::Auto && !has_nic(&found) {
        found = past_loopback(library, settings, found)?;
    }
    if goes_by_places(settings, &found) {
        let domains = found.iter().map(|info| ListedNic { name: info.domain(), fault: None });
        let chosen = own_nics(&provider_of(&found), &settings.nics, &domains.collect::<Vec<_>>())?;
        if !chosen.is_empty() {
            return Ok(pick(found, chosen));
        }
    }
    if settings.config.rails == Rails::Auto && found.iter().any(Info::is_near) {
        found.retain(Info::is_near);
    }
    let names: Vec<String> = found.iter().map(Info::domain).collect();
    let chosen = select(&settings.config.rails, &names, has_nic(&found)).map_err(|message| {
        Error::new(ErrorKind::Unavailable, "choose rails", message)
            .with_context("provider", &settings.config.provider)
    })?;
    Ok(pick(found, chosen))
}

/// The warning if `ofi_rxd` may send more packets at once than a socket's buffer takes.
fn too_many_unacked(variable: Option<&str>) -> Option<String> {
    let found = match variable {
        Some(text) if text.trim().parse().is_ok_and(|most: u32| most <= MOST_UNACKED) => {
            return None;
        }
        Some(text) => format!("is {text:?}"),
        None => "is not set: 128 holds".to_owned(),
    };
    Some(format!(
        "libfabric's ofi_rxd can stop for good where packets are lost; FI_OFI_RXD_MAX_UNACKED {found}, and \
         sockets lose packets beyond {MOST_UNACKED}: set FI_OFI_RXD_MAX_UNACKED={MOST_UNACKED} on all ranks, or \
         take provider = \"tcp\""
    ))
}

/// Indices of the domains of the NICs that the topology chose.
fn own_nics(provider: &str, nics: &Nics, domains: &[ListedNic]) -> Result<Vec<usize>> {
    nics.choose(&NicSearch {
        transport: &format!("provider {provider}"),
        listed: domains,
        most: MAX_RAILS,
        own_names: !NAMED_AS_NICS.contains(&provider),
        fix: "give it a link and a device (`fi_info`), or name others in `rails`",
    })
}

/// The entries of `found` that have these indices, in this order.
fn pick(found: Vec<Info>, indices: Vec<usize>) -> Vec<Info> {
    let mut found: Vec<_> = found.into_iter().map(Some).collect();
    indices.into_iter().filter_map(|index| found[index].take()).collect()
}

/// Waits for a short time where only the loopback interface is usable although another interface is
/// up: that one may be about to get its address.
fn past_loopback(
    library: &'static Library,
    settings: &Settings,
    mut found: Vec<Info>,
) -> Result<Vec<Info>> {
    static WAITED: AtomicBool = AtomicBool::new(false);
    // It waits once per process: an interface without an address by then gets none.
    let patience = if WAITED.swap(true, Ordering::Relaxed) { Duration::ZERO } else { ADDRESS_WAIT };
    let until = Instant::now() + patience;
    loop {
        let others = interfaces::up(Path::new(interfaces::CLASS));
        if others.is_empty() || !found.iter().all(Info::is_loopback) {
            return Ok(found);
        }
        if Instant::now() >= until {
            let others = others.join(", ");
            tracing::warn!("rails = \"auto\" takes lo: no address that can be used on {others}");
            return Ok(found);
        }
        std::thread::sleep(ADDRESS_WAIT / 20);
        found = query(library, settings)?;
    }
}

/// Whether the rails are those of the NICs that the topology chooses.
pub(super) fn goes_by_places(settings: &Settings, found: &[Info]) -> bool {
    settings.config.rails == Rails::Auto && has_nic(found)
}

/// Whether the provider drives NICs of its own.
fn has_nic(found: &[Info]) -> bool {
    !WITHOUT_NIC.contains(&provider_of(found).as_str())
}

/// The provider without its layers.
fn provider_of(found: &[Info]) -> String {
    let provider = found.first().map(Info::provider).unwrap_or_default();
    provider.split(';').next().unwrap_or_default().to_owned()
}

/// Indices into `names`, one per rail; or the error.
fn select(rails: &Rails, names: &[String], has_nic: bool) -> Result<Vec<usize>, String> {
    let available = || names.join(", ");
    match rails {
        Rails::Auto if has_nic => Ok((0..names.len().min(MAX_RAILS)).collect()),
        Rails::Auto => Ok(vec![0]),
        Rails::Count(count) => {
            let count = count.get() as usize;
            if count > names.len() {
                return Err(format!(
                    "rails = {count}: found {} interfaces; available: {}",
                    names.len(),
                    available()
                ));
            }
            Ok((0..count).collect())
        }
        Rails::Named(wanted) => wanted
            .iter()
            .map(|name| {
                names.iter().position(|n| n == name).ok_or_else(|| {
                    format!("rails: there is no interface {name:?}; available: {}", available())
                })
            })
            .collect(),
    }
}

/// All interfaces of the provider, each once, the loopback interface last.
fn query(library: &'static Library, settings: &Settings) -> Result<Vec<Info>> {
    let provider = &settings.config.provider;
    let mut list = List::get(library, settings, true);
    if list.is_err() && settings.hmem {
        // Without device memory the provider still carries host windows.
        list = List::get(library, &Settings { hmem: false, ..settings.clone() }, true);
    }
    let list = match list {
        Ok(list) => list,
        Err(error) => {
            let others = List::get(library, settings, false).map(|list| list.providers());
            let (major, minor) = library.version();
            let message = format!(
                "libfabric {major}.{minor} has no provider {provider:?} with reliable datagrams, \
                 remote writes and 4 bytes of completion data here: {}; available: {}",
                library.strerror(error),
                others.unwrap_or_default().join(", ")
            );
            return Err(Error::new(ErrorKind::Unavailable, "probe", message).with_fix(format!(
                "look with fi_info -p {provider}; the NIC's driver and the provider must be there"
            )));
        }
    };
    let mut found = Vec::<Info>::new();
    for info in list.entries()? {
        let same = found.first().is_none_or(|first| first.provider() == info.provider());
        let new = found.iter().all(|known| known.domain() != info.domain());
        let usable = info.cq_data_bytes() >= 4 && !is_direct(&info.fabric());
        if same && new && usable {
            found.push(info);
        }
    }
    found.sort_by_key(Info::is_loopback);
    if found.is_empty() {
        let message = format!("{provider}: completion data of less than 4 bytes; expected 4");
        return Err(Error::new(ErrorKind::Unavailable, "probe", message));
    }
    Ok(found)
}

/// Whether a fabric is the one of libfabric 2 that bypasses the software of the provider efa. It
/// has other limits, which this backend does not support.
fn is_direct(fabric: &str) -> bool {
    fabric == "efa-direct"
}

/// A list that `fi_getinfo` made.
struct List {
    library: &'static Library,
    head: *mut fi_info,
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the whole list, freed once.
        unsafe { self.library.freeinfo(self.head) }
    }
}

impl List {
    /// The interfaces that fit `settings`; of all providers, unless `named`.
    fn get(library: &'static Library, settings: &Settings, named: bool) -> Result<Self, i32> {
        const ENOMEM: i32 = 12;
        let provider = library.provider(&settings.config.provider);
        let Ok(provider) = CString::new(provider) else { return Err(ENOMEM) };
        let hints = library.allocinfo();
        if hints.is_null() {
            return Err(ENOMEM);
        }
        let hints = Self { library, head: hints };
        // Device memory needs reads by this rank itself, for read-backs.
        let reads = settings.config.get || settings.hmem || settings.config.flush == Flush::Always;
        let get = if reads { FI_READ | FI_REMOTE_READ } else { 0 };
        let hmem = if settings.hmem { FI_HMEM } else { 0 };
        // SAFETY: fresh hints, whose structures `fi_dupinfo` made. The name is owned here: it is
        // removed again before libfabric frees the hints.
        unsafe {
            let info = &mut *hints.head;
            info.caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE | get | hmem;
            info.mode = FI_CONTEXT | FI_CONTEXT2;
            (*info.ep_attr).type_ = FI_EP_RDM;
            let domain = &mut *info.domain_attr;
            domain.mr_mode = MR_MODE;
            // A rail is used by one thread at a time, and driven by the thread that has locked it.
            domain.threading = FI_THREAD_DOMAIN;
            domain.control_progress = FI_PROGRESS_MANUAL;
            domain.data_progress = FI_PROGRESS_MANUAL;
            domain.resource_mgmt = FI_RM_ENABLED;
            if named {
                (*info.fabric_attr).prov_name = provider.as_ptr().cast_mut();
            }
            let found = library.getinfo(info);
            (*info.fabric_attr).prov_name = null_mut();
            found.map(|head| Self { library, head })
        }
    }

    fn iter(&self) -> impl Iterator<Item = *mut fi_info> {
        // SAFETY: the list ends with null, and lives as long as `self`.
        std::iter::successors(NonNull::new(self.head), |info| unsafe {
            NonNull::new((*info.as_ptr()).next)
        })
        .map(NonNull::as_ptr)
    }

    fn entries(&self) -> Result<Vec<Info>> {
        let copy = |raw: *mut fi_info| {
            // SAFETY: an entry of the list.
            let copy = unsafe { self.library.dupinfo(raw) };
            let raw = NonNull::new(copy)
                .ok_or_else(|| Error::new(ErrorKind::System, "fi_dupinfo", "memory is short"))?;
            Ok(Info { library: self.library, raw })
        };
        self.iter().map(copy).collect()
    }

    fn providers(&self) -> Vec<String> {
        // SAFETY: libfabric fills all attribute structures of what it returns.
        let mut names: Vec<_> =
            self.iter().map(|raw| text(unsafe { (*(*raw).fabric_attr).prov_name })).collect();
        names.dedup();
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    fn names() -> Vec<String> {
        ["eth0", "eth1", "lo"].map(String::from).to_vec()
    }

    #[test]
    fn the_warning_of_lost_datagrams_ends_at_the_number_that_a_socket_takes() {
        assert_eq!(too_many_unacked(Some("64")), None);
        assert_eq!(too_many_unacked(Some(" 8 ")), None);
        for text in ["65", "-1", "many", ""] {
            let warning = too_many_unacked(Some(text)).unwrap();
            assert!(warning.contains(&format!("FI_OFI_RXD_MAX_UNACKED is {text:?}")), "{warning}");
        }
        assert!(too_many_unacked(None).unwrap().contains("FI_OFI_RXD_MAX_UNACKED=64"));
    }

    #[test]
    fn auto_is_all_nics_or_one_interface() {
        assert_eq!(select(&Rails::Auto, &names(), true), Ok(vec![0, 1, 2]));
        assert_eq!(select(&Rails::Auto, &names(), false), Ok(vec![0]));
    }

    #[test]
    fn a_nic_that_is_not_listed_is_refused_where_domains_are_named_as_nics_and_rails_matter() {
        let listed = |name: &str| ListedNic { name: name.to_owned(), fault: None };
        let domains = ["rdmap8s0-rdm", "rdmap85s0-rdm", "mlx5_1"].map(listed);
        let names = || ["mlx5_3", "mlx5_1"].map(str::to_owned).to_vec();
        let nics = Nics { names: names(), any_rails: false };
        for provider in NAMED_AS_NICS {
            let error = own_nics(provider, &nics, &domains).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            let text = error.to_string();
            assert!(text.contains("mlx5_3 (not listed)") && text.contains("`rails`"), "{text}");
        }
        // The provider's name of mlx5_3 is unknown.
        assert_eq!(own_nics("psm3", &nics, &domains).unwrap(), [2]);
        let free = Nics { names: names(), any_rails: true };
        assert_eq!(own_nics("verbs", &free, &domains).unwrap(), [2]);
    }

    #[test]
    fn the_fabric_efa_is_taken_and_its_direct_sibling_is_not() {
        assert!(is_direct("efa-direct"));
        assert!(!is_direct("efa") && !is_direct("IB-0xfe80000000000000"));
    }

    #[test]
    fn a_count_takes_the_first_and_says_how_many_there_are() {
        let count = |n| Rails::Count(NonZeroU32::new(n).unwrap());
        assert_eq!(select(&count(2), &names(), false), Ok(vec![0, 1]));
        let text = select(&count(4), &names(), true).unwrap_err();
        assert!(text.contains("found 3 interfaces; available: eth0, eth1, lo"), "{text}");
    }

    #[test]
    fn names_keep_their_order_and_an_unknown_one_is_named() {
        let named = |list: &[&str]| Rails::Named(list.iter().map(|n| n.to_string()).collect());
        assert_eq!(select(&named(&["lo", "eth0"]), &names(), true), Ok(vec![2, 0]));
        let text = select(&named(&["eth0", "eth7"]), &names(), true).unwrap_err();
        assert!(text.contains("\"eth7\"; available: eth0, eth1, lo"), "{text}");
    }
}
