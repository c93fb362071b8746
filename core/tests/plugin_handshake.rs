//! A plugin may fail the handshake, and a loaded component may break the contract of a cold slot. Each way to
//! do so is an error that names the value found, the value expected and the fix.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test helpers")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::{OpenTransport, Registry};
use tokenyard_core::transport::{NO_WINDOW, Team, TransportNeeds, TransportOpen, Window};
use tokenyard_core::{Error, ErrorKind};

mod plugins;
use plugins::{Library, compile, compile_to, repository};

const GUIDE: &str = include_str!("../../docs/plugin-abi.md");

fn broken(options: &[&str]) -> Library {
    compile("core/tests/plugins/broken.c", "cc", options)
}

/// The error of loading `path`: a refused plugin, with the path in it and a fix.
fn refusal(path: &Path) -> Error {
    let error = Registry::load(&[path.to_path_buf()]).expect_err("the plugin must be refused");
    assert_eq!(error.kind(), ErrorKind::Plugin, "{error}");
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    assert!(error.fix().is_some_and(|fix| !fix.is_empty()), "{error}");
    error
}

/// Loads broken.c built with `options`; the text must contain all of `wanted`, and the guide must
/// contain the first of them, so that a reader of the message finds it there.
fn refused(options: &[&str], wanted: &[&str]) {
    let library = broken(options);
    refused_file(&library.path, wanted);
}

fn refused_file(path: &Path, wanted: &[&str]) {
    let text = refusal(path).to_string();
    for component in wanted {
        assert!(text.contains(component), "expected `{component}` in: {text}");
    }
    assert!(GUIDE.contains(wanted[0]), "docs/plugin-abi.md does not explain `{}`", wanted[0]);
}

// === the file ===

#[test]
fn a_missing_file_is_named_with_the_way_to_build_it() {
    let folder = tempfile::tempdir().unwrap();
    refused_file(
        &folder.path().join("libnone.so"),
        &["the file cannot be read", "No such file", "Fix: correct [plugins] paths"],
    );
}

#[test]
fn a_relative_path_is_refused() {
    let wanted = ["the path is relative", "expected an absolute path", "Fix: write the whole path"];
    refused_file(Path::new("./libplugin.so"), &wanted);
}

#[test]
fn a_text_file_is_not_a_library() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libtext.so");
    std::fs::write(&path, "this is not a library, whatever its name says\n".repeat(100)).unwrap();
    refused_file(&path, &["it is no ELF file", "found \"this\"", "Fix: name a shared library"]);
}

#[test]
fn an_empty_file_is_not_a_library() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libempty.so");
    std::fs::write(&path, "").unwrap();
    refused_file(&path, &["the file is empty", "expected a shared library", "Fix: copy or build"]);
}

/// Without the check before it, the dynamic loader reads bytes that the file does not have: SIGBUS.
#[test]
fn a_plugin_that_is_cut_short_is_refused_wherever_the_cut_is() {
    let library = broken(&[]);
    let whole = std::fs::read(&library.path).unwrap();
    for eighths in 1..8 {
        std::fs::write(&library.path, &whole[..whole.len() * eighths / 8]).unwrap();
        refused_file(&library.path, &["it is cut short", "its headers name", "Fix: copy"]);
    }
    std::fs::write(&library.path, &whole[..whole.len() - 1]).unwrap();
    refused_file(&library.path, &["it is cut short"]);
}

#[test]
fn a_plugin_for_another_machine_is_named_as_that() {
    let library = broken(&[]);
    let mut bytes = std::fs::read(&library.path).unwrap();
    let (foreign, name) =
        if cfg!(target_arch = "x86_64") { (183_u16, "aarch64") } else { (62, "x86_64") };
    bytes[18..20].copy_from_slice(&foreign.to_le_bytes());
    std::fs::write(&library.path, bytes).unwrap();
    refused_file(&library.path, &["it is for", name, "Fix: build the plugin for this machine"]);
}

#[test]
fn a_fifo_or_a_device_is_refused_by_its_kind_at_once_also_in_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("libpipe.so");
    let kind = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, rustix::fs::Mode::RUSR, 0).unwrap();
    refused_file(&pipe, &["expected a regular file", "found a FIFO", "Fix: "]);
    let text = Registry::load(&[folder.path().to_path_buf()]).unwrap_err().to_string();
    assert!(text.contains(pipe.to_str().unwrap()) && text.contains("found a FIFO"), "{text}");
    refused_file(Path::new("/dev/zero"), &["expected a regular file", "a character device"]);
}

#[test]
fn a_missing_system_library_is_named_with_the_way_to_install_it() {
    let folder = tempfile::tempdir().unwrap();
    let fabric = folder.path().join("libnofabric.so");
    let source = repository("core/tests/plugins/broken.c");
    compile_to(&fabric, &source, "cc", &["-DNOT_A_PLUGIN"]);
    let path = folder.path().join("libplugin.so");
    let link = format!("-L{}", folder.path().display());
    compile_to(&path, &source, "cc", &["-DNEEDS=answer", &link, "-lnofabric"]);
    std::fs::remove_file(fabric).unwrap();
    refused_file(
        &path,
        &[
            "cannot open shared object file",
            "install the system library `libnofabric.so`",
            "ldconfig",
        ],
    );
}

