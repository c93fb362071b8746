//! Locked memory, huge pages, memory that windows take.

use tokenyard_machine::{Bound, Fact, NicFamily, bytes};

use crate::nics::rails;
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    LOCKED = "locked-memory",
    HUGE = "huge-pages",
}

const HUGE_PAGE: u64 = 2 << 20;

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    locked(report);
    if rails(report).iter().any(|nic| nic.family == NicFamily::Efa)
        || report.job.asks(Facility::Efa)
    {
        huge(report);
    }
}

fn locked(report: &mut DoctorReport<'_>) {
    let efa = report.job.asks(Facility::Efa)
        || rails(report).iter().any(|nic| nic.family == NicFamily::Efa);
    let facility = if efa { Facility::Efa } else { Facility::Verbs };
    let has_nic = !rails(report).is_empty();
    let exempt = crate::container::has_ipc_lock(report);
    let need = report.job.window_bytes;
    let (verdict, found) = match report.machine.limits.locked_memory {
        Fact::Known(limit) => match limit.soft {
            Bound::Unlimited => (Verdict::Ok, "no limit".to_owned()),
            Bound::At(limit) if exempt => {
                (Verdict::Ok, format!("{}, and CAP_IPC_LOCK lifts it", bytes(limit)))
            }
            Bound::At(limit) if limit >= need.max(1 << 30) => (Verdict::Ok, bytes(limit)),
            Bound::At(soft) => {
                let hard = match limit.hard {
                    Bound::Unlimited => "; may be raised without limit",
                    Bound::At(hard) if hard > soft => "; may be raised",
                    Bound::At(_) => "",
                };
                // Windows fit; other pinned memory (queues, other transports) is unknown here.
                let verdict = if soft < need { Verdict::Broken } else { Verdict::Unknown };
                (verdict, format!("{}{hard}", bytes(soft)))
            }
        },
        _ => (Verdict::Unknown, "the kernel shows no limit".to_owned()),
    };
    // Without a NIC nothing is pinned by one.
    let verdict = if has_nic || report.job.asks.uses.is_some() { verdict } else { Verdict::Ok };
    let finding = report.note(&LOCKED, facility, "locked memory", verdict.on(found));
    if !has_nic && finding.verdict == Verdict::Ok {
        finding.expected("nothing: no NIC here");
    } else {
        finding.expected(format!("unlimited, or at least {}", bytes(need.max(1 << 30))));
    }
}

fn huge(report: &mut DoctorReport<'_>) {
    let pool = report.machine.limits.huge_pages.iter().find(|pool| pool.page == HUGE_PAGE);
    let (verdict, found) = match pool.map(|pool| (pool.free.get(), pool.total.get())) {
        Some((Some(0), Some(0))) | None => (Verdict::Slow, "no pool".to_owned()),
        Some((Some(0), _)) => (Verdict::Slow, "none free".to_owned()),
        Some((Some(free), Some(total))) => (Verdict::Ok, format!("{free} of {total} free")),
        Some(_) => (Verdict::Unknown, "the kernel does not show it".to_owned()),
    };
    report.note(&HUGE, Facility::Efa, "pages of 2 MiB", verdict.on(found));
}
