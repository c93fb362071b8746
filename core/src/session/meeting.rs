//! Names of job, hosts and processes, which ranks exchange at the start, for reports.

use super::reporter::Meeting;
use crate::bootstrap::Members;
use crate::{Error, ErrorKind, Result};

/// Exchanges host and process of all ranks, and a name for the job: that of rank 0, or of the first
/// present rank. Collective.
pub(crate) fn meet(members: &Members<'_>) -> Result<Meeting> {
    let mine = serde_json::json!({
        "host": crate::machine::host_name(),
        "pid": std::process::id(),
        "job": job_name()?,
    });
    let all = members.all_gather("reports", mine.to_string().as_bytes())?;
    let reports: Vec<Option<serde_json::Value>> =
        all.iter().map(|bytes| serde_json::from_slice(bytes).ok()).collect();
    let text = |value: &serde_json::Value, key: &str, allowed: fn(char) -> bool| -> String {
        let text = value[key].as_str().unwrap_or_default();
        text.chars().filter(|c| allowed(*c)).take(255).collect()
    };
    let place = |value: &serde_json::Value| {
        (text(value, "host", |c| !c.is_control()), value["pid"].as_u64().unwrap_or(0) as u32)
    };
    let job = reports.iter().flatten().next();
    let job = job.map(|value| text(value, "job", |c| c.is_ascii_alphanumeric() || c == '-'));
    let ranks = reports.iter().map(|value| value.as_ref().map(place)).collect();
    Ok(Meeting { job: job.unwrap_or_default(), ranks })
}

/// The scheduler's name of the job, where there is one, and eight random digits that distinguish
/// communicators.
fn job_name() -> Result<String> {
    let names = ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE"];
    let name = names.iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default();
    let name: String =
        name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(40).collect();
    let digits = getrandom::u32().map_err(|error| {
        Error::new(ErrorKind::System, "name job", format!("no random bytes: {error}"))
    })?;
    Ok(if name.is_empty() { format!("{digits:08x}") } else { format!("{name}-{digits:08x}") })
}
