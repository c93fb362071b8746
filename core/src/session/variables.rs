//! Variables of the environment whose names are nearly those that this project reads.

use crate::config::wording::nearest;

/// The variables that the program, the package and its launcher read: `docs/environment.md` says what each does.
const READ: [&str; 13] = [
    "TOKENYARD_BOOTSTRAP",
    "TOKENYARD_CONFIG",
    "TOKENYARD_INTERFACE",
    "TOKENYARD_LAUNCHER",
    "TOKENYARD_LOCAL_RANK",
    "TOKENYARD_LOG",
    "TOKENYARD_OUTPUT",
    "TOKENYARD_PORT",
    "TOKENYARD_RANK",
    "TOKENYARD_RANKS",
    "TOKENYARD_REPORTS",
    "TOKENYARD_SECRET",
    "TOKENYARD_SECRET_FILE",
];

/// Warns of misspelt variables: nothing reads them, so what they ask for does not happen.
pub(super) fn misspelt() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let found: Vec<String> = names.filter_map(|name| warning(&name)).collect();
    found.iter().for_each(|text| tracing::warn!("{text}"));
    found
}

fn warning(name: &str) -> Option<String> {
    if !name.starts_with("TOKEN") || READ.contains(&name) {
        return None;
    }
    let meant = nearest(name, &READ)?;
    Some(format!("found the variable {name}, which nothing reads; did you mean {meant}?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_nearly_one_of_ours_is_named_with_the_one_that_is_meant() {
        let meant =
            |name| warning(name).and_then(|text| text.split(" mean ").nth(1).map(str::to_owned));
        assert_eq!(meant("TOKENYARD_CONFG").as_deref(), Some("TOKENYARD_CONFIG?"));
        assert_eq!(meant("TOKENYRAD_LOG").as_deref(), Some("TOKENYARD_LOG?"));
        for fine in ["TOKENYARD_RANK", "TOKENYARD_RANKS", "TOKENYARD_MY_OWN", "TOKEN", "CONFIG"] {
            assert_eq!(meant(fine), None, "{fine}");
        }
    }

    #[test]
    fn the_page_of_variables_has_each_of_them() {
        let page = include_str!("../../../docs/environment.md");
        for name in READ {
            assert!(page.contains(&format!("`{name}`")), "{name}");
        }
    }
}
