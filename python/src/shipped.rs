//! The configs that come with the package.

use tokenyard_core::{Error, ErrorKind, Result};
use toml::Table;

macro_rules! files {
    ($($name:literal)*) => {
        [$(($name, include_str!(concat!("../../configs/", $name, ".toml")))),*]
    };
}

/// Names and texts of the files in `configs`.
const FILES: [(&str, &str); 14] = files!(
    "cpu" "domains" "efa" "gin" "ibgda" "libfabric" "nvlink" "nvlink-efa" "nvlink-proxy" "nvlink-verbs" "proxy"
    "rocm" "rocm-verbs" "verbs"
);

/// Keys that a caller sets in place of the file.
#[derive(Debug)]
pub(crate) struct Keys<'a> {
    pub(crate) deadline_ms: u64,
    pub(crate) late_ms: u64,
    /// Of the kernel set, as the next one; `None` leaves what the file says.
    pub(crate) decode: Option<&'a str>,
    pub(crate) sms: Option<u32>,
}

/// The text of the config of this name, with other keys.
///
/// # Errors
/// There is no such config; a number that TOML cannot hold.
pub(crate) fn text(name: &str, keys: &Keys<'_>) -> Result<String> {
    let fail = |text: String| Error::new(ErrorKind::Config, "read config", text);
    let Some((_, text)) = FILES.iter().find(|(file, _)| *file == name) else {
        let names = FILES.map(|(file, _)| file).join(", ");
        return Err(fail(format!("found {name:?}; expected one of {names}")));
    };
    let change = || -> Option<Table> {
        let mut table: Table = text.parse().ok()?;
        let world = section(&mut table, "world")?;
        world.insert("deadline_ms".into(), i64::try_from(keys.deadline_ms).ok()?.into());
        world.insert("late_ms".into(), i64::try_from(keys.late_ms).ok()?.into());
        let kernels = section(&mut table, "kernels")?;
        let name = kernels.get("use")?.as_str()?.to_owned();
        let set = section(kernels, &name)?;
        if let Some(decode) = keys.decode {
            set.insert("decode".into(), decode.into());
        }
        if let Some(sms) = keys.sms {
            // Of all work of an operation: some would take all multiprocessors beside these.
            for key in ["sms", "local_sms"] {
                set.insert(key.into(), i64::from(sms).into());
            }
        }
        Some(table)
    };
    let table = change().ok_or_else(|| {
        let (deadline, late) = (keys.deadline_ms, keys.late_ms);
        fail(format!("found deadline_ms = {deadline}, late_ms = {late}; expected them below 2^63"))
    })?;
    Ok(table.to_string())
}

/// A table's table of this name, which may be missing.
fn section<'t>(table: &'t mut Table, name: &str) -> Option<&'t mut Table> {
    table.entry(name).or_insert_with(|| Table::new().into()).as_table_mut()
}
