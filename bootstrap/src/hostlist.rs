//! Slurm's compressed list of hosts: `gpu[003-007,9],login1`.

use tokenyard_errors::{Error, ErrorKind, Result};

/// The most hosts that a list may name.
pub const MAX_HOSTS: usize = 65_536;

/// The hosts of `list`, in Slurm's order: the rightmost bracket counts fastest.
///
/// A bracket holds comma-separated numbers and ranges; leading zeros fix the width. A host may have
/// several brackets: `a[1-2]b[3-4]`.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] for a list that does not follow this grammar, names no host, or names
/// more than [`MAX_HOSTS`].
pub fn expand(list: &str) -> Result<Vec<String>> {
    let mut hosts = Vec::new();
    for pattern in split_outside_brackets(list)? {
        let mut expanded = vec![String::new()];
        let mut rest = pattern;
        while let Some((literal, tail)) = rest.split_once('[') {
            let Some((inside, after)) = tail.split_once(']') else {
                return Err(refuse(list, "an unclosed bracket"));
            };
            let numbers = expand_ranges(list, inside)?;
            if expanded.len() * numbers.len() + hosts.len() > MAX_HOSTS {
                return Err(too_many(list));
            }
            expanded = expanded
                .iter()
                .flat_map(|head| numbers.iter().map(move |n| format!("{head}{literal}{n}")))
                .collect();
            rest = after;
        }
        for mut host in expanded {
            host.push_str(rest);
            if host.is_empty() || host.contains(char::is_whitespace) {
                return Err(refuse(list, "an empty host or one with white space"));
            }
            hosts.push(host);
        }
        if hosts.len() > MAX_HOSTS {
            return Err(too_many(list));
        }
    }
    Ok(hosts)
}

fn split_outside_brackets(list: &str) -> Result<Vec<&str>> {
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in list.char_indices() {
        match c {
            '[' if inside => return Err(refuse(list, "a bracket within a bracket")),
            ']' if !inside => {
                return Err(refuse(list, "a closing bracket without its opening one"));
            }
            '[' => inside = true,
            ']' => inside = false,
            ',' if !inside => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    Ok(parts)
}

fn expand_ranges(list: &str, inside: &str) -> Result<Vec<String>> {
    let mut numbers = Vec::new();
    for range in inside.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| -> Result<u64> {
            if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
                return Err(refuse(list, "something that is no number in a bracket"));
            }
            text.parse().map_err(|_| refuse(list, "a number that is too large"))
        };
        let (from, to) = (number(first)?, number(last)?);
        if from > to {
            return Err(refuse(list, "a range that runs backwards"));
        }
        if to - from >= MAX_HOSTS as u64 || numbers.len() >= MAX_HOSTS {
            return Err(too_many(list));
        }
        // Slurm fixes the width by the first number alone: [08-11] is 08, 09, 10, 11.
        let width = if first.starts_with('0') { first.len() } else { 0 };
        numbers.extend((from..=to).map(|n| format!("{n:0width$}")));
    }
    Ok(numbers)
}

fn too_many(list: &str) -> Error {
    refuse(list, &format!("more than {MAX_HOSTS} hosts"))
}

fn refuse(list: &str, found: &str) -> Error {
    let shown = super::text::clean(list, 200);
    Error::new(
        ErrorKind::InvalidInput,
        "expand host list",
        format!("found {found} in {shown:?}, expected a list like \"gpu[003-007,9],login1\""),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_expand_as_slurm_writes_them() {
        let table: &[(&str, &[&str])] = &[
            ("login1", &["login1"]),
            ("a,b", &["a", "b"]),
            ("gpu[003-005,9],login1", &["gpu003", "gpu004", "gpu005", "gpu9", "login1"]),
            ("n[08-11]", &["n08", "n09", "n10", "n11"]),
            ("n[1,3,5-6]", &["n1", "n3", "n5", "n6"]),
            ("a[1-2]b[3-4]", &["a1b3", "a1b4", "a2b3", "a2b4"]),
            ("rack[1-2]-node[07]-ib", &["rack1-node07-ib", "rack2-node07-ib"]),
            ("n[0-1],m[0-1]", &["n0", "n1", "m0", "m1"]),
            ("node-1.cluster.local", &["node-1.cluster.local"]),
        ];
        for (list, hosts) in table {
            assert_eq!(&expand(list).unwrap(), hosts, "{list}");
        }
    }

    #[test]
    fn malformed_lists_are_refused_with_the_reason() {
        let table = [
            ("", "an empty host"),
            ("a,,b", "an empty host"),
            ("a b", "white space"),
            ("n[1-", "an unclosed bracket"),
            ("n1]", "without its opening"),
            ("n[1[2]]", "within a bracket"),
            ("n[]", "no number"),
            ("n[1-x]", "no number"),
            ("n[-3]", "no number"),
            ("n[5-2]", "backwards"),
            ("n[1-99999999999999999999]", "too large"),
            ("n[1-9999999]", "more than 65536 hosts"),
            ("n[1-60000]m[1-60000]", "more than 65536 hosts"),
        ];
        for (list, reason) in table {
            let error = expand(list).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.message().contains(reason), "{list}: {error}");
        }
    }

    proptest! {
        #[test]
        fn expanding_any_text_never_panics(list in "[a-c0-9,\\[\\]-]{0,30}") {
            let _ = expand(&list);
        }
    }
}
