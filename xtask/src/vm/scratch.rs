//! A folder that is removed when this process ends, however it ends.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// A new folder. A child process removes it once this value is dropped or this process has ended, by Ctrl-C
/// or a kill too: the end of this process ends the child's input.
pub(super) struct Scratch {
    path: PathBuf,
    remover: Child,
}

impl Scratch {
    pub(super) fn new(parent: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("scratch-")
            .tempdir_in(parent)
            .with_context(|| format!("make a folder in {}", parent.display()))?;
        let remover = remover(folder.path()).context("start the remover of a folder")?;
        Ok(Self { path: folder.keep(), remover })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

fn remover(path: &Path) -> io::Result<Child> {
    Command::new("sh")
        .args(["-c", "cat; exec rm -rf \"$1\"", "sh"])
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        // Ctrl-C goes to this process's group.
        .process_group(0)
        .spawn()
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(self.remover.stdin.take());
        // Fails only if another call has waited for the child, and there is none.
        let _ = self.remover.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_goes_with_its_owner_and_with_all_that_is_in_it() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(parent.path()).unwrap();
        let path = scratch.path().to_path_buf();
        std::fs::create_dir(path.join("a")).unwrap();
        std::fs::write(path.join("a/b"), "text").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }
}
