//! Ports: state, speed, packet size, errors.

use tokenyard_machine::{Fact, LinkLayer, Nic, NicFamily, Port, Silence};

use crate::nics::{
    NOT_RUN, function, hardware, majority, model, port_name, rails, rate, used_ports,
};
use crate::pci::capacity;
use crate::rails::{REFUSED, SPARE, of_unusable};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    NO_NIC = "nic-present",
    NAMED = "nic-named",
    STATE = "port-state",
    RATE = "port-rate",
    MTU = "mtu",
    ERRORS = "port-errors",
}

/// Counters of the physical link, and from where on they are worth a look. They count since the driver
/// was loaded: links flap when switches are restarted, and one reading does not show that a fault is present now.
const LINK_ERRORS: [(&str, u64); 4] = [
    ("symbol_error", 100),
    ("link_downed", 1),
    ("link_error_recovery", 1),
    ("port_rcv_errors", 100),
];
/// Counters of lost packets, likewise.
const LOSSES: [(&str, u64); 3] =
    [("out_of_sequence", 100), ("packet_seq_err", 100), ("local_ack_timeout_err", 10)];

/// Counters that do not grow on a network that is well. Packets out of sequence do, where it routes
/// adaptively.
const GROWING: [&str; 6] = [
    "symbol_error",
    "link_downed",
    "link_error_recovery",
    "port_rcv_errors",
    "packet_seq_err",
    "local_ack_timeout_err",
];

/// Bytes of headers and checks that the kernel keeps room for around the payload of a RoCE packet.
const ROCE_HEADERS: u32 = 96;

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    presence(report);
    named(report);
    for nic in hardware(report) {
        report.judge_nic(nic, |report| {
            for port in used_ports(report, nic) {
                state(report, nic, port);
                if port.is_active() {
                    speed(report, nic, port);
                    packet(report, nic, port);
                    errors(report, nic, port);
                }
            }
        });
    }
}

/// Judged only if a config needs NICs: a node without NICs is no fault by itself.
fn presence(report: &mut DoctorReport<'_>) {
    for (facility, name) in [(Facility::Verbs, "verbs"), (Facility::Efa, "efa")] {
        if !report.job.asks(facility) {
            continue;
        }
        let count = report.machine.nics.iter().filter(|nic| Facility::of(nic) == facility).count();
        let (verdict, found) = match count {
            0 => (Verdict::Broken, "none".to_owned()),
            count => (Verdict::Ok, count.to_string()),
        };
        report.note(&NO_NIC, facility, format!("NICs for {name}"), verdict.on(found));
    }
}

/// libfabric's providers for sockets take network interfaces.
fn named(report: &mut DoctorReport<'_>) {
    let machine = report.machine;
    let there = |name: &String| {
        machine.nics.iter().any(|nic| nic.name == *name)
            || machine.interfaces.iter().any(|interface| interface.name == *name)
    };
    let known: Vec<&str> = machine.nics.iter().take(8).map(|nic| nic.name.as_str()).collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    for name in &report.job.asks.nics {
        let judgement = match there(name) {
            true => Verdict::Ok.on("there"),
            false => Verdict::Broken.on(format!("not there; there are: {known}")),
        };
        report.note(&NAMED, Facility::Node, name, judgement);
    }
}

fn state(report: &mut DoctorReport<'_>, nic: &Nic, port: &Port) {
    let note = |report: &mut DoctorReport<'_>, verdict: Verdict, found: String, fix: String| {
        let judgement = verdict.on(found);
        report.note(&STATE, Facility::of(nic), port_name(nic, port), judgement).fix(fix);
    };
    let found = port.state_in_words();
    if port.state.known().is_none() {
        return note(report, Verdict::Unknown, found, nic.link_fix(port));
    }
    if port.is_active() {
        return note(report, Verdict::Ok, found, nic.link_fix(port));
    }
    let named = report.job.asks.nics.contains(&nic.name);
    let (verdict, refused) = of_unusable(report, nic);
    let is_refused = refused.is_some();
    let (found, fix) = refused.unwrap_or_else(|| (found, nic.link_fix(port)));
    let judgement = verdict.on(found);
    let finding = report.note(&STATE, Facility::of(nic), port_name(nic, port), judgement);
    finding.fix(fix);
    match (named, is_refused) {
        (true, _) => finding.impact("the config names this NIC: its ranks do not start"),
        (false, true) => finding.impact(REFUSED),
        (false, false) if verdict == Verdict::Unknown => finding.impact(SPARE),
        (false, false) => finding,
    };
}

