//! Words that messages share.

use std::fmt::Display;

/// Most bytes of a list of names: 12 of `mlx5_0`, 8 of `rdmap85s0`. Two lists and a fix have room in an error
/// that crosses the plugin ABI.
const MOST_OF_A_LIST: usize = 96;

/// As many of the names as a text has room for, at least one: `a, b and 3 more`; `none` where there
/// are none.
pub fn first_names<T: Display>(names: impl IntoIterator<Item = T>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| name.to_string()).collect();
    let mut bytes = 0;
    let fits = |name: &&String| {
        bytes += name.len() + ", ".len();
        bytes <= MOST_OF_A_LIST + ", ".len()
    };
    let shown = names.iter().take_while(fits).count().max(1);
    match names.len().saturating_sub(shown) {
        0 if names.is_empty() => "none".to_owned(),
        0 => names.join(", "),
        more => format!("{} and {more} more", names[..shown].join(", ")),
    }
}

/// Milliseconds as seconds: `12.3 s`.
pub fn seconds(ms: u64) -> String {
    format!("{}.{} s", ms / 1000, ms % 1000 / 100)
}

/// A list of ranks as people write it: `rank 3`, `ranks 0-2, 5`.
pub fn ranks(list: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in list {
        match runs.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(*rank) => *end = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let one = |(start, end): &(u32, u32)| match start == end {
        true => start.to_string(),
        false => format!("{start}-{end}"),
    };
    let text = runs.iter().map(one).collect::<Vec<_>>().join(", ");
    if list.len() == 1 { format!("rank {text}") } else { format!("ranks {text}") }
}

/// The verb in singular or plural, for this number of ranks.
pub fn verb<'a>(list: &[u32], one: &'a str, more: &'a str) -> &'a str {
    if list.len() == 1 { one } else { more }
}

/// The text with a capital first letter.
pub fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_names_as_many_are_listed_as_there_is_room_for() {
        assert_eq!(first_names::<&str>([]), "none");
        assert_eq!(first_names(["a", "b"]), "a, b");
        let nics = |count: u32| first_names((0..count).map(|nic| format!("mlx5_{nic}")));
        assert!(nics(8).ends_with("mlx5_6, mlx5_7"), "{}", nics(8));
        let text = nics(32);
        assert!(text.starts_with("mlx5_0, ") && text.ends_with("mlx5_11 and 20 more"), "{text}");
        assert!(text.len() <= 96 + " and 20 more".len(), "{text}");
        let long = "x".repeat(200);
        assert_eq!(first_names([&long, &long]), format!("{long} and 1 more"));
    }
}
