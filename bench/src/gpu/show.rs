//! Tables of figures on GPUs.

use super::GpuReport;
use super::auto_sms::AutoSms;
use super::bytes::Rule;
use super::case::Case;
use super::figures::{GpuRow, Link};
use super::nic::Lateness;
use crate::report::heading;
use crate::table::table;

/// The whole report, without the conditions of the host.
pub fn tables(report: &GpuReport) -> String {
    let mut text =
        format!("{} · link nvlink\n", report.machine.line(report.gpus.unwrap_or(report.ranks)));
    for stand_in in &report.stand_ins {
        text += &format!("a stand-in: {stand_in}\n");
    }
    text += &format!("\n{}", link(&report.link));
    if let Some(sizes) = &report.sizes {
        text += &format!(
            "\nhidden {}, top-{} of {} experts\n{}",
            sizes.hidden,
            sizes.topk,
            sizes.experts,
            operations(&report.rows)
        );
        let two_levels = report.rows.iter().any(|row| row.levels.is_some());
        let rule = Rule::of(two_levels);
        text += &format!(
            "\ntimes: routed input to usable rows, of the slowest rank. MB: through the busiest \
             port,\nwithout own rows. ratio: of the link's rate. floor: the bytes at that \
             rate.\nrule: {rule}. others count: rows and scales received, own rows too.\n"
        );
        if two_levels {
            text += "two levels: MB, GB/s and floor of the first table are those of the slower one; ratio of\n\
                     the second is the time as a part of that floor.\n\
                     late, most: signals of the stand-in behind its own pace, in us: in the mean, and \
                     at most since\nthe start. A time is void where the mean is more than 5 % of it.\n";
        }
        if !report.auto_sms.is_empty() {
            text += &format!(
                "\nSMs of sms = \"auto\", and the best of 4 to 32; holds: at most 1.03 of the best\n{}",
                auto_sms(&report.auto_sms)
            );
        }
        if !report.level_sms.is_empty() {
            text += &format!(
                "\nSMs by the formula of two levels, fitted on H200, and the best of 4 to 32;\nholds: at \
                 most 1.03 of it\n{}",
                auto_sms(&report.level_sms)
            );
        }
    }
    text
}

fn link(link: &Link) -> String {
    if link.copies.is_empty() {
        return format!("link inside: {:.1} GB/s, as given\n", link.ceiling_gb_s);
    }
    let mut lines = vec![heading("all_to_all SMs us GB/s")];
    for row in &link.copies {
        lines.push(vec![
            row.copy.name().to_owned(),
            if row.sms == 0 { "-".to_owned() } else { row.sms.to_string() },
            format!("{:.1}", row.us),
            format!("{:.1}", row.gb_s),
        ]);
    }
    let Link { bytes, row_bytes, ceiling_gb_s, barrier_us, counts, counts_us, launch_us, .. } =
        link;
    format!(
        "{}{:.0} MB from each rank in rows of {row_bytes} bytes; received rows were checked\n\
         ceiling {ceiling_gb_s:.1} GB/s · barrier {barrier_us:.2} us · exchange of {counts} counts \
         {counts_us:.2} us · empty kernel {launch_us:.2} us\n",
        table(1, &lines),
        *bytes as f64 / 1e6
    )
}

/// Tables of one operation and routing: times and bytes, then the times of the phases.
fn operations(rows: &[GpuRow]) -> String {
    let of = |row: &GpuRow| (Case { tokens: 0, ..row.case }, row.routing.clone());
    let mut text = String::new();
    for rows in rows.chunk_by(|a, b| of(a) == of(b)) {
        let (case, routing) = of(&rows[0]);
        text += &format!("\n{case}, {routing} routing; times in us\n{}", times(rows));
        if rows.iter().any(|row| row.levels.is_some()) {
            text += &format!("the levels\n{}", levels(rows));
        }
        if rows.iter().any(|row| row.breakdown.is_some()) {
            text += &format!("where they go\n{}", breakdowns(rows));
        }
    }
    text
}

fn times(rows: &[GpuRow]) -> String {
    let mut lines = vec![heading("tokens SMs min median p99 MB GB/s ratio floor rule holds")];
    for row in rows {
        lines.push(vec![
            row.case.tokens.to_string(),
            row.sms.to_string(),
            format!("{:.1}", row.min_us),
            format!("{:.1}", row.us),
            format!("{:.1}", row.p99_us),
            format!("{:.1}", row.link_bytes as f64 / 1e6),
            format!("{:.1}", row.link_gb_s),
            format!("{:.2}", row.ratio),
            format!("{:.1}", row.floor_us),
            format!("{:.1}", row.rule_us),
            if row.holds { "yes" } else { "NO" }.to_owned(),
        ]);
    }
    table(0, &lines)
}

/// Bytes and floors of both levels, and how late a stand-in was.
fn levels(rows: &[GpuRow]) -> String {
    let mut lines = vec![heading("tokens SMs out_MB floor inside_MB floor ratio late most void")];
    for row in rows {
        let Some(level) = &row.levels else { continue };
        let late = |us: fn(&Lateness) -> f64| {
            level.late.as_ref().map_or("-".to_owned(), |late| format!("{:.1}", us(late)))
        };
        lines.push(vec![
            row.case.tokens.to_string(),
            row.sms.to_string(),
            format!("{:.1}", level.out_bytes as f64 / 1e6),
            format!("{:.1}", level.out_us),
            format!("{:.1}", level.inside_bytes as f64 / 1e6),
            format!("{:.1}", level.inside_us),
            format!("{:.2}", level.ratio),
            late(|late| late.mean_us),
            late(|late| late.most_us),
            if level.is_void { "VOID" } else { "no" }.to_owned(),
        ]);
    }
    table(0, &lines)
}

/// The choices of a formula, beside the best ones that were measured.
fn auto_sms(rows: &[AutoSms]) -> String {
    let mut lines = vec![heading("operation tokens SMs us best us ratio holds")];
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for row in rows {
        lines.push(vec![
            format!("{}, {}", row.case, row.routing),
            row.case.tokens.to_string(),
            row.auto_sms.to_string(),
            or_dash(row.auto_us.map(|us| format!("{us:.1}"))),
            row.best_sms.to_string(),
            format!("{:.1}", row.best_us),
            or_dash(row.ratio.map(|ratio| format!("{ratio:.3}"))),
            or_dash(row.holds.map(|holds| if holds { "yes" } else { "NO" }.to_owned())),
        ]);
    }
    table(1, &lines)
}

fn breakdowns(rows: &[GpuRow]) -> String {
    let mut lines =
        vec![heading("tokens SMs launch count exchange rows drain skew others_count_GB/s")];
    for row in rows {
        let Some(b) = row.breakdown else { continue };
        let parts = [b.launch, b.count, b.exchange, b.rows, b.drain, b.skew, row.counted_gb_s];
        let mut line = vec![row.case.tokens.to_string(), row.sms.to_string()];
        line.extend(parts.map(|value| format!("{value:.1}")));
        lines.push(line);
    }
    table(0, &lines)
}
