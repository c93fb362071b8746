//! Tables of figures on GPUs.

use super::Report;
use super::figures::{Link, Row};
use crate::report::heading;
use crate::table::table;

/// The whole report, but for the conditions of the host.
pub fn tables(report: &Report) -> String {
    let mut text = format!("{}\n", report.machine.line(report.ranks));
    text += &format!("\n{}", link(&report.link));
    if let Some(sizes) = &report.sizes {
        text += &format!(
            "\nhidden {}, top-{} of {} experts\n{}",
            sizes.hidden,
            sizes.topk,
            sizes.experts,
            operations(&report.rows)
        );
        text += "us: routed input to usable rows, the slowest rank's median. link: bytes through the \
                 busiest port, own rows excluded.\nothers count: rows and scales received, own rows \
                 included. rule: 1.05 x floor + 20 us.\n";
    }
    text
}

fn link(link: &Link) -> String {
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
        "{}{:.0} MB from each rank in rows of {row_bytes} bytes; what came was checked\n\
         ceiling {ceiling_gb_s:.1} GB/s · barrier {barrier_us:.2} us · exchange of {counts} counts \
         {counts_us:.2} us · empty kernel {launch_us:.2} us\n",
        table(1, &lines),
        *bytes as f64 / 1e6
    )
}

fn operations(rows: &[Row]) -> String {
    let mut lines = vec![heading(
        "operation routing tokens SMs us launch count exchange rows drain skew link_MB link_GB/s \
         of_ceiling others_count_GB/s floor_us rule_us holds",
    )];
    for row in rows {
        let parts = row.breakdown.map(|b| {
            [b.launch, b.count, b.exchange, b.rows, b.drain, b.skew].map(|us| format!("{us:.1}"))
        });
        let mut line = vec![
            row.case.to_string(),
            row.routing.clone(),
            row.case.tokens.to_string(),
            row.sms.to_string(),
            format!("{:.1}", row.us),
        ];
        line.extend(parts.unwrap_or_else(|| std::array::from_fn(|_| "-".to_owned())));
        line.extend([
            format!("{:.1}", row.link_bytes as f64 / 1e6),
            format!("{:.1}", row.link_gb_s),
            format!("{:.2}", row.ratio),
            format!("{:.1}", row.counted_gb_s),
            format!("{:.1}", row.floor_us),
            format!("{:.1}", row.rule_us),
            if row.holds { "yes" } else { "NO" }.to_owned(),
        ]);
        lines.push(line);
    }
    table(2, &lines)
}
