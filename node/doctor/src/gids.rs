//! GIDs: which one would be used, and whether it reaches the others.

use tokenyard_machine::gid::{Preference, choose};
use tokenyard_machine::{Gid, GidKind, LinkLayer, Nic, NicFamily, Port};

use crate::nics::{hardware, port_name, used_ports};
use crate::rails::{REFUSED, SPARE, of_unusable};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    GID = "gid",
}

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    let named: Vec<u8> = report.job.asks.gid_indices.iter().copied().collect();
    for nic in hardware(report).into_iter().filter(|nic| nic.family != NicFamily::Efa) {
        report.judge_nic(nic, |report| {
            for port in used_ports(report, nic).into_iter().filter(|port| port.is_active()) {
                if named.is_empty() && port.link_layer.get() == Some(LinkLayer::Ethernet) {
                    address(report, nic, port);
                }
                named.iter().for_each(|index| entry(report, nic, port, *index));
            }
        });
    }
}

/// The entry that the config names, whatever it holds.
fn entry(report: &mut DoctorReport<'_>, nic: &Nic, port: &Port, index: u8) {
    if !port.can_carry() {
        return empty(report, nic, port);
    }
    let own = format!("`gid_index = {index}`");
    let found = port.gids.iter().find(|gid| gid.index == u32::from(index));
    let is_ethernet = port.link_layer.get() == Some(LinkLayer::Ethernet);
    let (verdict, text) = match found {
        None if port.gids.is_empty() => (Verdict::Broken, "no entry in the table".to_owned()),
        None => {
            let all = port.gids.iter().map(shown).collect::<Vec<_>>().join(", ");
            (Verdict::Broken, format!("no entry {index}; there are {all}"))
        }
        Some(gid) if !is_ethernet => (Verdict::Ok, format!("{index}: {} ({own})", gid.address)),
        Some(gid) if gid.kind.known() != Some(&GidKind::RoceV2) => {
            (Verdict::Unknown, format!("{}, by {own}: reaches its own segment only", shown(gid)))
        }
        Some(gid) if Preference::of(&gid.address).is_link_local() => {
            (Verdict::Unknown, format!("{}, by {own}: reaches its own segment only", shown(gid)))
        }
        Some(gid) => (Verdict::Ok, format!("{}, by {own}", shown(gid))),
    };
    let rule = choose(port.link_layer.get().unwrap_or(LinkLayer::Ethernet), &port.gids);
    let finding = report.note(&GID, Facility::Verbs, port_name(nic, port), verdict.on(text));
    if let Some(gid) = rule {
        finding.fix(format!("leave {own} out: by rule it is {}; or name that entry", shown(gid)));
    }
    if !is_ethernet {
        finding.expected("an entry that is there");
    }
}

/// A RoCE port without an address. The topology skips it, as it skips a port without a link.
fn empty(report: &mut DoctorReport<'_>, nic: &Nic, port: &Port) {
    let (verdict, refused) = of_unusable(report, nic);
    let subject = port_name(nic, port);
    match refused {
        Some((found, fix)) => report
            .note(&GID, Facility::of(nic), subject, verdict.on(found))
            .fix(fix)
            .impact(REFUSED),
        None => {
            let found = "no entry in the table".to_owned();
            let finding = report.note(&GID, Facility::of(nic), subject, verdict.on(found));
            match verdict {
                Verdict::Slow => finding.impact(
                    "its rail is missing: ranks that would use it share others, so they get half of the \
                     bandwidth or less",
                ),
                Verdict::Unknown => finding.impact(SPARE),
                _ => finding,
            }
        }
    };
}

fn address(report: &mut DoctorReport<'_>, nic: &Nic, port: &Port) {
    let chosen = choose(LinkLayer::Ethernet, &port.gids);
    let (verdict, found) = match chosen {
        Some(gid) => match Preference::of(&gid.address) {
            // Link-local addresses reach each other within one segment. This node does not know
            // which nodes share its segment.
            preference if preference.is_link_local() => {
                (Verdict::Unknown, format!("{}: reaches its own segment only", shown(gid)))
            }
            _ => (Verdict::Ok, shown(gid)),
        },
        None if port.gids.is_empty() => return empty(report, nic, port),
        None if port.gids.iter().any(|gid| gid.kind.known().is_none()) => {
            (Verdict::Unknown, "entries whose version the kernel does not show".to_owned())
        }
        None => {
            let v1 = port.gids.iter().map(shown).collect::<Vec<_>>().join(", ");
            (Verdict::Broken, format!("version 1 only: {v1}"))
        }
    };
    report.note(&GID, Facility::of(nic), port_name(nic, port), verdict.on(found));
}

/// `3: 10.0.0.1 (RoCE v2)`.
fn shown(gid: &Gid) -> String {
    let version = match gid.kind.known() {
        Some(GidKind::RoceV2) => "RoCE v2",
        Some(GidKind::IbOrRoceV1) => "RoCE v1",
        None => "version unknown",
    };
    let address = gid.ipv4().map_or_else(|| gid.address.to_string(), |v4| v4.to_string());
    format!("{}: {address} ({version})", gid.index)
}
