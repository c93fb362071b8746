//! Time and bandwidth over SM count: ours, the ceiling and the floor.
//!
//! One picture has two charts for each operation, and one chart of the link. [`charts`] chooses the
//! curves, independently of their drawing.

use std::path::Path;

use anyhow::{Result, anyhow, ensure};
use plotters::coord::ranged1d::IntoSegmentedCoord as _;
use plotters::prelude::*;

use super::GpuReport;
use super::bytes::Rule;
use super::ceiling::Copy;
use super::figures::{CopyRow, GpuRow};
pub use super::peer::Peer;

/// The most operations in a picture.
const MOST: usize = 16;
const WIDTH: u32 = 1200;
const HEIGHT: u32 = 420;
/// The legend of figures that a stand-in has made void.
const VOID: &str = "void: the stand-in was late";
const FONT: &str = "sans-serif";
/// Colours that colour-blind people can distinguish too: ours, push, pull, ceiling or floor, rule, peers.
const OURS: RGBColor = RGBColor(0, 90, 181);
const PUSH: RGBColor = RGBColor(26, 133, 60);
const PULL: RGBColor = RGBColor(170, 110, 10);
const BOUND: RGBColor = RGBColor(190, 30, 45);
const RULE: RGBColor = RGBColor(120, 120, 120);
const PEER: RGBColor = RGBColor(120, 60, 160);

/// A curve, or a bound that is drawn from edge to edge.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// SM count and value, in order.
    pub points: Vec<(u32, f64)>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Ours,
    Void,
    Push,
    Pull,
    Bound,
    Rule,
    Peer,
}

impl Kind {
    fn colour(self) -> RGBColor {
        match self {
            Self::Ours => OURS,
            Self::Push => PUSH,
            Self::Pull => PULL,
            Self::Bound => BOUND,
            Self::Rule | Self::Void => RULE,
            Self::Peer => PEER,
        }
    }
}

/// One chart: values over SM counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// The title above the chart.
    pub title: String,
    /// The label of the vertical axis, with the unit.
    pub values: String,
    /// SM counts, each once, in order.
    pub sms: Vec<u32>,
    /// Curves.
    pub curves: Vec<Curve>,
    /// The highest value that is shown.
    pub most: f64,
}

/// The charts of some reports, in pairs: time and bandwidth of each operation; of a report without
/// operations, the link's bandwidth by bulk copies and by vectors. Peers are lines beside the times.
///
/// # Errors
/// Nothing to draw, or more than fits; a peer of an operation that no report has.
pub fn charts(reports: &[GpuReport], peers: &[Peer]) -> Result<Vec<[Chart; 2]>> {
    check_peers(reports, peers)?;
    let mut all = Vec::new();
    for report in reports {
        if report.rows.is_empty() {
            all.push(link_charts(report));
        }
        let mut cases = Vec::new();
        for row in &report.rows {
            if !cases.contains(&row.case) {
                cases.push(row.case);
                let rows: Vec<_> = report.rows.iter().filter(|r| r.case == row.case).collect();
                all.push(operation_charts(report, &rows, peers));
            }
        }
    }
    ensure!(
        (1..=MOST).contains(&all.len()),
        "found {} operations to draw; expected 1 to {MOST}",
        all.len()
    );
    Ok(all)
}

fn check_peers(reports: &[GpuReport], peers: &[Peer]) -> Result<()> {
    let rows = reports.iter().flat_map(|report| &report.rows);
    let mut operations: Vec<String> = rows.map(|row| row.case.to_string()).collect();
    operations.dedup();
    for Peer { operation, name, .. } in peers {
        ensure!(
            operations.contains(operation),
            "found the peer {name} of {operation:?}; expected one of: {}",
            operations.join(", ")
        );
    }
    Ok(())
}

/// The title of an operation: its sizes, the day, GPUs, and stand-ins.
fn title(report: &GpuReport, first: &GpuRow) -> String {
    let sizes = report.sizes.as_ref().map_or_else(String::new, |sizes| {
        format!(" x {}, top-{} of {}", sizes.hidden, sizes.topk, sizes.experts)
    });
    let day = report.date.as_ref().map_or_else(String::new, |date| format!(", {date}"));
    let day = if report.stand_ins.is_empty() {
        day
    } else {
        let names = report.stand_ins.iter().map(|words| words.split(':').next().unwrap_or(words));
        format!("{day}, over stand-ins: {}", names.collect::<Vec<_>>().join(", "))
    };
    format!(
        "{}, {} tokens{sizes}, {} routing, {}{day}",
        first.case,
        first.case.tokens,
        first.routing,
        report.hardware()
    )
}

