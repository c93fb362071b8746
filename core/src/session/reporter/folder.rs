//! The folder that reports are written to.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::report::{Report, text};

use crate::config::Reports;
use crate::{Error, ErrorKind, Result};

/// Names the folder of reports, and overrides the config: an absolute path, or `none`.
pub const REPORTS_VARIABLE: &str = "TOKENYARD_REPORTS";

/// Most stored reports of one rank in one job. Requested reports are removed first.
const PER_RANK: usize = 8;
/// Most stored files in the system's temporary folder.
const IN_TEMP: usize = 4096;
/// An older hidden file was left by a process that ended.
const STALE: Duration = Duration::from_secs(60);

/// The folder of reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Folder {
    path: PathBuf,
    /// It is in the system's temporary folder: no other user may write there, and old files are
    /// removed.
    is_temporary: bool,
}

impl Folder {
    /// The folder that the variable names, or else the config; nothing where no reports are wanted.
    ///
    /// # Errors
    /// A variable that is no absolute path.
    pub(super) fn resolve(config: &Reports, variable: Option<&str>) -> Result<Option<Self>> {
        let chosen = match variable {
            None | Some("") => config.clone(),
            Some("none") => Reports::Nowhere,
            Some(path) if path.starts_with('/') => Reports::Folder(path.into()),
            Some(found) => {
                let text = format!(
                    "found {REPORTS_VARIABLE} = {found:?}; expected an absolute path, or none"
                );
                return Err(Error::new(ErrorKind::Config, "open communicator", text));
            }
        };
        Ok(match chosen {
            Reports::Nowhere => None,
            Reports::Folder(path) => Some(Self { path, is_temporary: false }),
            Reports::Temporary => {
                let user = rustix::process::geteuid().as_raw();
                let path = std::env::temp_dir().join(format!("tokenyard-reports-{user}"));
                Some(Self { path, is_temporary: true })
            }
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a report as text and as JSON, and returns the path of the latter. Each file is written
    /// whole or not at all.
    pub(super) fn write(&self, report: &Report) -> Result<PathBuf> {
        self.make()?;
        let stem = stem(report);
        let json = serde_json::to_vec(report).map_err(|error| {
            Error::new(ErrorKind::Internal, WRITE, "a report is no JSON").with_source(error)
        })?;
        self.put(&format!("{stem}.txt"), text(report).as_bytes())?;
        let path = self.put(&format!("{stem}.json"), &json)?;
        self.tidy(report, &stem);
        Ok(path)
    }

    fn make(&self) -> Result<()> {
        let failed = |what: &str, error| {
            Error::system(WRITE, format!("{} cannot be {what}", self.path.display()), error)
        };
        let made = DirBuilder::new().recursive(!self.is_temporary).mode(0o700).create(&self.path);
        match made {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(failed("made", error));
            }
            _ => {}
        }
        if !self.is_temporary {
            return Ok(());
        }
        // Any user can make a folder of this name there, or a link.
        let found = fs::symlink_metadata(&self.path).map_err(|error| failed("read", error))?;
        let user = rustix::process::geteuid().as_raw();
        if found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0 {
            return Ok(());
        }
        let text = format!(
            "found {} with owner {} and mode {:o}; expected a folder of user {user} with mode 700",
            self.path.display(),
            found.uid(),
            found.mode() & 0o7777
        );
        Err(Error::new(ErrorKind::System, WRITE, text)
            .with_fix(format!("remove it, or name another folder in {REPORTS_VARIABLE}")))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<PathBuf> {
        let path = self.path.join(name);
        let hidden = self.path.join(format!(".{name}"));
        let write = || {
            // In a folder that others can write to, it may be a link that leads elsewhere.
            let _ = fs::remove_file(&hidden);
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&hidden)?;
            file.write_all(bytes)?;
            fs::rename(&hidden, &path)
        };
        write().map_err(|error: std::io::Error| {
            // The rest of it is of no use.
            let _ = fs::remove_file(&hidden);
            Error::system(WRITE, format!("{} cannot be written", path.display()), error)
        })?;
        Ok(path)
    }

    /// Removes the oldest files where there are too many, but not the report that was just written.
    /// Files that cannot be removed stay.
    fn tidy(&self, report: &Report, written: &str) {
        let Ok(entries) = fs::read_dir(&self.path) else { return };
        let mut names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        self.remove_hidden(&names, &prefix(report));
        names.retain(|name| name.starts_with("tokenyard-"));
        if self.is_temporary && names.len() > IN_TEMP {
            self.remove_oldest(&names, names.len() - IN_TEMP);
        }
        let mine = prefix(report);
        let mut mine: Vec<&str> = names
            .iter()
            .filter(|name| name.starts_with(&mine))
            .filter_map(|name| name.strip_suffix(".json"))
            .filter(|name| *name != written)
            .collect();
        // An error is reported once, and so is a loss, which an error may report too; a request can be
        // repeated.
        let weight = |name: &str| {
            let kinds = ["-asked", "-masked"];
            kinds.iter().position(|kind| name.ends_with(kind)).unwrap_or(kinds.len())
        };
        mine.sort_by_key(|name| (weight(name), *name));
        for name in mine.iter().take(mine.len().saturating_sub(PER_RANK - 1)) {
            for extension in ["json", "txt"] {
                let _ = fs::remove_file(self.path.join(format!("{name}.{extension}")));
            }
        }
    }

    /// Removes the files of a process that ended while it wrote a report of this rank. A fresh file may
    /// be under way in another thread or process.
    fn remove_hidden(&self, names: &[String], prefix: &str) {
        let is_left = |path: &Path| {
            let written = fs::symlink_metadata(path).and_then(|found| found.modified()).ok();
            let age = written.and_then(|written| written.elapsed().ok());
            age.is_some_and(|age| age >= STALE)
        };
        let hidden = names
            .iter()
            .filter(|name| name.strip_prefix('.').is_some_and(|name| name.starts_with(prefix)));
        for path in hidden.map(|name| self.path.join(name)).filter(|path| is_left(path)) {
            let _ = fs::remove_file(path);
        }
    }

    fn remove_oldest(&self, names: &[String], count: usize) {
        let age = |name: &String| {
            let path = self.path.join(name);
            let written = fs::metadata(&path).and_then(|found| found.modified()).ok()?;
            Some((written, path))
        };
        let mut files: Vec<_> = names.iter().filter_map(age).collect();
        files.sort();
        for (_, path) in files.iter().take(count) {
            let _ = fs::remove_file(path);
        }
    }
}

const WRITE: &str = "write report";

/// The start of the names of all reports of a rank in a job.
fn prefix(report: &Report) -> String {
    let job = if report.job.is_empty() { "opening" } else { &report.job };
    format!("tokenyard-{job}-rank{:05}-", report.rank)
}

/// The name of a report, without its extension.
fn stem(report: &Report) -> String {
    let time: String = report.time.chars().filter(|c| !matches!(c, '-' | ':')).collect();
    let reason = report.reason.kind.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    format!("{}{time}-{reason}", prefix(report))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn report(second: u32, kind: &str) -> Report {
        let mut report = Report { job: "17-abcd".into(), ranks: 4, rank: 3, ..Report::default() };
        report.tokenyard_report = crate::report::SCHEMA_VERSION;
        report.time = format!("2026-11-22T02:51:{second:02}.000Z");
        report.reason.kind = kind.to_owned();
        report
    }

    fn folder() -> (tempfile::TempDir, Folder) {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("reports");
        (temp, Folder { path, is_temporary: true })
    }

    fn names(folder: &Folder) -> Vec<String> {
        let entries = fs::read_dir(&folder.path).unwrap().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_report_is_two_private_files_named_after_job_rank_time_and_reason() {
        let (_temp, folder) = folder();
        let path = folder.write(&report(7, "deadline")).unwrap();
        let stem = "tokenyard-17-abcd-rank00003-20261122T025107.000Z-deadline";
        assert_eq!(names(&folder), [format!("{stem}.json"), format!("{stem}.txt")]);
        let read = crate::report::read(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(read.rank, 3);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder.path), mode(&path)), (0o700, 0o600));
    }

    #[test]
    fn who_asks_for_ever_does_not_fill_the_disk_nor_push_out_an_error() {
        let (_temp, folder) = folder();
        folder.write(&report(0, "transport")).unwrap();
        for second in 1..30 {
            folder.write(&report(second, "asked")).unwrap();
        }
        let names = names(&folder);
        assert_eq!(names.len(), 2 * PER_RANK, "{names:?}");
        assert!(names.iter().any(|name| name.ends_with("-transport.json")), "{names:?}");
        assert!(names.iter().any(|name| name.contains("025129")), "the last one stays: {names:?}");
    }

    #[test]
    fn an_answer_stays_though_there_are_many_errors_of_earlier_openings() {
        let (_temp, folder) = folder();
        for second in 0..9 {
            folder.write(&report(second, "deadline")).unwrap();
        }
        let path = folder.write(&report(9, "asked")).unwrap();
        assert!(path.exists() && path.with_extension("txt").exists(), "{:?}", names(&folder));
        assert_eq!(names(&folder).len(), 2 * PER_RANK);
    }

    #[test]
    fn what_a_process_left_half_written_goes_and_what_is_under_way_stays() {
        let (_temp, folder) = folder();
        folder.make().unwrap();
        let hidden =
            |second, kind| folder.path.join(format!(".{}.json", stem(&report(second, kind))));
        let old = fs::File::create(hidden(1, "asked")).unwrap();
        old.set_modified(std::time::SystemTime::now() - 2 * STALE).unwrap();
        fs::File::create(hidden(2, "asked")).unwrap();
        folder.write(&report(3, "asked")).unwrap();
        assert!(!hidden(1, "asked").exists() && hidden(2, "asked").exists());
    }

    #[test]
    fn a_planted_link_is_not_followed() {
        let (temp, folder) = folder();
        folder.make().unwrap();
        let victim = temp.path().join("victim");
        fs::write(&victim, "mine").unwrap();
        let hidden = folder.path.join(format!(".{}.json", stem(&report(1, "asked"))));
        std::os::unix::fs::symlink(&victim, &hidden).unwrap();
        let path = folder.write(&report(1, "asked")).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
        assert!(fs::symlink_metadata(path).unwrap().is_file());
    }

    #[test]
    fn a_temporary_folder_that_others_can_write_to_is_refused() {
        let (_temp, folder) = folder();
        fs::create_dir(&folder.path).unwrap();
        fs::set_permissions(&folder.path, fs::Permissions::from_mode(0o777)).unwrap();
        let error = folder.write(&report(1, "asked")).unwrap_err().to_string();
        assert!(error.contains("mode 777") && error.contains("TOKENYARD_REPORTS"), "{error}");
        let elsewhere = tempfile::tempdir().unwrap();
        fs::remove_dir(&folder.path).unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &folder.path).unwrap();
        assert!(folder.write(&report(1, "asked")).is_err(), "a link leads elsewhere");
    }

    #[test]
    fn the_variable_counts_for_more_than_the_config() {
        let resolve = |config: &Reports, variable| {
            Folder::resolve(config, variable).map(|f| f.map(|f| f.path.display().to_string()))
        };
        let named = Reports::Folder("/var/reports".into());
        assert_eq!(resolve(&named, None).unwrap().as_deref(), Some("/var/reports"));
        assert_eq!(resolve(&named, Some("/else")).unwrap().as_deref(), Some("/else"));
        assert_eq!(resolve(&named, Some("none")).unwrap(), None);
        assert_eq!(resolve(&Reports::Nowhere, None).unwrap(), None);
        assert!(
            resolve(&Reports::Temporary, None).unwrap().unwrap().contains("tokenyard-reports-")
        );
        let error = resolve(&named, Some("reports")).unwrap_err().to_string();
        assert!(error.contains("TOKENYARD_REPORTS = \"reports\""), "{error}");
    }
}
