//! Parses bytes into a report.

use std::fmt;

use super::format::{Report, SCHEMA_VERSION};

/// The largest file that is read as a report, in bytes.
pub const MAX_BYTES: usize = 64 << 20;
/// The most ranks of a world.
const MAX_RANKS: u32 = 1 << 20;

/// The reason why bytes are no report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAReport(String);

impl fmt::Display for NotAReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotAReport {}

/// Reads a report. Unknown fields are ignored. A report of a later schema, in which a field may
/// have another meaning, is refused.
///
/// # Errors
/// The error states what is wrong with the bytes. Nothing panics.
pub fn read(bytes: &[u8]) -> Result<Report, NotAReport> {
    let refuse = |why: String| Err(NotAReport(why));
    if bytes.len() > MAX_BYTES {
        return refuse(format!("found {} bytes; expected at most {MAX_BYTES}", bytes.len()));
    }
    let mut value: serde_json::Value = match serde_json::from_slice(bytes) {
        Ok(value) => value,
        Err(error) if error.is_eof() && !bytes.is_empty() => {
            return refuse(format!("found a file that is cut off ({error}): copy it again"));
        }
        Err(error) => return refuse(format!("found no JSON ({error}); expected a report")),
    };
    match value.get("tokenyard_report").and_then(serde_json::Value::as_u64) {
        Some(found) if (1..=u64::from(SCHEMA_VERSION)).contains(&found) => {}
        Some(found) => {
            return refuse(format!(
                "found schema {found}; expected 1 to {SCHEMA_VERSION}: use the tokenyard that wrote it"
            ));
        }
        None => return refuse("found no `tokenyard_report`; expected a report".into()),
    }
    super::clean::clean(&mut value);
    let mut report: Report = match serde_json::from_value(value) {
        Ok(report) => report,
        Err(error) => return refuse(format!("found a report with a wrong field: {error}")),
    };
    let (rank, ranks) = (report.rank, report.ranks);
    if rank >= ranks || ranks > MAX_RANKS {
        return refuse(format!(
            "found rank {rank} of {ranks} ranks; expected a rank of 1 to {MAX_RANKS} ranks"
        ));
    }
    report.peers.retain(|peer| peer.rank < ranks && peer.rank != rank);
    report.peers.sort_by_key(|peer| peer.rank);
    report.peers.dedup_by_key(|peer| peer.rank);
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(text: &str) -> String {
        read(text.as_bytes()).expect_err("no report").to_string()
    }

    #[test]
    fn what_is_no_report_is_refused_with_what_was_found() {
        assert!(why("").contains("found no JSON"));
        assert!(why("{\"tokenyard_report\": 1, \"ra").contains("cut off"));
        assert!(why("{}").contains("no `tokenyard_report`"));
        assert!(why("[1]").contains("no `tokenyard_report`"));
        assert!(why(r#"{"tokenyard_report": 9}"#).contains("found schema 9"));
        assert!(why(r#"{"tokenyard_report": 1, "rank": 3, "ranks": 3}"#).contains("rank 3 of 3"));
        assert!(why(r#"{"tokenyard_report": 1, "rank": "x"}"#).contains("wrong field"));
        assert!(why(&"[".repeat(5000)).contains("found no JSON"));
    }

    #[test]
    fn fields_and_states_of_a_later_version_are_left_out() {
        let text = r#"{"tokenyard_report": 1, "rank": 0, "ranks": 2, "weather": {"rain": true},
            "activity": {"state": "levitating", "begun": 3}, "peers": [{"rank": 1}, {"rank": 9}]}"#;
        let report = read(text.as_bytes()).expect("a report");
        assert_eq!(report.activity.begun, 3);
        assert_eq!(report.activity.state, crate::report::State::Unknown);
        assert_eq!(report.peers.len(), 1, "a rank beyond the world is dropped");
    }

    #[test]
    fn reports_of_schema_1_are_read_with_their_older_keys() {
        let text = r#"{"tokenyard_report": 1, "rank": 0, "ranks": 1, "parts": {"kernels": "cpu"},
            "lanes": [{"level": "scale-up", "lane": 3}]}"#;
        let report = read(text.as_bytes()).expect("a report");
        assert_eq!(report.components.kernels, "cpu");
        assert_eq!(report.queues.first().map(|queue| queue.queue), Some(3));
    }

    #[test]
    fn nothing_of_a_file_reaches_a_terminal_as_a_command() {
        let text = r#"{"tokenyard_report": 1, "rank": 0, "ranks": 1, "host": "a\u001b[2Jb",
            "reason": {"text": "x\ny"}}"#;
        let report = read(text.as_bytes()).expect("a report");
        assert_eq!((report.host.as_str(), report.reason.text.as_str()), ("a [2Jb", "x y"));
    }
}