fn operation_charts(report: &GpuReport, rows: &[&GpuRow], peers: &[Peer]) -> [Chart; 2] {
    let first = rows[0];
    let title = title(report, first);
    let of = |value: fn(&GpuRow) -> f64| rows.iter().map(|row| (row.sms, value(row))).collect();
    let is_void = |row: &GpuRow| row.levels.as_ref().is_some_and(|levels| levels.is_void);
    // No figure that counts: it has points of its own.
    let of_part = |void: bool, value: fn(&GpuRow) -> f64| {
        let part = rows.iter().filter(|row| is_void(row) == void);
        part.map(|row| (row.sms, value(row))).collect()
    };
    let flat = |value: f64| rows.iter().map(|row| (row.sms, value)).collect();
    let curve = |name: &str, kind, points| Curve { name: name.to_owned(), points, kind };
    let link = |copy, kind| {
        let wanted = |row: &&CopyRow| row.copy == copy && rows.iter().any(|r| r.sms == row.sms);
        let points = report.link.copies.iter().filter(wanted).map(|row| (row.sms, row.gb_s));
        curve(copy.name(), kind, points.collect())
    };
    let (ceiling, ceiling_name) = match &first.levels {
        None => (report.link.ceiling_gb_s, "ceiling: best of any SM count"),
        Some(levels) => (levels.slower().2, "rate of the slower level's link"),
    };
    let rule = Rule::of(first.levels.is_some()).to_string();
    let mut time = vec![
        curve("ours", Kind::Ours, of_part(false, |row| row.us)),
        curve(VOID, Kind::Void, of_part(true, |row| row.us)),
        curve(&rule, Kind::Rule, of(|row| row.rule_us)),
    ];
    match &first.levels {
        None => {
            time.push(curve("floor: bytes at the ceiling", Kind::Bound, of(|row| row.floor_us)))
        }
        Some(levels) => time.extend([
            curve(
                &level_name("between domains", levels.out_gb_s),
                Kind::Bound,
                flat(levels.out_us),
            ),
            curve(&level_name("inside", levels.inside_gb_s), Kind::Push, flat(levels.inside_us)),
        ]),
    }
    let operation = first.case.to_string();
    time.extend(peers.iter().filter(|peer| peer.operation == operation).map(|peer| {
        curve(&format!("{}, another run: {:.0}", peer.name, peer.us), Kind::Peer, flat(peer.us))
    }));
    let bandwidth = vec![
        curve("ours, own rows excluded", Kind::Ours, of_part(false, |row| row.link_gb_s)),
        curve(VOID, Kind::Void, of_part(true, |row| row.link_gb_s)),
        link(Copy::PushBulk, Kind::Push),
        link(Copy::PullBulk, Kind::Pull),
        curve(ceiling_name, Kind::Bound, flat(ceiling)),
    ];
    [chart(&title, "time in us", time), chart("the same on the link", "GB/s per GPU", bandwidth)]
}

fn level_name(level: &str, gb_s: f64) -> String {
    format!("floor {level}: bytes at {gb_s:.0} GB/s")
}

fn link_charts(report: &GpuReport) -> [Chart; 2] {
    let title = format!("all to all, {} x {}", report.ranks, report.machine.gpu);
    let curves = |ways: [(Copy, Kind); 2]| {
        let mut curves: Vec<Curve> = ways
            .iter()
            .map(|(copy, kind)| {
                let copies = report.link.copies.iter().filter(|row| row.copy == *copy);
                let points = copies.map(|row| (row.sms, row.gb_s)).collect();
                Curve { name: copy.name().to_owned(), points, kind: *kind }
            })
            .collect();
        let sms: Vec<u32> = curves.iter().flat_map(|c| c.points.iter().map(|p| p.0)).collect();
        let engines = report.link.copies.iter().find(|row| row.copy == Copy::PushEngines);
        curves.extend(engines.map(|engines| Curve {
            name: "copy engines, no SM".to_owned(),
            points: sms.iter().map(|sms| (*sms, engines.gb_s)).collect(),
            kind: Kind::Bound,
        }));
        curves
    };
    let bulk = curves([(Copy::PushBulk, Kind::Push), (Copy::PullBulk, Kind::Pull)]);
    let vectors = curves([(Copy::PushVectors, Kind::Push), (Copy::PullVectors, Kind::Pull)]);
    [
        chart(&format!("{title}: bulk copies"), "GB/s per GPU", bulk),
        chart("vectors of 16 bytes", "GB/s per GPU", vectors),
    ]
}

