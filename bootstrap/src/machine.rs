//! Names of this machine, for reports and measurements. Cold: each call reads a file.

/// The processor's name in `/proc/cpuinfo`; `None` where the kernel does not give it.
pub fn cpu_model() -> Option<String> {
    model_name(&std::fs::read_to_string("/proc/cpuinfo").ok()?)
}

/// The release of the kernel, as `uname -r` prints it; `None` where it cannot be read.
pub fn kernel_release() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    Some(text.trim().to_owned())
}

/// This host's name; `unknown` where it cannot be read.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "unknown".to_owned(),
        name => name.chars().filter(|c| !c.is_control()).take(255).collect(),
    }
}

/// The identity of this machine: the boot of its kernel and the network of this process, which containers may have of
/// their own. Processes with the same identity reach each other at loopback addresses.
///
/// # Errors
/// The file that cannot be read.
pub fn identity() -> Result<String, (&'static str, std::io::Error)> {
    const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
    const NETWORK: &str = "/proc/self/ns/net";
    let boot = std::fs::read_to_string(BOOT_ID).map_err(|error| (BOOT_ID, error))?;
    let network = std::fs::read_link(NETWORK).map_err(|error| (NETWORK, error))?;
    let inode: String = network.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    Ok(format!("{}-{inode}", boot.trim()))
}

fn model_name(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_processor_names_the_machine() {
        let text =
            "processor\t: 0\nmodel name\t: Some CPU: 3 GHz\nprocessor\t: 1\nmodel name\t: B\n";
        assert_eq!(model_name(text).as_deref(), Some("Some CPU: 3 GHz"));
        assert_eq!(model_name("processor\t: 0\n"), None);
    }

    #[test]
    fn the_kernel_has_a_release() {
        assert!(kernel_release().is_some_and(|release| !release.is_empty()));
    }
}
