//! A report as text for people.

use std::fmt::Write;

use tokenyard_errors::words::seconds;

use super::format::{Peer, Report, Traffic};
use super::words::{activity, awaited, call, transport};

/// The report in lines, for a terminal or a file.
pub fn text(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut out, report);
    out
}

fn write(out: &mut String, r: &Report) -> std::fmt::Result {
    writeln!(
        out,
        "tokenyard {}: report of rank {} of {} at {}",
        r.version, r.rank, r.ranks, r.time
    )?;
    writeln!(out, "  job {}, host {}, process {}", r.job, r.host, r.pid)?;
    writeln!(out, "  why: {} ({})", r.reason.kind, r.reason.text)?;
    writeln!(out, "  now: {}", activity(r))?;
    if let Some(wait) = &r.wait {
        let word = if wait.given_up { "gave up waiting" } else { "waits" };
        writeln!(
            out,
            "  {word} for rank {}: {}, {} signal {} at {} of {}, for {}",
            wait.peer,
            awaited(wait),
            wait.level,
            wait.signal,
            wait.found,
            wait.expected,
            seconds(wait.age_ms)
        )?;
    }
    if r.activity.recent.len() > 1 {
        let recent: Vec<_> = r.activity.recent.iter().map(call).collect();
        writeln!(out, "  last of each slot: {}", recent.join(", "))?;
    }
    let slowest = r.slowest.iter().map(|s| format!("rank {} {}", s.rank, seconds(s.waited_ms)));
    let slowest: Vec<_> = slowest.collect();
    if !slowest.is_empty() {
        writeln!(out, "  waited longest for: {}", slowest.join(", "))?;
    }
    for health in &r.transports {
        writeln!(out, "  {}", transport(health))?;
    }
    for queue in &r.queues {
        writeln!(
            out,
            "  {} queue {}: {} posted, {} done, {} of {} in flight",
            queue.level, queue.queue, queue.posted, queue.done, queue.in_flight, queue.depth
        )?;
    }
    r.peers.iter().try_for_each(|peer| write_peer(out, peer))?;
    let name = |component: &Option<String>| component.clone().unwrap_or_else(|| "none".into());
    let (up, down) = (name(&r.components.scale_up), name(&r.components.scale_out));
    writeln!(out, "  kernels {}, scale-up {up}, scale-out {down}", r.components.kernels)?;
    writeln!(
        out,
        "  config {} ({}): deadline_ms = {}, late_ms = {}, on_failure = \"{}\"",
        r.config.file, r.config.digest, r.config.deadline_ms, r.config.late_ms, r.config.on_failure
    )
}

fn write_peer(out: &mut String, peer: &Peer) -> std::fmt::Result {
    let masked = if peer.masked { ", masked" } else { "" };
    let why = if peer.why.is_empty() { String::new() } else { format!(" ({})", peer.why) };
    writeln!(
        out,
        "  rank {} on {} (process {}): {}{why}{masked}, last heartbeat {} ago, waited for {}",
        peer.rank,
        peer.host,
        peer.pid,
        peer.state,
        seconds(peer.heard_ms),
        seconds(peer.waited_ms)
    )?;
    peer.links.iter().try_for_each(|link| write_link(out, link))
}

fn write_link(out: &mut String, link: &Traffic) -> std::fmt::Result {
    let Some(c) = &link.counts else {
        return writeln!(out, "    {} {}: not counted", link.level, link.name);
    };
    writeln!(
        out,
        "    {} {}: signals {} sent, {} received of {} expected; commands {} posted, {} done; {} bytes put",
        link.level, link.name, c.sent, c.received, c.expected, c.posted, c.done, c.bytes
    )
}