fn speed(report: &mut DoctorReport<'_>, nic: &Nic, port: &Port) {
    let Some(found) = port.rate.known() else {
        let found = "the kernel shows no rate";
        report.note(&RATE, Facility::of(nic), port_name(nic, port), Verdict::Unknown.on(found));
        return;
    };
    let same = model(report, nic);
    // NICs for storage may be of the rails' board and have another rate.
    let serves = |nic: &Nic| rails(report).iter().any(|rail| rail.name == nic.name);
    let is_rail = serves(nic);
    let rates: Vec<u64> = hardware(report)
        .iter()
        .filter(|other| same.is_some() && model(report, other) == same)
        .filter(|other| serves(other) == is_rail)
        .flat_map(|other| other.ports.iter().filter(|port| port.is_active()))
        // The rate of a card may depend on its link layer.
        .filter(|other| other.link_layer == port.link_layer)
        .filter_map(|port| Some(port.rate.known()?.megabits))
        .collect();
    // If no rate has a majority, the fastest shows what the model can do.
    let usual = majority(&rates).or(rates.iter().max().copied()).unwrap_or(found.megabits);
    let lanes = found.lanes.map_or(String::new(), |lanes| format!(", {lanes} lanes"));
    let text = format!("{}{lanes}", rate(found.megabits));
    let far_below = slot(report, nic).filter(|slot| 4 * found.megabits <= *slot);
    let (verdict, expected) = match far_below {
        _ if found.megabits < usual => {
            (Verdict::Slow, format!("{}, as the others of its model", rate(usual)))
        }
        // All ports may have the same fault, or the switch may be no faster.
        Some(slot) => {
            (Verdict::Unknown, format!("more: its slot carries {}", rate(slot / 1000 * 1000)))
        }
        None if rates.len() > 1 => {
            (Verdict::Ok, format!("{}, as the others of its model", rate(usual)))
        }
        None => (Verdict::Ok, "the only one of its model: nothing to compare with".to_owned()),
    };
    report
        .note(&RATE, Facility::of(nic), port_name(nic, port), verdict.on(text))
        .expected(expected);
}

/// Megabits a second that PCI Express could carry for each of the card's working ports.
fn slot(report: &DoctorReport<'_>, nic: &Nic) -> Option<u64> {
    let link = function(report, nic)?.link;
    let ports = nic.ports.iter().filter(|port| port.is_active()).count().max(1) as u64;
    Some(capacity(link.max_speed.get()?, link.max_width.get()?) / ports)
}

const INSTALL: &str =
    "apt install ibverbs-utils (dnf: libibverbs-utils), then run the doctor again";
const BY_HAND: &str = "run ibv_devinfo by hand: it shows active_mtu, or why it fails";

