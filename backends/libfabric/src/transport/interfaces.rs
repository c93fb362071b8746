//! The network interfaces of this machine, from sysfs.

use std::path::Path;

/// The folder in which the kernel lists them.
pub(super) const CLASS: &str = "/sys/class/net";

const IFF_UP: u32 = 1;
const IFF_LOOPBACK: u32 = 8;

/// Names of the interfaces in the folder `class` that are up and are not loopback.
pub(super) fn up(class: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(class).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| {
            let flags = std::fs::read_to_string(entry.path().join("flags")).unwrap_or_default();
            let flags = flags.trim().trim_start_matches("0x");
            u32::from_str_radix(flags, 16).is_ok_and(|it| it & (IFF_UP | IFF_LOOPBACK) == IFF_UP)
        })
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_interfaces_that_are_up_and_leave_the_machine_are_named() {
        let class = std::env::temp_dir().join(format!("tokenyard-net-{}", std::process::id()));
        for (name, flags) in [
            ("lo", "0x9\n"),
            ("eth1", "0x1003\n"),
            ("eth0", "0x1043"),
            ("eth2", "0x1002"),
            ("x", "?"),
        ] {
            std::fs::create_dir_all(class.join(name)).unwrap();
            std::fs::write(class.join(name).join("flags"), flags).unwrap();
        }
        std::fs::create_dir_all(class.join("none")).unwrap();
        let found = up(&class);
        std::fs::remove_dir_all(&class).unwrap();
        assert_eq!(found, ["eth0", "eth1"]);
        assert!(up(&class).is_empty());
    }
}
