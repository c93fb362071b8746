//! The device of this process, and the thread that drives it.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{env, fs};

use tokenyard_hca::{Config, Event, FaultPlan, Hca, HostMemory, Order, Profile};
use tokenyard_sys_mlx5::doorbell::PAGE;

use crate::gpu::ProcessMemory;
use crate::link::Wires;
use crate::{real, sysfs};

/// The variable for a file with planted faults: `tokenyard_hca::FaultPlan`.
const FAULTS: &str = "TOKENYARD_HCA_FAULTS";
/// `in-order`, which is the default, or `adaptive`.
const ORDER: &str = "TOKENYARD_HCA_ORDER";
/// Features that device and driver do not have, with commas between them: `devx`, `registers`, `dmabuf`, `peermem`.
const LACKS: &str = "TOKENYARD_HCA_LACKS";
/// After this many turns without work, the thread naps.
const IDLE_TURNS: u32 = 20;
const NAP: Duration = Duration::from_micros(50);
/// The most that a turn counts for the device's clock. While a busy machine runs no turn, no answer counts as late.
const LONGEST_TURN: Duration = Duration::from_millis(2);
/// The first offset of pages of registers, among the offsets that programs map.
const FIRST_OFFSET: i64 = 1 << 40;

/// Asynchronous events, with the kernel's numbers.
const EVENT_PORT_ERR: u32 = 10;
const EVENT_QP_LAST_WQE_REACHED: u32 = 16;

/// The descriptors of the device that are open in this process.
static OPEN: [AtomicI32; 16] = [const { AtomicI32::new(-1) }; 16];
/// The descriptors by which asynchronous events come.
static ASYNC: [AtomicI32; 16] = [const { AtomicI32::new(-1) }; 16];
static DEVICE: Mutex<Option<Device>> = Mutex::new(None);
/// Calls of the program that wait for the device.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// The object that a handle names.
#[derive(Clone, Debug)]
pub(crate) enum Object {
    Pd(u32),
    Region(u32),
    Cq(u32),
    Srq(u32),
    Qp(Qp),
    /// A page of registers, by its offset.
    Page(i64),
    Umem(u32),
    DevxCq(u32),
    DevxQp(u32),
}

/// A queue pair that libmlx5 made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Qp {
    pub(crate) qpn: u32,
    /// The library's name for it.
    pub(crate) user: u64,
}

/// A page of doorbell registers: a file that this library and the program map, each for itself.
#[derive(Debug)]
struct Page {
    number: u32,
    file: OwnedFd,
    mapped: *mut libc::c_void,
}

// SAFETY: the mapping belongs to the page, and only the holder of the device uses it.
unsafe impl Send for Page {}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `add_page`, and no longer a page of the device.
        unsafe { libc::munmap(self.mapped, PAGE) };
    }
}

/// An asynchronous event: of a queue pair by its name, or of the port.
#[derive(Clone, Copy, Debug)]
struct Pending {
    element: u64,
    kind: u32,
}

/// The device of this process.
pub(crate) struct Device {
    pub(crate) hca: Hca,
    pub(crate) lid: u16,
    wires: Wires,
    /// The device's clock in nanoseconds, as it was at a turn.
    clock: u64,
    turned: Instant,
    handles: u32,
    pub(crate) objects: BTreeMap<u32, Object>,
    pages: BTreeMap<i64, Page>,
    events: VecDeque<Pending>,
    /// Events of each queue pair that the program has read.
    events_read: BTreeMap<u64, u32>,
    event_fd: OwnedFd,
}

/// Sets errno, and returns the -1 of a system call that fails.
pub(crate) fn fail(errno: c_int) -> c_int {
    // SAFETY: errno is this thread's own.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Whether the descriptor is one of the device.
pub(crate) fn is_ours(fd: c_int) -> bool {
    fd >= 0 && OPEN.iter().any(|open| open.load(Ordering::Acquire) == fd)
}

pub(crate) fn is_async(fd: c_int) -> bool {
    fd >= 0 && ASYNC.iter().any(|open| open.load(Ordering::Acquire) == fd)
}

/// Adds a new descriptor for asynchronous events.
pub(crate) fn add_async(fd: c_int) {
    ASYNC
        .iter()
        .any(|open| open.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Acquire).is_ok());
}

