//! The secret that the ranks of one job share.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;

use super::noise;
use tokenyard_errors::{Error, ErrorKind, Result};

/// Holds the secret itself.
pub const SECRET_VARIABLE: &str = "TOKENYARD_SECRET";
/// Names a file that holds the secret.
pub const SECRET_FILE_VARIABLE: &str = "TOKENYARD_SECRET_FILE";

/// The fewest characters of a secret.
pub const MIN_SECRET_BYTES: usize = 16;
const MAX_SECRET_BYTES: usize = 4096;
const OPERATION: &str = "read job secret";

/// `TOKENYARD_SECRET`, once it was removed from the environment.
static TAKEN: OnceLock<String> = OnceLock::new();

/// Removes `TOKENYARD_SECRET` from the environment of this process, so that processes that it or its
/// plugins start do not inherit the secret. [`environment`] still finds it.
///
/// # Safety
/// As [`std::env::remove_var`]: no other thread may read or write the environment meanwhile. Call it
/// first in `main`.
pub unsafe fn take_secret_from_environment() {
    if let Ok(secret) = std::env::var(SECRET_VARIABLE) {
        let _ = TAKEN.set(secret);
        // SAFETY: the caller promises that no other thread reads or writes the environment.
        unsafe { std::env::remove_var(SECRET_VARIABLE) };
    }
}

/// A variable of the environment; [`SECRET_VARIABLE`] also after it was removed.
pub fn environment(name: &str) -> Option<String> {
    let taken = || TAKEN.get().filter(|_| name == SECRET_VARIABLE).cloned();
    std::env::var(name).ok().or_else(taken)
}

/// The secret by which a process proves that it belongs to the job. Never printed by `Debug`; there is
/// no `Display`.
///
/// Without a secret, ranks may meet on the loopback interface only.
#[derive(Clone)]
pub struct Secret(Option<String>);

impl Secret {
    /// No secret: loopback only.
    pub fn none() -> Self {
        Self(None)
    }

    /// A fresh secret of 32 random bytes.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the operating system gives no random bytes.
    pub fn generate() -> Result<Self> {
        let bytes: [u8; 32] = noise::random()?;
        Ok(Self(Some(super::text::hex(&bytes))))
    }

    /// The secret `text`, of 16 to 4096 bytes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] when it is shorter or longer.
    pub fn from_text(text: &str) -> Result<Self> {
        if (MIN_SECRET_BYTES..=MAX_SECRET_BYTES).contains(&text.len()) {
            return Ok(Self(Some(text.to_owned())));
        }
        Err(refuse(format!(
            "found a secret of {} bytes, expected {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}",
            text.len()
        ))
        .with_fix("make one with `openssl rand -hex 32`"))
    }

    /// The secret in `path`, less the white space around it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] when it is no regular file of this user with mode 0600 or
    /// stricter, or its length is wrong; [`ErrorKind::System`] when it cannot be read.
    pub fn from_file(path: &Path) -> Result<Self> {
        let file = open_private(path, OPERATION)?;
        let mut text = String::new();
        // Reads one byte more than allowed, so that a longer file is noticed.
        file.take(MAX_SECRET_BYTES as u64 + 1)
            .read_to_string(&mut text)
            .map_err(|error| Error::system(OPERATION, "cannot read it", error))
            .and_then(|_| Self::from_text(text.trim()))
            .map_err(|error| error.with_context("file", path.display()))
    }

    /// The secret that the environment names, or none.
    ///
    /// `env` looks a variable up; `TOKENYARD_SECRET` holds the secret, `TOKENYARD_SECRET_FILE` the
    /// path of a file with it. An empty variable counts as unset.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] when both are set, and the errors of [`Secret::from_text`] and
    /// [`Secret::from_file`].
    pub fn from_env(env: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let get = |name: &str| env(name).filter(|value| !value.is_empty());
        match (get(SECRET_VARIABLE), get(SECRET_FILE_VARIABLE)) {
            (None, None) => Ok(Self::none()),
            (Some(text), None) => Self::from_text(&text)
                .map_err(|error| error.with_context("variable", SECRET_VARIABLE)),
            (None, Some(path)) => Self::from_file(Path::new(&path))
                .map_err(|error| error.with_context("variable", SECRET_FILE_VARIABLE)),
            (Some(_), Some(_)) => Err(refuse(format!(
                "found both {SECRET_VARIABLE} and {SECRET_FILE_VARIABLE}, expected one of them"
            ))
            .with_fix(format!("unset {SECRET_VARIABLE}"))),
        }
    }