fn chart(title: &str, values: &str, mut curves: Vec<Curve>) -> Chart {
    curves.retain(|curve| !curve.points.is_empty());
    for curve in &mut curves {
        curve.points.sort_by_key(|point| point.0);
        curve.points.dedup_by_key(|point| point.0);
    }
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let mut sms: Vec<u32> = points().map(|point| point.0).collect();
    sms.sort_unstable();
    sms.dedup();
    let most = points().map(|point| point.1).fold(1.0, f64::max);
    let headroom = 1.08 + 0.09 * curves.len() as f64;
    let (title, values) = (title.to_owned(), values.to_owned());
    // Room above the curves for the legend, so that it covers no curve.
    Chart { title, values, sms, most: headroom * most, curves }
}

/// Draws the charts of some reports into an SVG file.
///
/// # Errors
/// As [`charts`]; a file that cannot be written.
pub fn draw(reports: &[GpuReport], peers: &[Peer], file: &Path) -> Result<()> {
    let text = svg(reports, peers)?;
    let named = |error| tokenyard_core::Error::system("write", file.display().to_string(), error);
    Ok(std::fs::write(file, text).map_err(named)?)
}

fn svg(reports: &[GpuReport], peers: &[Peer]) -> Result<String> {
    let pairs = charts(reports, peers)?;
    let mut text = String::new();
    {
        let size = (WIDTH, HEIGHT * pairs.len() as u32);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        let broken = |e: &dyn std::fmt::Display| anyhow!("draw: {e}");
        area.fill(&WHITE).map_err(|e| broken(&e))?;
        for (chart, area) in pairs.iter().flatten().zip(area.split_evenly((pairs.len(), 2))) {
            draw_chart(chart, &area)?;
        }
        area.present().map_err(|e| broken(&e))?;
    }
    Ok(text)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// SM counts have equal distances on the axis, which is nearly logarithmic and leaves room for each
/// number; values start at 0.
fn draw_chart(chart: &Chart, area: &Area<'_>) -> Result<()> {
    let broken = |e: &dyn std::fmt::Display| anyhow!("draw {}: {e}", chart.title);
    let last = chart.sms.len().saturating_sub(1);
    let at = |sms: u32| SegmentValue::CenterOf(chart.sms.binary_search(&sms).unwrap_or(last));
    let label = |value: &SegmentValue<usize>| match value {
        SegmentValue::Exact(index) | SegmentValue::CenterOf(index) => {
            chart.sms.get(*index).map_or(String::new(), u32::to_string)
        }
        SegmentValue::Last => String::new(),
    };
    let mut context = ChartBuilder::on(area)
        .caption(&chart.title, (FONT, 15))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(62)
        .build_cartesian_2d((0..last).into_segmented(), 0.0..chart.most)
        .map_err(|e| broken(&e))?;
    context
        .configure_mesh()
        .disable_x_mesh()
        .max_light_lines(1)
        .x_desc("SMs (streaming multiprocessors of each GPU)")
        .y_desc(&chart.values)
        .axis_desc_style((FONT, 14))
        .label_style((FONT, 13))
        .x_labels(chart.sms.len())
        .x_label_formatter(&label)
        .y_label_formatter(&|value| format!("{value:.0}"))
        .draw()
        .map_err(|e| broken(&e))?;
    for curve in &chart.curves {
        let (colour, ours) = (curve.kind.colour(), curve.kind == Kind::Ours);
        let points = curve.points.iter().map(|(sms, value)| (at(*sms), *value));
        let style = colour.stroke_width(if ours { 3 } else { 2 });
        // Void figures are points without a line.
        let line = points.clone().filter(|_| curve.kind != Kind::Void);
        context
            .draw_series(LineSeries::new(line, style))
            .map_err(|e| broken(&e))?
            .label(&curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        if !matches!(curve.kind, Kind::Bound | Kind::Rule | Kind::Peer) {
            let dots = points.map(|point| Circle::new(point, 3, colour.filled()));
            context.draw_series(dots).map_err(|e| broken(&e))?;
        }
    }
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(RULE)
        .label_font((FONT, 13))
        .draw()
        .map_err(|e| broken(&e))
}

#[cfg(test)]
mod tests {
    use super::super::case::{Fixed, Rows};
    use super::super::figures::tests::{levels_of, link_of, row};
    use super::super::machine::Machine;
    use super::*;

    #[test]
    fn a_report_that_was_written_can_be_read_and_drawn() {
        let rows = vec![row(Rows::Bf16, 16, 310.0), row(Rows::Fp8, 16, 200.0)];
        let report = report(rows);
        let document =
            serde_json::json!({ "schema_version": crate::SCHEMA_VERSION, "gpu": &report });
        let read = GpuReport::parse(&document.to_string()).unwrap();
        let of = |report: &GpuReport| -> Vec<_> {
            report.rows.iter().map(|row| (row.case, row.sms, row.us.round())).collect()
        };
        assert_eq!((of(&read), &read.machine), (of(&report), &report.machine));
        assert!(crate::gpu::tables(&read).contains("dispatch fp8 flat"));
        // A single SM count is enough for an axis.
        assert!(svg(&[read], &[]).unwrap().contains("\n16\n"));
    }

    const FIXED: Fixed = Fixed { hidden: 7168, topk: 8, experts: 256 };

    fn report(rows: Vec<GpuRow>) -> GpuReport {
        let machine = Machine { gpu: "NVIDIA H200".to_owned(), ..Machine::default() };
        let sizes = (!rows.is_empty()).then_some(FIXED);
        GpuReport {
            date: Some("2026-11-28".to_owned()),
            machine,
            ranks: 8,
            link: link_of(8),
            sizes,
            rows,
            auto_sms: Vec::new(),
            level_sms: Vec::new(),
            stand_ins: Vec::new(),
            gpus: None,
            working: None,
        }
    }

    #[test]
    fn each_operation_has_a_chart_of_time_and_one_of_bandwidth() {
        let rows =
            vec![row(Rows::Bf16, 16, 310.0), row(Rows::Bf16, 8, 330.0), row(Rows::Fp8, 16, 200.0)];
        let charts = charts(&[report(rows)], &[]).unwrap();
        assert_eq!(charts.len(), 2);
        let [time, bandwidth] = &charts[0];
        assert_eq!(time.sms, [8, 16]);
        assert_eq!(time.curves[0].points, [(8, 330.0), (16, 310.0)]);
        let names: Vec<_> = bandwidth.curves.iter().map(|curve| curve.name.as_str()).collect();
        assert_eq!(names.len(), 4, "{names:?}");
        assert!(names[0].starts_with("ours") && names[3].starts_with("ceiling"), "{names:?}");
        // Pull was measured with 16 SMs only.
        assert_eq!(bandwidth.curves[2].points.len(), 1);
        assert!(time.most > 330.0 && bandwidth.most > 340.0);
    }

    #[test]
    fn two_levels_have_both_floors_beside_the_time_and_stand_ins_are_named() {
        let of = |sms, is_void| {
            let levels = Some(levels_of(is_void));
            GpuRow { levels, ..row(Rows::Fp8, sms, 310.0) }
        };
        let stand_ins = vec!["twin: 2 GPUs".to_owned(), "paced: 46 GB/s".to_owned()];
        let (gpus, working) = (Some(2), Some(2));
        let report =
            GpuReport { stand_ins, gpus, working, ..report(vec![of(12, true), of(16, false)]) };
        let pairs = charts(std::slice::from_ref(&report), &[]).unwrap();
        let [time, bandwidth] = &pairs[0];
        let curve = |chart: &Chart, name: &str| {
            let found = chart.curves.iter().find(|curve| curve.name.starts_with(name));
            found.unwrap_or_else(|| panic!("{name}: {chart:?}")).points[0].1
        };
        assert_eq!(curve(time, "floor between domains: bytes at 46 GB/s"), 260.9);
        assert_eq!(curve(time, "floor inside: bytes at 365 GB/s"), 219.2);
        assert_eq!(curve(bandwidth, "rate of the slower"), 46.0);
        for chart in [time, bandwidth] {
            let void = chart.curves.iter().find(|curve| curve.name == VOID).unwrap();
            let sms = |curve: &Curve| curve.points.iter().map(|point| point.0).collect::<Vec<_>>();
            assert_eq!((sms(void), sms(&chart.curves[0])), (vec![12], vec![16]));
        }
        assert!(time.title.ends_with("over stand-ins: twin, paced"), "{}", time.title);
        assert!(time.title.contains("1 of 8 ranks on each of 2 x NVIDIA H200"), "{}", time.title);
        let text = crate::gpu::tables(&report);
        assert!(text.contains("a stand-in: paced: 46 GB/s"), "{text}");
        assert!(text.starts_with("2 x NVIDIA H200"), "{text}");
        assert!(text.contains("VOID") && text.contains("1234.5"), "{text}");
        let of_levels: Vec<_> =
            text.lines().skip_while(|line| *line != "the levels").take(4).collect();
        assert_eq!(of_levels.len(), 4, "a title, a heading and two rows: {text}");
        assert!(of_levels.iter().all(|line| line.chars().count() <= 80), "{text}");
        let shared = GpuReport { working: None, ..report };
        assert_eq!(shared.hardware(), "8 ranks that share 2 x NVIDIA H200");
    }

    #[test]
    fn a_peer_is_a_line_beside_the_times_of_its_operation_and_the_title_has_the_day() {
        let reports = [report(vec![row(Rows::Bf16, 16, 310.0), row(Rows::Fp8, 16, 200.0)])];
        let peer: Peer = "dispatch fp8 flat:DeepEP V2=143".parse().unwrap();
        let pairs = charts(&reports, std::slice::from_ref(&peer)).unwrap();
        let names = |chart: &Chart| -> Vec<String> {
            chart.curves.iter().map(|curve| curve.name.clone()).collect()
        };
        let line = "DeepEP V2, another run: 143".to_owned();
        assert!(pairs.iter().any(|[time, _]| names(time).contains(&line)));
        assert_eq!(pairs.iter().filter(|[time, _]| names(time).contains(&line)).count(), 1);
        assert!(pairs.iter().all(|[time, _]| time.title.ends_with(", 2026-11-28")));
        let other = Peer { operation: "combine fp8".to_owned(), ..peer };
        let error = charts(&reports, &[other]).unwrap_err().to_string();
        assert!(error.contains("expected one of: dispatch bf16 flat"), "{error}");
        for wrong in ["DeepEP=3", "dispatch fp8 flat:=3", "dispatch fp8 flat:DeepEP=-1", "a:b=x"] {
            assert!(wrong.parse::<Peer>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_report_of_the_link_alone_is_drawn_too() {
        let charts = charts(&[report(Vec::new())], &[]).unwrap();
        let [bulk, vectors] = &charts[0];
        assert_eq!(bulk.sms, [8, 16]);
        assert!(bulk.curves.iter().any(|curve| curve.name.contains("copy engines")));
        assert!(
            vectors.curves.iter().all(|curve| curve.kind == Kind::Bound || curve.points.is_empty())
        );
        assert!(charts_of_nothing().contains("found 0 operations"));
    }

    fn charts_of_nothing() -> String {
        charts(&[], &[]).unwrap_err().to_string()
    }

    #[test]
    fn the_picture_says_what_is_drawn_and_in_which_unit() {
        let rows =
            [4, 8, 12, 16, 24, 32].map(|sms| row(Rows::Bf16, sms, 300.0 + 100.0 / sms as f64));
        let text = svg(&[report(rows.to_vec())], &[]).unwrap();
        if let Some(file) = std::env::var_os("TOKENYARD_PLOT") {
            std::fs::write(file, &text).unwrap();
        }
        assert!(text.starts_with("<svg"));
        for words in
            ["time in us", "GB/s per GPU", "SMs (streaming", "ours", "floor", "NVIDIA H200"]
        {
            assert!(text.contains(words), "{words}");
        }
        for sms in ["\n4\n", "\n12\n", "\n32\n"] {
            assert!(text.contains(sms), "no label {sms:?}");
        }
    }
}