/// Removes a descriptor that is closed.
pub(crate) fn forget(fd: c_int) {
    for open in OPEN.iter().chain(&ASYNC) {
        let _ = open.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Opens the device; the first call makes it.
pub(crate) fn open() -> c_int {
    let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    if device.is_none() {
        match Device::new() {
            Ok(made) => *device = Some(made),
            Err(error) => {
                eprintln!("stand-in of mlx5: {error}");
                return fail(libc::ENODEV);
            }
        }
        std::thread::spawn(drive);
    }
    // SAFETY: a terminated path.
    let fd = unsafe { real::open()(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC, 0) };
    let took = |open: &AtomicI32| {
        open.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Acquire).is_ok()
    };
    if fd >= 0 && !OPEN.iter().any(took) {
        // SAFETY: opened above, and used by no other code.
        unsafe { real::close()(fd) };
        return fail(libc::EMFILE);
    }
    fd
}

/// Runs `then` on the device, for a call of the program.
pub(crate) fn with<T>(then: impl FnOnce(&mut Device) -> Result<T, c_int>) -> Result<T, c_int> {
    CALLS.fetch_add(1, Ordering::AcqRel);
    let answer = locked(then);
    CALLS.fetch_sub(1, Ordering::AcqRel);
    answer
}

fn locked<T>(then: impl FnOnce(&mut Device) -> Result<T, c_int>) -> Result<T, c_int> {
    let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = device.as_mut().ok_or(libc::ENODEV)?;
    let answer = then(device);
    device.judge();
    answer
}

/// Drives the device for the life of the process.
fn drive() {
    static DRIVEN: AtomicBool = AtomicBool::new(false);
    if DRIVEN.swap(true, Ordering::AcqRel) {
        return;
    }
    let mut idle = 0;
    loop {
        let moved = locked(|device| Ok(device.turn())).unwrap_or(false);
        idle = if moved { 0 } else { idle + 1 };
        // On a busy machine, a thread that naps runs again soon; a thread that yields waits for all others.
        if idle > IDLE_TURNS || CALLS.load(Ordering::Acquire) > 0 {
            std::thread::sleep(NAP);
        }
    }
}

impl Device {
    fn new() -> Result<Self, String> {
        let world = sysfs::world().ok_or("no world")?;
        let failed = |error: std::io::Error| format!("{}: {error}", world.display());
        let wires = Wires::open(world).map_err(failed)?;
        let lid = wires.lid();
        sysfs::publish_gid(lid).map_err(failed)?;
        let config = Config { lid, profile: Profile::Library, order: order()?, faults: faults()? };
        // SAFETY: libmlx5 and its users hold memory that they give to a device mapped until they take it back,
        // and allow the device to write there: they promise that to any device.
        let memory = unsafe { HostMemory::new() };
        // SAFETY: a new descriptor.
        let event_fd = unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE);
            if fd < 0 {
                return Err("eventfd".to_owned());
            }
            OwnedFd::from_raw_fd(fd)
        };
        Ok(Self {
            hca: Hca::new(config, ProcessMemory(memory)),
            lid,
            wires,
            clock: 0,
            turned: Instant::now(),
            handles: 0,
            objects: BTreeMap::new(),
            pages: BTreeMap::new(),
            events: VecDeque::new(),
            events_read: BTreeMap::new(),
            event_fd,
        })
    }

    /// Lets the device do one step. Returns whether there was work.
    fn turn(&mut self) -> bool {
        let mut moved = self.hca.poll_registers();
        let now = Instant::now();
        self.clock += (now - self.turned).min(LONGEST_TURN).as_nanos() as u64;
        self.turned = now;
        moved |= self.hca.step(self.clock);
        for packet in self.hca.take_packets() {
            moved = true;
            if packet.to.lid == self.lid {
                self.hca.receive(packet);
            } else {
                self.wires.send(&packet);
            }
        }
        for packet in self.wires.drive() {
            moved = true;
            self.hca.receive(packet);
        }
        for event in self.hca.take_events() {
            self.report(event);
        }
        moved
    }

    /// Ends the process with a dump if the driver has broken a rule.
    fn judge(&self) {
        if let Some(violation) = self.hca.violations().first() {
            eprintln!("stand-in of mlx5: {violation}");
            std::process::abort();
        }
    }

    /// Stores an object, and returns its handle.
    pub(crate) fn add(&mut self, object: Object) -> u32 {
        self.handles += 1;
        self.objects.insert(self.handles, object);
        self.handles
    }

    /// Makes a page of registers; returns its handle, offset and number.
    pub(crate) fn add_page(&mut self) -> Result<(u32, i64, u32), c_int> {
        // SAFETY: a new descriptor, and a mapping of a file that is as long.
        let (file, mapped) = unsafe {
            let fd = libc::memfd_create(c"registers".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 || libc::ftruncate(fd, PAGE as i64) < 0 {
                return Err(libc::ENOMEM);
            }
            let file = OwnedFd::from_raw_fd(fd);
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let mapped = real::mmap()(std::ptr::null_mut(), PAGE, rights, libc::MAP_SHARED, fd, 0);
            if mapped == libc::MAP_FAILED {
                return Err(libc::ENOMEM);
            }
            (file, mapped)
        };
        let number = self.hca.allocate_page(mapped.expose_provenance() as u64);
        let offset = FIRST_OFFSET + i64::from(number) * PAGE as i64;
        self.pages.insert(offset, Page { number, file, mapped });
        Ok((self.add(Object::Page(offset)), offset, number))
    }

    /// The file that a program maps at an offset.
    pub(crate) fn page_file(&mut self, offset: i64) -> Result<c_int, c_int> {
        self.pages.get(&offset).map(|page| page.file.as_raw_fd()).ok_or(libc::EINVAL)
    }

    pub(crate) fn remove_page(&mut self, offset: i64) {
        if let Some(page) = self.pages.remove(&offset) {
            self.hca.free_page(page.number);
        }
    }

    /// A descriptor of its own for asynchronous events.
    pub(crate) fn async_fd(&self) -> c_int {
        self.event_fd.as_raw_fd()
    }

    fn report(&mut self, event: Event) {
        let pending = match event {
            Event::PortDown => Pending { element: 1, kind: EVENT_PORT_ERR },
            Event::LastReceive { qpn } => {
                let qp = self.objects.values().find_map(|object| match object {
                    Object::Qp(qp) if qp.qpn == qpn => Some(qp.user),
                    _ => None,
                });
                let Some(element) = qp else { return };
                Pending { element, kind: EVENT_QP_LAST_WQE_REACHED }
            }
        };
        self.events.push_back(pending);
        let one = 1_u64.to_ne_bytes();
        // SAFETY: the descriptor is an eventfd, which takes 8 bytes.
        unsafe { real::write()(self.async_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// The next asynchronous event, as the kernel gives it.
    pub(crate) fn next_event(&mut self) -> Option<[u8; 16]> {
        let Pending { element, kind } = self.events.pop_front()?;
        *self.events_read.entry(element).or_default() += 1;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&element.to_ne_bytes());
        bytes[8..12].copy_from_slice(&kind.to_ne_bytes());
        Some(bytes)
    }

    /// A queue pair ends, and gets no more events. Returns the number of its events that the program has read.
    pub(crate) fn forget_events(&mut self, element: u64) -> u32 {
        self.events.retain(|event| event.element != element);
        self.events_read.remove(&element).unwrap_or(0)
    }
}

fn faults() -> Result<FaultPlan, String> {
    let Some(path) = env::var_os(FAULTS) else { return Ok(FaultPlan::default()) };
    let text = fs::read_to_string(&path).map_err(|e| format!("{FAULTS}: {e}"))?;
    FaultPlan::parse(&text).map_err(|e| format!("{FAULTS}: {e}"))
}

/// Whether a feature is missing.
pub(crate) fn lacks(feature: &str) -> bool {
    env::var(LACKS).is_ok_and(|lacks| lacks.split(',').any(|missing| missing == feature))
}

fn order() -> Result<Order, String> {
    match env::var(ORDER).as_deref() {
        Err(_) | Ok("in-order") => Ok(Order::InOrder),
        Ok("adaptive") => Ok(Order::Adaptive),
        Ok(other) => Err(format!("{ORDER}: found {other}; expected in-order or adaptive")),
    }
}
