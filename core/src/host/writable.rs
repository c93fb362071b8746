//! Finds other users who can change a plugin: its code runs with this user's rights.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const GROUP_WRITE: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// A file or folder that other users may write, so that they choose the code that runs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Writable {
    path: PathBuf,
    kind: &'static str,
    mode: u32,
    owner: u32,
}

impl fmt::Display for Writable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, kind, mode, owner } = self;
        write!(f, "{kind} {}, mode {mode:04o}, owner {owner}", path.display())
    }
}

/// Warns, once each, of files and folders that other users may write: the file at `path`, and the
/// folders above it.
pub(super) fn warn(path: &Path) {
    static WARNED: Mutex<BTreeSet<Writable>> = Mutex::new(BTreeSet::new());
    for found in writable(path) {
        if WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(found.clone()) {
            tracing::warn!(
                "plugin {}: other users may write {found}, and so choose the code that runs here. Fix: \
                 chmod go-w it, and let it belong to root or to this user",
                path.display()
            );
        }
    }
}

/// The files and folders that other users may write, of the given path and of the targets of its links.
fn writable(path: &Path) -> BTreeSet<Writable> {
    let led = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let user = rustix::process::geteuid().as_raw();
    [path, &led]
        .into_iter()
        .flat_map(Path::ancestors)
        // Links are followed, because the mode of a link has no meaning; their targets are checked,
        // too.
        .filter_map(|path| Some((path, std::fs::metadata(path).ok()?)))
        .filter(|(_, about)| others_may_write(about, user))
        .map(|(path, about)| Writable {
            path: path.to_owned(),
            kind: if about.is_dir() { "the folder" } else { "the file" },
            mode: about.mode() & 0o7777,
            owner: about.uid(),
        })
        .collect()
}

fn others_may_write(about: &Metadata, user: u32) -> bool {
    let (mode, owner) = (about.mode(), about.uid());
    if owner != user && owner != 0 {
        return true;
    }
    // In a sticky folder no user can replace a file of another user.
    if about.is_dir() && mode & STICKY != 0 {
        return false;
    }
    // A group with the owner's own number holds only the owner, where each user has a private group.
    let group = mode & GROUP_WRITE != 0 && about.gid() != owner;
    group || mode & OTHERS_WRITE != 0
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn set(path: &Path, mode: u32) {
        set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    /// The findings below `folder`; the folders above it belong to the machine.
    fn found(path: &Path, folder: &Path) -> Vec<String> {
        let below = writable(path).into_iter().filter(|found| found.path.starts_with(folder));
        below.map(|found| found.to_string()).collect()
    }

    #[test]
    fn a_file_and_its_folders_are_named_with_mode_and_owner_where_others_may_write_them() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let folder = root.join("plugins");
        std::fs::create_dir(&folder).unwrap();
        let file = folder.join("libplugin.so");
        std::fs::write(&file, "").unwrap();
        set(&folder, 0o755);
        set(&file, 0o755);
        assert_eq!(found(&file, &root), Vec::<String>::new());

        let user = rustix::process::geteuid().as_raw();
        set(&file, 0o757);
        let wanted = format!("the file {}, mode 0757, owner {user}", file.display());
        assert_eq!(found(&file, &root), [wanted]);
        set(&file, 0o755);
        set(&folder, 0o777);
        let wanted = format!("the folder {}, mode 0777, owner {user}", folder.display());
        assert_eq!(found(&file, &root), [wanted]);
        // The same through a link from another folder.
        let link = root.join("link.so");
        symlink(&file, &link).unwrap();
        assert_eq!(found(&link, &root).len(), 1);
        // The mode of /tmp.
        set(&folder, 0o1777);
        assert_eq!(found(&file, &root), Vec::<String>::new());
    }

    #[test]
    fn what_belongs_to_another_user_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let about = file.as_file().metadata().unwrap();
        assert!(!others_may_write(&about, about.uid()));
        assert_eq!(others_may_write(&about, about.uid() + 1), about.uid() != 0);
    }
}
