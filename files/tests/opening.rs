//! Only regular files are opened, without waiting, and no more bytes are read than the caller asks for.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use tokenyard_files::{open, read, read_text};

/// The text of the refusal; a call that blocks fails the test instead of hanging it.
fn refusal(path: &Path) -> String {
    let (say, hear) = mpsc::channel();
    let path = path.to_owned();
    std::thread::spawn(move || say.send(open(&path).err().map(|error| error.to_string())));
    hear.recv_timeout(Duration::from_secs(60)).unwrap().unwrap()
}

fn fifo(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

#[test]
fn other_kinds_than_regular_files_are_refused_by_name_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let (pipe, socket) = (folder.path().join("pipe"), folder.path().join("socket"));
    fifo(&pipe);
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&pipe, &link).unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    for (path, kind) in [
        (pipe.as_path(), "a FIFO"),
        (&link, "a FIFO"),
        (&socket, "a socket"),
        (folder.path(), "a folder"),
        (Path::new("/dev/zero"), "a character device"),
    ] {
        let text = refusal(path);
        let wanted = format!("{}: found {kind}, expected a regular file. Fix: ", path.display());
        assert!(text.starts_with(&wanted), "{text}");
    }
}

#[test]
fn a_fifo_that_takes_the_place_of_a_file_does_not_block() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (folder.path().join("config.toml"), folder.path().join("file"));
    std::fs::write(&file, "text").unwrap();
    let pipe = folder.path().join("pipe");
    fifo(&pipe);
    // Both names are hard links, so that the two kinds of file are swapped as often as possible.
    std::fs::hard_link(&file, &path).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let next = folder.path().join("next");
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for from in [&pipe, &file] {
                    std::fs::hard_link(from, &next).unwrap();
                    std::fs::rename(&next, &path).unwrap();
                    let _ = std::fs::remove_file(&next);
                }
            }
        });
        for _ in 0..2000 {
            match open(&path) {
                Ok((_, about)) => assert!(about.is_file()),
                Err(error) => assert!(error.to_string().contains("found a FIFO"), "{error}"),
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_file_is_read_whole_up_to_the_size_that_was_stated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, "12345678").unwrap();
    assert_eq!(read(&path, 8).unwrap(), b"12345678");
    let text = read(&path, 7).unwrap_err().to_string();
    assert!(text.contains("found 8 bytes or more, expected at most 7"), "{text}");
    // A sparse file of 1 TiB is refused before a byte of it is read.
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let text = read(&path, 1 << 20).unwrap_err().to_string();
    assert!(text.contains("found 1099511627776 bytes"), "{text}");
    // A file of /proc reports a size of 0.
    assert!(!read(Path::new("/proc/self/status"), 1 << 16).unwrap().is_empty());
    let text = read(Path::new("/proc/self/status"), 5).unwrap_err().to_string();
    assert!(text.contains("expected at most 5"), "{text}");
}

#[test]
fn what_is_missing_or_not_text_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let text = refusal(&path);
    assert!(text.contains("No such file") && text.contains("Fix: correct the path"), "{text}");
    std::fs::write(&path, b"ab\xff").unwrap();
    let text = read_text(&path, 10).unwrap_err().to_string();
    assert!(text.contains("found no UTF-8 at byte 2"), "{text}");
}
