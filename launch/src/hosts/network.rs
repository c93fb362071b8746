//! Switches, cables and addresses, by `ip` of iproute2.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, bail, ensure};

use super::spaces::{Spaces, inside};
use super::{Hosts, Net};

/// The longest that a link may take to come up.
const LINK_LIMIT: Duration = Duration::from_secs(20);

/// Joins the hosts.
pub(super) fn connect(switch: &Spaces, hosts: &[Arc<Spaces>]) -> Result<()> {
    let mut lines = Vec::new();
    for net in Net::BOTH {
        // Snooping would hold back the first IPv6 neighbour requests.
        lines.push(format!("link add {} type bridge mcast_snooping 0", bridge(net)));
        lines.push(format!("link set {} up", bridge(net)));
    }
    for (host, spaces) in hosts.iter().enumerate() {
        for net in Net::BOTH {
            let (port, interface) = (port(host, net), net.interface());
            let far = spaces.network_path();
            lines.push(format!("link add {port} type veth peer name {interface} netns {far}"));
            lines.push(format!("link set {port} master {} up", bridge(net)));
        }
    }
    ip(switch, &lines)?;
    for (host, spaces) in hosts.iter().enumerate() {
        let mut lines = vec!["link set lo up".to_owned()];
        for net in Net::BOTH {
            let interface = net.interface();
            lines.push(format!("addr add {}/24 dev {interface}", Hosts::address(host, net)));
            // No other host has this address, so duplicate address detection is off: it takes a
            // second.
            let v6 = Hosts::address_v6(host, net);
            lines.push(format!("addr add {v6}/64 dev {interface} nodad"));
            lines.push(format!("link set {interface} up"));
        }
        ip(spaces, &lines)?;
    }
    hosts.iter().try_for_each(|spaces| await_links(spaces, &Net::BOTH))
}

/// Waits until the kernel counts a host's links as running, which it does up to a second after they
/// come up. Until then, programs that list interfaces omit them.
pub(super) fn await_links(spaces: &Spaces, nets: &[Net]) -> Result<()> {
    inside(spaces, || {
        let start = Instant::now();
        for net in nets {
            let path = format!("/sys/class/net/{}/operstate", net.interface());
            while fs::read_to_string(&path).context("look at a link")?.trim() != "up" {
                ensure!(start.elapsed() < LINK_LIMIT, "{path} is not up after {LINK_LIMIT:?}");
                thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    })
}

/// The state of the switches' ports of a host.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ports {
    /// They forward.
    Forward,
    /// They are up and forward nothing.
    Swallow,
    /// They are down.
    Down,
}

pub(super) fn set_ports(switch: &Spaces, host: usize, nets: &[Net], to: Ports) -> Result<()> {
    let line = |net: &Net| {
        let state = match to {
            Ports::Forward => format!("master {} up", bridge(*net)),
            Ports::Swallow => "nomaster".to_owned(),
            Ports::Down => "down".to_owned(),
        };
        format!("link set {} {state}", port(host, *net))
    };
    ip(switch, &nets.iter().map(line).collect::<Vec<_>>())
}

fn bridge(net: Net) -> String {
    format!("switch-{}", net.interface())
}

fn port(host: usize, net: Net) -> String {
    format!("{}-{}", Hosts::name(host), net.interface())
}

/// Runs lines of `ip` in a network, up to the first that fails.
fn ip(spaces: &Spaces, lines: &[String]) -> Result<()> {
    let text = lines.join("\n") + "\n";
    let output = inside(spaces, || {
        let mut child = Command::new("ip")
            .env_remove("TOKENYARD_SECRET")
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("run ip. Fix: apt-get install iproute2")?;
        if let Some(mut stdin) = child.stdin.take() {
            // Fails if `ip` has already ended; its own output then states the reason.
            let _ = stdin.write_all(text.as_bytes());
        }
        child.wait_with_output().context("run ip")
    })?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("make hosts: ip -batch - ended with {}: {}\n{text}", output.status, errors.trim());
    }
    Ok(())
}
