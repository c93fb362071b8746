//! The driver's code, over a library of HIP's names that works on host memory. It shows nothing of a GPU.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tokenyard_core::ErrorKind;
use tokenyard_gpu::compile::Architecture;
use tokenyard_gpu::driver::{
    DeviceFacts, Driver, DriverDevices, DriverMemory, RawDevice, RawMemory, RawModule, Reach,
};
use tokenyard_rocm::HipDriver;

mod fake;

const DRIVER: HipDriver = HipDriver;
/// They share memory by descriptors and by hipIpc.
const BY_FD: RawDevice = RawDevice(0);
const BY_IPC: RawDevice = RawDevice(1);

/// The library, built once and loaded.
fn loaded() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        // The folder of cargo is that of all packages.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_hip");
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("libamdhip64.so.6");
        fake::build(&file, &[]);
        DRIVER.load(Some(&folder)).unwrap();
        file
    })
}

/// Writes through one mapping, and reads through another of the same memory.
fn crosses(own: RawMemory, peer: RawMemory, device: RawDevice) {
    // SAFETY: memory that lives; the mappings are of host memory, this long.
    unsafe {
        let [here, there] =
            [own, peer].map(|memory| DRIVER.memory_map(memory, 8192, device).unwrap());
        (here as *mut u64).add(100).write(7);
        assert_eq!((there as *const u64).add(100).read(), 7);
        DRIVER.memory_unmap(peer, there, 8192);
        DRIVER.memory_unmap(own, here, 8192);
    }
}

#[test]
fn facts_of_a_device_are_read_and_each_shares_memory_as_it_can() {
    loaded();
    let facts = |device| DRIVER.facts(device).unwrap();
    let expected = DeviceFacts {
        architecture: Architecture::Gfx(0x942),
        wave: 64,
        processors: 304,
        most_shared: 65_536,
        shares_by: Some("VMM, uncached"),
        starts_early: false,
    };
    assert_eq!(facts(BY_FD), expected);
    let gfx950 = Architecture::Gfx(0x950);
    let shares_by = Some("hipIpc, uncached");
    assert_eq!(facts(BY_IPC), DeviceFacts { architecture: gfx950, shares_by, ..expected });
    assert_eq!(DRIVER.version().unwrap(), "7.14.60850");
    let reach = |a, b| DRIVER.reach(a, b).unwrap();
    assert_eq!(reach(BY_FD, BY_IPC), Reach::Whole);
    assert_eq!(reach(BY_IPC, BY_FD), Reach::WithoutAtomics);
    assert_eq!(reach(BY_FD, BY_FD), Reach::Nothing);
}

#[test]
fn physical_memory_crosses_by_its_descriptor() {
    loaded();
    assert_eq!(DRIVER.granularity(BY_FD).unwrap(), 4096);
    let own = DRIVER.memory_create(BY_FD, 8192).unwrap();
    // SAFETY: the memory lives.
    let fd = unsafe { DRIVER.memory_export(own).unwrap() };
    let peer = DRIVER.memory_import(fd.as_fd()).unwrap();
    crosses(own, peer, BY_FD);
    // SAFETY: as above.
    let longer = unsafe { DRIVER.memory_map(peer, 16_384, BY_FD) };
    assert!(longer.unwrap_err().to_string().contains("map memory"));
    // SAFETY: nothing of either is mapped any more.
    unsafe { [own, peer].into_iter().for_each(|memory| DRIVER.memory_release(memory)) };
}

#[test]
fn a_window_is_given_to_nics_by_a_descriptor_of_its_memory() {
    loaded();
    let memory = DRIVER.memory_create(BY_FD, 8192).unwrap();
    // SAFETY: memory that lives; the mapping is of host memory, this long.
    unsafe {
        let at = DRIVER.memory_map(memory, 8192, BY_FD).unwrap();
        (at as *mut u64).add(1000).write(11);
        let file = std::fs::File::from(DRIVER.range_dmabuf(at, 8192).unwrap());
        let mut word = [0; 8];
        file.read_exact_at(&mut word, 8000).unwrap();
        assert_eq!(u64::from_ne_bytes(word), 11);
        DRIVER.memory_unmap(memory, at, 8192);
        let error = DRIVER.range_dmabuf(at, 8192).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System);
        assert!(error.to_string().contains("export dmabuf: HIP says hipErrorOther (1)"), "{error}");
        DRIVER.memory_release(memory);
    }
}