fn packet(report: &mut DoctorReport<'_>, nic: &Nic, port: &Port) {
    if nic.family == NicFamily::Efa {
        // SRD's packets are the adapter's own business.
        return;
    }
    let roce = port.link_layer == Fact::Known(LinkLayer::Ethernet);
    let interface = interface_of(nic, port);
    let mtu = interface
        .and_then(|name| report.machine.interfaces.iter().find(|i| i.name == name))
        .and_then(|interface| interface.mtu.get());
    let active = nic.active_mtu.get(&port.number).copied();
    let (bytes, text) = match (active, mtu) {
        (Some(bytes), _) => (bytes, format!("{bytes} bytes")),
        (None, Some(mtu)) if roce => {
            let bytes = roce_payload(mtu);
            (bytes, format!("{bytes} bytes (interface mtu {mtu})"))
        }
        // InfiniBand: no file shows it.
        _ if !roce && rails(report).iter().any(|rail| rail.name == nic.name) => {
            let silent = report.machine.silent.get("ibv_devinfo");
            let (found, fix) = match silent {
                Some(why @ Silence::NotFound { .. }) => (why.in_words("ibv_devinfo"), INSTALL),
                Some(why @ Silence::NotRun) => (why.in_words("ibv_devinfo"), NOT_RUN),
                Some(why) => (why.in_words("ibv_devinfo"), BY_HAND),
                None => ("ibv_devinfo does not list this port".to_owned(), BY_HAND),
            };
            let judgement = Verdict::Unknown.on(format!("unknown: {found}"));
            report.note(&MTU, Facility::of(nic), port_name(nic, port), judgement).fix(fix);
            return;
        }
        _ => return,
    };
    let verdict = if bytes < 4096 { Verdict::Slow } else { Verdict::Ok };
    let finding = report.note(&MTU, Facility::of(nic), port_name(nic, port), verdict.on(text));
    if let (true, Some(name)) = (roce, interface) {
        finding
            .fix(format!("ip link set {name} mtu 9000, on all nodes and switches of the fabric"));
    } else if !roce {
        finding.fix(
            "ibv_devinfo shows max_mtu and active_mtu: look for the port or switch of a smaller \
                     one",
        );
    }
}

/// The interface that carries the port's packets: the one that its GIDs name, else the NIC's own.
fn interface_of<'a>(nic: &'a Nic, port: &'a Port) -> Option<&'a str> {
    let by_gid = port.gids.iter().find_map(|gid| gid.interface.known());
    by_gid.or_else(|| nic.interfaces.first()).map(String::as_str)
}

/// The largest payload that the kernel lets a RoCE packet have in an interface's packets.
fn roce_payload(mtu: u32) -> u32 {
    let room = mtu.saturating_sub(ROCE_HEADERS);
    [4096, 2048, 1024, 512].into_iter().find(|size| room >= *size).unwrap_or(256)
}

fn errors(report: &mut DoctorReport<'_>, nic: &Nic, port: &Port) {
    if port.counters.is_empty() {
        return;
    }
    let over = |(name, least): (&str, u64)| {
        let count = *port.counters.get(name)?;
        (count >= least).then(|| format!("{name} {count}"))
    };
    let some: Vec<String> = LINK_ERRORS.into_iter().chain(LOSSES).filter_map(over).collect();
    let grown = port.growth.as_ref().map(|growth| {
        let grew = |name: &&str| Some(format!("{name} +{}", growth.counters.get(*name)?));
        (GROWING.iter().filter_map(grew).collect::<Vec<_>>(), growth.milliseconds)
    });
    let (verdict, found) = match grown {
        Some((grown, milliseconds)) if !grown.is_empty() => {
            (Verdict::Slow, format!("growing: {} in {milliseconds} ms", grown.join(", ")))
        }
        _ if some.is_empty() => (Verdict::Ok, "few or none".to_owned()),
        Some((_, milliseconds)) => (
            Verdict::Unknown,
            format!("{}; no more in {milliseconds} ms, of unknown age", some.join(", ")),
        ),
        None => (Verdict::Unknown, format!("{}; of unknown age", some.join(", "))),
    };
    report.note(&ERRORS, Facility::of(nic), port_name(nic, port), verdict.on(found));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_s_mtu_decides_the_payload_of_roce() {
        for (mtu, payload) in [(600, 256), (1500, 1024), (4191, 2048), (4192, 4096), (9000, 4096)] {
            assert_eq!(roce_payload(mtu), payload, "{mtu}");
        }
    }
}