#[test]
fn an_undefined_symbol_is_named_with_the_way_to_link_it() {
    let wanted = ["undefined symbol", "no_such_answer", "Fix: link the plugin with"];
    refused(&["-DNEEDS=no_such_answer"], &wanted);
}

#[test]
fn a_library_without_an_export_is_not_a_plugin() {
    let wanted =
        ["it is a library but not a tokenyard plugin", "tokenyard_transport_v1", "Fix: name"];
    refused(&["-DNOT_A_PLUGIN"], &wanted);
}

#[test]
fn a_folder_gives_its_libraries_and_names_the_bad_one() {
    let good = broken(&[]);
    let folder = good.path.parent().unwrap().to_path_buf();
    std::fs::write(folder.join("README.md"), "not a library").unwrap();
    let registry = Registry::load(std::slice::from_ref(&folder)).unwrap();
    assert_eq!(registry.transport("broken").unwrap().version(), "1");
    assert_eq!(registry.components()[0].file.as_deref(), Some(&*good.path));

    let bad = folder.join("libbad.so");
    std::fs::write(&bad, "text").unwrap();
    let text = Registry::load(&[folder]).unwrap_err().to_string();
    assert!(text.contains(&bad.display().to_string()), "{text}");
}

// === the export ===

#[test]
fn a_wrong_magic_is_refused() {
    refused(&["-DMAGIC=7"], &["wrong magic", "0x0000000000000007", "0x445241594e4b4f54"]);
}

#[test]
fn a_wrong_major_version_is_refused() {
    refused(&["-DMAJOR=9"], &["wrong major version", "found 9, expected 1", "Fix: rebuild"]);
}

#[test]
fn a_wrong_layout_is_refused() {
    let wanted = format!("expected {:#018x}", abi::TY_TRANSPORT_LAYOUT);
    refused(
        &["-DLAYOUT=255"],
        &["wrong layout", "found 0x00000000000000ff", &wanted, "Fix: rebuild"],
    );
}

#[test]
fn plugins_of_earlier_minor_versions_load_and_others_with_their_layouts_are_refused() {
    // `serve_ring` came with minor version 10, `device_api_of` with 12.
    let ends = ["serve_ring", "serve_ring", "device_api_of", "device_api_of"];
    for ((minor, layout), end) in (8..).zip(abi::earlier_transport_layouts()).zip(ends) {
        let options = [
            format!("-DMINOR={minor}"),
            format!("-DLAYOUT={layout}ull"),
            format!("-DTABLE_SIZE=offsetof(TyTransportTable, {end})"),
        ];
        let library = broken(&options.each_ref().map(String::as_str));
        let registry = Registry::load(std::slice::from_ref(&library.path)).unwrap();
        assert_eq!(registry.transport("broken").unwrap().version(), "1", "minor version {minor}");
        let other = format!("-DLAYOUT={}ull", layout ^ 1);
        refused(&[&options[0], &other], &["wrong layout"]);
    }
}

#[test]
fn a_short_export_is_refused() {
    let wanted = ["short export structure", "found 32 bytes, expected at least 48", "sizeof"];
    refused(&["-DEXPORT_SIZE=sizeof(TyExportHeader)"], &wanted);
}

#[test]
fn an_export_without_components_is_refused() {
    let wanted =
        ["the export names no component", "expected 1 to 64", "Fix: let `components` point"];
    refused(&["-DCOMPONENTS=NULL"], &wanted);
    refused(&["-DCOUNT=0"], &wanted);
}

#[test]
fn a_damaged_count_of_components_is_refused() {
    refused(
        &["-DCOUNT=65"],
        &["components; expected 1 to 64", "the export names 65 components", "Fix: fill `count`"],
    );
}

#[test]
fn a_null_table_is_refused() {
    refused(&["-DTABLE=NULL"], &["table 0 of 1 is null", "Fix: let every entry"]);
}

#[test]
fn a_table_too_short_for_a_name_is_refused() {
    refused(
        &["-DTABLE_SIZE=8"],
        &["short table 0", "found 8 bytes, expected at least 56", "sizeof"],
    );
}

#[test]
fn a_table_that_ends_before_a_required_slot_is_refused() {
    refused(
        &["-DTABLE_SIZE=offsetof(TyTransportTable, poll)"],
        &["it ends before the required slot", "`broken`", "`poll`", "Fix: fill the table's size"],
    );
}

#[test]
fn a_null_required_slot_is_refused() {
    refused(&["-DPOLL=NULL"], &["required slot `poll`", "`broken` is null", "Fix: implement"]);
}