    /// True if there is no secret.
    pub fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// The secret itself, for a child's environment or a file of mode 0600. `None` if there is no
    /// secret.
    pub fn reveal(&self) -> Option<&str> {
        self.0.as_deref()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default().as_bytes()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_none() { "Secret(none)" } else { "Secret(set, not shown)" })
    }
}

/// Opens a file that only this user can write or read.
pub(super) fn open_private(path: &Path, operation: &'static str) -> Result<File> {
    let (file, about) = tokenyard_files::open(path).map_err(|error| {
        let kind = if error.io().is_some() { ErrorKind::System } else { ErrorKind::InvalidInput };
        Error::file(kind, operation, &error)
    })?;
    check_private(&about, operation).map_err(|error| error.with_context("file", path.display()))?;
    Ok(file)
}

/// Refuses a file that other users could have written or read.
fn check_private(meta: &std::fs::Metadata, operation: &'static str) -> Result<()> {
    let refuse = |message| Error::new(ErrorKind::InvalidInput, operation, message);
    let (mode, owner, us) = (meta.mode() & 0o7777, meta.uid(), rustix::process::geteuid().as_raw());
    if owner != us {
        return Err(refuse(format!("found a file of user id {owner}, expected this user's, {us}"))
            .with_fix("let the file belong to the user that runs the ranks"));
    }
    if mode & !0o600 != 0 {
        return Err(refuse(format!("found mode {mode:04o}, expected 0600 or stricter"))
            .with_fix("chmod 600 the file"));
    }
    Ok(())
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::InvalidInput, OPERATION, message)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const TEXT: &str = "0123456789abcdef";

    fn file_of_mode(text: &str, mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn a_private_file_is_read_and_trimmed() {
        for mode in [0o600, 0o400] {
            let file = file_of_mode(&format!("{TEXT}\n"), mode);
            assert_eq!(Secret::from_file(file.path()).unwrap().reveal(), Some(TEXT));
        }
    }

    #[test]
    fn a_file_that_others_can_use_is_refused_with_its_mode_and_the_fix() {
        for mode in [0o640, 0o604, 0o620, 0o700] {
            let file = file_of_mode(TEXT, mode);
            let error = Secret::from_file(file.path()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            let text = error.to_string();
            assert!(text.contains(&format!("found mode {mode:04o}, expected 0600")), "{text}");
            assert!(text.contains("chmod 600") && !text.contains(TEXT), "{text}");
        }
    }

    #[test]
    fn a_folder_and_a_missing_file_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let error = Secret::from_file(folder.path()).unwrap_err();
        assert!(error.message().contains("found a folder, expected a regular file"), "{error}");
        let missing = folder.path().join("none");
        let error = Secret::from_file(&missing).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System);
        assert!(error.to_string().contains(missing.to_str().unwrap()), "{error}");
    }

    #[test]
    fn a_fifo_is_refused_by_its_kind_without_waiting_for_a_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
        let error = Secret::from_file(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.message().contains("found a FIFO, expected a regular file"), "{error}");
    }

    #[test]
    fn a_short_secret_is_refused_and_not_printed() {
        let error = Secret::from_env(&|name| (name == SECRET_VARIABLE).then(|| "short!".into()));
        let text = error.unwrap_err().to_string();
        assert!(text.contains("6 bytes, expected 16") && text.contains(SECRET_VARIABLE), "{text}");
        assert!(!text.contains("short!"));
    }

    #[test]
    fn the_environment_gives_none_text_file_or_a_conflict() {
        let file = file_of_mode(TEXT, 0o600);
        let path = file.path().to_str().unwrap().to_owned();
        let text_only = |name: &str| (name == SECRET_VARIABLE).then(|| TEXT.to_owned());
        let file_only = |name: &str| (name == SECRET_FILE_VARIABLE).then(|| path.clone());
        assert!(Secret::from_env(&|_| None).unwrap().is_none());
        assert!(Secret::from_env(&|_| Some(String::new())).unwrap().is_none());
        assert_eq!(Secret::from_env(&text_only).unwrap().reveal(), Some(TEXT));
        assert_eq!(Secret::from_env(&file_only).unwrap().reveal(), Some(TEXT));
        let both = Secret::from_env(&|name| text_only(name).or_else(|| file_only(name)));
        assert!(both.unwrap_err().message().contains("both"));
    }

    #[test]
    fn generated_secrets_differ_and_are_never_printed() {
        let (one, two) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        assert_ne!(one.reveal(), two.reveal());
        let text = one.reveal().unwrap();
        assert_eq!(text.len(), 64);
        assert_eq!(Secret::from_text(text).unwrap().reveal(), Some(text));
        assert!(!format!("{one:?}").contains(text));
    }
}