#[test]
fn an_allocation_crosses_by_its_name_behind_a_descriptor() {
    loaded();
    assert_eq!(DRIVER.granularity(BY_IPC).unwrap(), 2 << 20);
    let own = DRIVER.memory_create(BY_IPC, 8192).unwrap();
    // SAFETY: the memory lives.
    let fd = unsafe { DRIVER.memory_export(own).unwrap() };
    let peer = DRIVER.memory_import(fd.as_fd()).unwrap();
    crosses(own, peer, BY_IPC);
    // SAFETY: as above.
    let longer = unsafe { DRIVER.memory_map(peer, 8193, BY_IPC) };
    let error = longer.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.to_string().contains("found 8192 bytes"), "{error}");
    // SAFETY: nothing of either is used any more.
    unsafe { [peer, own].into_iter().for_each(|memory| DRIVER.memory_release(memory)) };
}

#[test]
fn a_thread_has_its_device_back_after_a_context() {
    loaded();
    assert_eq!(DRIVER.current_device(), None, "0 is the answer where none was chosen");
    let [first, second] = [BY_FD, BY_IPC].map(|device| DRIVER.context_retain(device).unwrap());
    // SAFETY: contexts of this driver, popped in reverse order.
    unsafe {
        let before = DRIVER.context_push(second).unwrap();
        assert_eq!(DRIVER.current_device(), Some(BY_IPC));
        let within = DRIVER.context_push(first).unwrap();
        assert_eq!(DRIVER.current_device(), None);
        DRIVER.context_pop(within);
        assert_eq!(DRIVER.current_device(), Some(BY_IPC));
        DRIVER.context_pop(before);
    }
    assert_eq!(DRIVER.current_device(), None);
}

#[test]
fn a_failure_is_named_in_hip_s_words_and_taken_back_from_the_thread() {
    let file = loaded();
    // SAFETY: the library is loaded already.
    let library = unsafe { libloading::Library::new(file).unwrap() };
    // SAFETY: `fake_hip.c` defines it so.
    let last: libloading::Symbol<'_, unsafe extern "C" fn() -> u32> =
        unsafe { library.get(b"fake_last_error").unwrap() };
    let error = DRIVER.alloc(2 << 30).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System);
    let text = error.to_string();
    assert!(text.contains("hipErrorOutOfMemory (2): out of memory"), "{text}");
    assert!(error.fix().is_some_and(|fix| fix.contains("[kernels.rocm] arena_mib")), "{error}");
    // SAFETY: no arguments.
    assert_eq!(unsafe { last() }, 0, "a framework's next look would find it");
    let error = DRIVER.stream_create().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System);
    assert!(error.to_string().contains("hipErrorNotSupported (801)"), "{error}");
    // SAFETY: as above.
    assert_eq!(unsafe { last() }, 0);
}

#[test]
fn a_constant_of_a_module_is_found_by_its_name() {
    loaded();
    let none = RawModule(std::ptr::null_mut());
    // SAFETY: the library looks at the name alone.
    let [wave, other] =
        [c"ty_wave", c"ty_other"].map(|name| unsafe { DRIVER.module_word(none, name) });
    // SAFETY: memory of the library, 4 bytes.
    assert_eq!(unsafe { (wave.unwrap() as *const u32).read() }, 64);
    assert!(other.unwrap_err().to_string().contains("find constant"));
}

#[test]
fn a_process_has_one_hip() {
    loaded();
    DRIVER.load(None).unwrap();
    let error = DRIVER.load(Some(Path::new("/opt/rocm-6.4/lib"))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    assert!(text.contains("`libraries`: found /opt/rocm-6.4/lib"), "{text}");
    assert!(text.contains("libamdhip64.so.6"), "{text}");
}