#[test]
fn a_name_that_no_config_can_write_is_refused() {
    refused(&["-DNAME=\"Bro ken\""], &["has characters outside", "`Bro ken`", "[a-z0-9_-]"]);
    refused(&["-DNAME=\"\\xff\""], &["has characters outside", "`\\xff`", "[a-z0-9_-]"]);
    refused(&["-DNAME=\"\""], &["a component's name has 0 bytes", "expected 1 to 64"]);
}

#[test]
fn two_plugins_with_one_component_name_are_both_named() {
    let (a, b) = (broken(&[]), broken(&[]));
    let paths: Vec<PathBuf> = vec![a.path.clone(), b.path.clone()];
    let error = Registry::load(&paths).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Plugin);
    for part in [
        "transport `broken`",
        &a.path.display().to_string(),
        &b.path.display().to_string(),
        "Fix: ",
    ] {
        assert!(text.contains(part), "expected `{part}` in: {text}");
    }
    assert!(GUIDE.contains("is also provided by") && text.contains("is also provided by"));
}

#[test]
fn a_component_that_no_plugin_provides_is_an_error_that_names_what_is_available() {
    let library = broken(&[]);
    let registry = Registry::load(std::slice::from_ref(&library.path)).unwrap();
    let error = registry.transport("brokn").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(
        error.message().contains("no transport is called `brokn`; available: broken"),
        "{error}"
    );
}

// === the calls ===

fn needs() -> TransportNeeds {
    TransportNeeds {
        windows: 1,
        queues: 1,
        signals: 1,
        queue_depth: 8,
        largest_put: 4096,
        deadline: Duration::from_secs(5),
    }
}

fn open(library: &Library) -> Result<OpenTransport, Error> {
    let registry = Registry::load(std::slice::from_ref(&library.path)).unwrap();
    let component = registry.transport("broken").unwrap();
    let config = ComponentTable::from_text("", "a.toml");
    component.probe(&config)?;
    component.open(&config, &TransportOpen::new(&Team::world(0, 1), &needs()))
}

fn failure(library: &Library) -> Error {
    let error = open(library).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("component: broken"), "{error}");
    error
}

#[test]
fn a_component_that_cannot_run_here_is_unavailable_and_says_the_fix() {
    let error = failure(&broken(&["-DNO_DEVICE"]));
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.message(), "found 0 devices, expected 1");
    assert_eq!(error.fix(), Some("plug one in"));
}

#[test]
fn a_refused_open_gives_the_systems_error_and_the_fix() {
    let error = failure(&broken(&["-DOPEN_REFUSED"]));
    assert_eq!(error.kind(), ErrorKind::System);
    assert_eq!(
        error.to_string(),
        "open: cannot open /dev/broken0 [component: broken]: Permission denied (os error 13). Fix: join \
         the group broken"
    );
}

#[test]
fn capabilities_that_lack_their_slot_are_refused() {
    let load_store = failure(&broken(&["-DFLAGS=TY_CAP_LOAD_STORE"]));
    assert!(load_store.message().contains("load_store without a `peer_address` slot"));
    let owns = failure(&broken(&["-DFLAGS=TY_CAP_OWNS_MEMORY"]));
    assert!(owns.message().contains("owns_memory without an `alloc` slot"), "{owns}");
    let device_api = failure(&broken(&["-DFLAGS=TY_CAP_DEVICE_API"]));
    assert!(
        device_api.message().contains("device_api without a `device_api` slot"),
        "{device_api}"
    );
    assert_eq!((load_store.kind(), owns.kind()), (ErrorKind::Plugin, ErrorKind::Plugin));
}

#[test]
fn answers_that_break_the_contract_are_errors() {
    let mut component = open(&broken(&["-DALIGNMENT=48"])).unwrap();
    let alignment = component.memory_needs().unwrap_err();
    assert!(alignment.message().contains("found alignment 48; expected a power of two"));

    let alloc = component.alloc(0, 64).unwrap_err();
    assert_eq!(alloc.kind(), ErrorKind::Unsupported);
    assert!(alloc.message().contains("`broken` does not provide `alloc`"), "{alloc}");

    let window = Window { kind: abi::TY_MEMORY_HOST, ..NO_WINDOW };
    // SAFETY: the component does not access the window.
    let status = unsafe { component.register(&window) }.unwrap_err();
    assert_eq!(status.kind(), ErrorKind::Plugin, "no slot has this status");
    assert!(status.message().contains("status -1234 without a message"), "{status}");
    assert!(
        status.to_string().contains("found status: -1234; expected 0, or -14 to -1"),
        "{status}"
    );

    let endpoint = component.endpoint(0).unwrap_err();
    assert!(endpoint.message().contains("4097 bytes into a buffer of 4096"), "{endpoint}");
}

#[test]
fn an_error_text_that_fills_its_room_is_read_whole_and_no_further() {
    let mut component = open(&broken(&[])).unwrap();
    let error = component.connect(0, b"any").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert_eq!(error.rank(), Some(5));
    let expected = format!("{}\u{fffd}", "x".repeat(abi::TY_ERROR_MESSAGE - 1));
    assert_eq!(error.message(), expected);
}
