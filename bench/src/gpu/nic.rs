//! A transport whose kernels put, alone: its rate, latency and puts a second, in a loop on one GPU.
//!
//! A stand-in with a pace (`paced`) is held to the pace that its table names. Of other transports the figures are
//! shown, and none is required.

use std::fmt;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tokenyard_core::config::{ComponentChoice, ComponentTable, Config};
use tokenyard_core::host::Registry;
use tokenyard_gpu::probe::{Flood, NicProbe, PutFlow};

use super::backend::Backend;
use super::machine::Machine;
use crate::report::{BenchReport, heading};
use crate::spread::Spread;
use crate::table::table;

/// The stand-in whose pace is known.
pub(super) const PACED: &str = "paced";
/// Bytes of the puts whose rate is measured.
const LARGE: [u64; 3] = [64 << 10, 256 << 10, 1 << 20];
/// Queues, each with a block that posts.
const QUEUES: u32 = 4;
/// Bytes of a rate's puts: they last for 40 ms and longer at 46 GB/s, so a start of 20 us is 0.05 %.
const RATE_BYTES: u64 = 2 << 30;
/// Bytes of a queue that are under way at once, in four puts at least.
const UNDER_WAY: u64 = 1 << 20;
/// Puts of one row, without a limit.
const ROW: Flood = Flood { warps: 16, puts: 16_384, bytes: 7168 };
const REQUIRED_PUTS: f64 = 20e6;
/// The most that a rate may be off, and a latency in microseconds.
const OFF: f64 = 0.01;
const OFF_US: f64 = 1.0;
const TRIPS: u32 = 2000;
/// Of the stand-in, where a latency is measured: nothing is added to it.
const IN_ORDER: &str = "order = \"in\"";
/// The same without a limit, and with a block for each of the queues.
const FREE: &str =
    "order = \"in\"\nrate = 0.0\nlatency_us = 0.0\nmillion_messages = 0.0\nblocks = 4";

/// Figures of a transport alone.
#[derive(Clone, Debug, Serialize)]
pub struct NicReport {
    /// The GPU.
    pub machine: Machine,
    /// The transport's own words about the loop.
    pub link: String,
    /// One for each measurement.
    pub rows: Vec<NicRow>,
    /// Of calls that post 64 bytes, in microseconds.
    pub post_us: Spread,
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct NicRow {
    /// Its name.
    pub what: &'static str,
    /// Bytes of a put.
    pub bytes: u64,
    /// The unit of what was found.
    pub unit: &'static str,
    /// The median of several runs; of latencies, of all puts.
    pub found: f64,
    /// The value by the transport's table, where that has one.
    pub nominal: Option<f64>,
    /// The least and the most that is required.
    pub required: Option<[f64; 2]>,
    /// How late a stand-in raised signals.
    pub late: Option<Lateness>,
}

/// How late a stand-in raised signals, by its own clock.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lateness {
    /// Signals.
    pub signals: u64,
    /// In the mean, in microseconds.
    pub mean_us: f64,
    /// The latest one since the start of the link.
    pub most_us: f64,
}

impl Lateness {
    /// Of the signals that were raised since an earlier look; the latest one is of all.
    pub(super) fn since(self, before: Option<Self>) -> Self {
        let all = |late: Self| late.mean_us * late.signals as f64;
        let (past, past_us) = before.map_or((0, 0.0), |before| (before.signals, all(before)));
        let signals = self.signals.saturating_sub(past);
        let mean_us = ((all(self) - past_us) / signals.max(1) as f64).max(0.0);
        Self { signals, mean_us, ..self }
    }

    /// Reads it out of the words of a stand-in about a link: `N signals late by N ns in all, N ns at most`.
    pub fn of(link: &str) -> Option<Self> {
        let (_, text) = link.rsplit_once("; ")?;
        let (signals, text) = text.split_once(" signals late by ")?;
        let (all, text) = text.split_once(" ns in all, ")?;
        let most: f64 = text.strip_suffix(" ns at most")?.parse().ok()?;
        let (signals, all): (u64, f64) = (signals.parse().ok()?, all.parse().ok()?);
        Some(Self { signals, mean_us: all / signals.max(1) as f64 / 1e3, most_us: most / 1e3 })
    }
}

/// The transport's own words about the loop, without lateness: that is of a row.
fn without_lateness(link: &str) -> &str {
    match (Lateness::of(link), link.rsplit_once("; ")) {
        (Some(_), Some((link, _))) => link,
        _ => link,
    }
}

/// The keys of the stand-in's table that decide its pace; defaults as there.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Pace {
    pub(super) rate: f64,
    pub(super) latency_us: f64,
    million_messages: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { rate: 46.0, latency_us: 4.0, million_messages: 0.0 }
    }
}

impl Pace {
    /// Microseconds that a put has the wire.
    fn wire_us(&self, bytes: u64) -> f64 {
        let part = |amount: f64, rate: f64| if rate == 0.0 { 0.0 } else { amount / rate };
        part(bytes as f64 / 1e3, self.rate).max(part(1.0, self.million_messages))
    }

    /// GB/s; none without a limit.
    fn gb_per_s(&self, bytes: u64) -> Option<f64> {
        let us = self.wire_us(bytes);
        (us > 0.0).then(|| bytes as f64 / 1e3 / us)
    }
}

impl NicRow {
    fn is_missed(&self) -> bool {
        self.required.is_some_and(|[least, most]| !(least..=most).contains(&self.found))
    }

    fn requirement(&self) -> String {
        match self.required {
            None => "-".to_owned(),
            Some([least, most]) if most == f64::INFINITY => format!(">= {least:.2}"),
            Some([least, most]) => format!("{least:.2} to {most:.2}"),
        }
    }
}

impl NicReport {
    pub(crate) fn missed(&self) -> Vec<String> {
        let missed = self.rows.iter().filter(|row| row.is_missed());
        missed
            .map(|row| {
                format!(
                    "{} of {} bytes: found {:.2} {}; required {}",
                    row.what,
                    row.bytes,
                    row.found,
                    row.unit,
                    row.requirement()
                )
            })
            .collect()
    }
}

impl fmt::Display for NicReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.machine.line(1))?;
        writeln!(f, "a loop of one GPU: {}", self.link)?;
        let mut lines = vec![heading("figure bytes found nominal required late_us most_us")];
        for row in &self.rows {
            let late = |us: fn(&Lateness) -> f64| {
                row.late.as_ref().map_or("-".to_owned(), |late| format!("{:.2}", us(late)))
            };
            lines.push(vec![
                format!("{}, {}", row.what, row.unit),
                row.bytes.to_string(),
                format!("{:.2}", row.found),
                row.nominal.map_or("-".to_owned(), |nominal| format!("{nominal:.2}")),
                row.requirement(),
                late(|late| late.mean_us),
                late(|late| late.most_us),
            ]);
        }
        write!(f, "{}", table(1, &lines))?;
        let Spread { min, median, p99 } = self.post_us;
        writeln!(
            f,
            "latency: from the end of the call that posts to the signal seen by the kernel;"
        )?;
        writeln!(f, "that call takes {min:.2} (min), {median:.2} (median), {p99:.2} us (p99).")?;
        write!(f, "late, most: signals behind the stand-in's own pace, in the mean and at most")
    }
}

/// A transport and the GPU that drives it.
struct Nic<'a> {
    config: &'a Config,
    choice: &'a ComponentChoice,
    backend: Backend,
    registry: Registry,
    /// Of the stand-in.
    pace: Option<Pace>,
}

impl Nic<'_> {
    /// An instance of its own for each measurement: lateness is of this one alone.
    fn open(&self, table: &ComponentTable) -> Result<NicProbe> {
        let platform = self.backend.platform();
        let kernels = self.config.kernels.table.parse(platform.names.kernels)?;
        let component = self.registry.choose_transport(self.choice)?;
        Ok(NicProbe::open(platform, &kernels, &component, table, QUEUES)?)
    }

    /// The transport's table, of a stand-in with these values.
    fn table(&self, keys: &str) -> Result<ComponentTable> {
        match self.pace {
            Some(_) => with_keys(self.choice, &self.config.name, keys),
            None => Ok(self.choice.table.clone()),
        }
    }

    /// GB/s of puts of this size.
    fn rate(&self, bytes: u64) -> Result<NicRow> {
        let mut probe = self.open(&self.choice.table)?;
        let window = (UNDER_WAY / bytes).max(4);
        let stream = PutFlow { puts: RATE_BYTES / bytes, bytes, window };
        probe.stream(&PutFlow { puts: stream.puts / 16, ..stream })?;
        let seconds = median(|| Ok(probe.stream(&stream)?))?;
        let nominal = self.pace.and_then(|pace| pace.gb_per_s(bytes));
        Ok(NicRow {
            what: "rate",
            bytes,
            unit: "GB/s",
            found: RATE_BYTES as f64 / seconds / 1e9,
            nominal,
            required: nominal.map(|rate| [rate * (1.0 - OFF), rate * (1.0 + OFF)]),
            late: Lateness::of(&probe.link_name()),
        })
    }

    /// The latency of puts of this size, and the time of the calls that post them.
    fn latency(&self, bytes: u64) -> Result<(NicRow, Spread)> {
        let mut probe = self.open(&self.table(IN_ORDER)?)?;
        probe.trips(TRIPS / 10, bytes)?;
        let trips = probe.trips(TRIPS, bytes)?;
        let spread = |part: Vec<f64>| Spread::of(part).context("found no put; expected some");
        let seen = spread(trips.iter().map(|trip| trip.seen).collect())?;
        let post = spread(trips.iter().map(|trip| trip.post).collect())?;
        let nominal = self.pace.map(|pace| pace.latency_us + pace.wire_us(bytes));
        let row = NicRow {
            what: "latency",
            bytes,
            unit: "us",
            found: seen.median,
            nominal,
            required: nominal.map(|us| [us - OFF_US, us + OFF_US]),
            late: Lateness::of(&probe.link_name()),
        };
        Ok((row, post))
    }

    /// Puts a second of rows of 7 KiB, where the stand-in has no limit and a block for each queue.
    fn puts(&self) -> Result<NicRow> {
        let mut probe = self.open(&self.table(FREE)?)?;
        probe.flood(&Flood { puts: ROW.puts / 16, ..ROW })?;
        let seconds = median(|| Ok(probe.flood(&ROW)?))?;
        let all = u64::from(QUEUES * ROW.warps) * ROW.puts;
        Ok(NicRow {
            what: "puts",
            bytes: ROW.bytes,
            unit: "millions/s",
            found: all as f64 / seconds / 1e6,
            nominal: None,
            required: self.pace.map(|_| [REQUIRED_PUTS / 1e6, f64::INFINITY]),
            late: Lateness::of(&probe.link_name()),
        })
    }
}

/// The median of five runs, in seconds.
fn median(mut run: impl FnMut() -> Result<f64>) -> Result<f64> {
    let runs: Result<Vec<f64>> = (0..5).map(|_| run()).collect();
    Ok(Spread::of(runs?).context("found no run; expected some")?.median)
}

/// The table of a transport with the values of these keys in the place of its own.
fn with_keys(choice: &ComponentChoice, file: &str, keys: &str) -> Result<ComponentTable> {
    let named = || format!("read the table of {}", choice.name);
    let mut table: toml::Table = toml::from_str(choice.table.text()).with_context(named)?;
    table.extend(toml::from_str::<toml::Table>(keys).with_context(named)?);
    Ok(ComponentTable::from_text(&toml::to_string(&table).with_context(named)?, file))
}

/// Measures the transport between domains that a config names, or the one inside.
///
/// # Errors
/// The transport has no device API that puts; the driver reports an error, or a put does not arrive.
pub fn measure(config: &Config) -> Result<BenchReport> {
    let choice = config.scale_out.first().or(config.scale_up.as_ref());
    let choice = choice.context(
        "found no transport; expected one. Fix: name one in [transport.scale_up] or \
         [transport.scale_out]",
    )?;
    let pace = match choice.name == PACED {
        true => Some(toml::from_str(choice.table.text()).context("read the pace")?),
        false => None,
    };
    let backend = Backend::named(config)?;
    let nic = Nic { config, choice, backend, registry: Registry::for_config(config)?, pace };
    let mut rows = LARGE.into_iter().map(|bytes| nic.rate(bytes)).collect::<Result<Vec<_>>>()?;
    let (empty, _) = nic.latency(0)?;
    let (small, post_us) = nic.latency(64)?;
    rows.extend([empty, small, nic.puts()?]);
    let probe = nic.open(&choice.table)?;
    let link = without_lateness(&probe.link_name()).to_owned();
    let machine = Machine::new(backend, probe.about(), true);
    let report = NicReport { machine, link, rows, post_us };
    Ok(BenchReport { nic: Some(report), ..BenchReport::new(config) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lateness_is_read_from_the_words_of_a_stand_in_and_cut_off_them_alone() {
        let words = "paced over nvlink; 200 signals late by 100000 ns in all, 7300 ns at most";
        let late = Lateness::of(words).unwrap();
        assert_eq!(late, Lateness { signals: 200, mean_us: 0.5, most_us: 7.3 });
        assert_eq!(without_lateness(words), "paced over nvlink");
        let before = Lateness { signals: 100, mean_us: 0.25, most_us: 7.3 };
        let since = late.since(Some(before));
        assert_eq!(since, Lateness { signals: 100, mean_us: 0.75, most_us: 7.3 });
        assert_eq!(late.since(None), late);
        let other = "nvlink; from device 0 to that of rank 1";
        assert_eq!(Lateness::of(other), None);
        assert_eq!(without_lateness(other), other);
    }

    #[test]
    fn what_a_stand_in_adds_to_times_is_taken_away_where_it_is_not_measured() {
        let own = "order = \"any\"\nrate = 23.0\nmillion_messages = 10.0\nblocks = 8\nseed = 3\n";
        let choice = ComponentChoice {
            name: PACED.to_owned(),
            line: 1,
            table: ComponentTable::from_text(own, "a.toml"),
        };
        let table = |keys| {
            let table = with_keys(&choice, "a.toml", keys).unwrap();
            toml::from_str::<toml::Table>(table.text()).unwrap()
        };
        let found = table(IN_ORDER);
        assert_eq!((found["order"].as_str(), found["rate"].as_float()), (Some("in"), Some(23.0)));
        let found = table(FREE);
        for key in ["rate", "latency_us", "million_messages"] {
            assert_eq!(found[key].as_float(), Some(0.0), "{key}");
        }
        assert_eq!((found["order"].as_str(), found["seed"].as_integer()), (Some("in"), Some(3)));
        assert_eq!(found["blocks"].as_integer(), Some(QUEUES.into()));
    }

    #[test]
    fn a_put_has_the_wire_for_its_bytes_or_the_time_of_a_message() {
        let pace = Pace { rate: 50.0, latency_us: 4.0, million_messages: 2.0 };
        assert_eq!(pace.wire_us(64), 0.5);
        assert_eq!(pace.wire_us(50_000), 1.0);
        assert_eq!(pace.gb_per_s(10_000), Some(20.0));
        assert_eq!(Pace { rate: 0.0, million_messages: 0.0, ..pace }.gb_per_s(64), None);
        assert_eq!(toml::from_str::<Pace>("seed = 1").unwrap(), Pace::default());
    }

    #[test]
    fn a_missed_figure_is_named_and_a_table_has_80_columns() {
        let late = Some(Lateness { signals: 9, mean_us: 1234.5, most_us: 12_345.6 });
        let row = |what, unit, found, required| NicRow {
            what,
            bytes: 1 << 20,
            unit,
            found,
            nominal: Some(46.0),
            required,
            late,
        };
        let least = Some([20.0, f64::INFINITY]);
        let rows = vec![
            row("rate", "GB/s", 45.5, Some([45.54, 46.46])),
            row("puts", "millions/s", 21.0, least),
            row("latency", "us", 4.9, Some([3.0, 5.0])),
        ];
        let post_us = Spread { min: 0.8, median: 0.9, p99: 1.2 };
        let report =
            NicReport { machine: Machine::default(), link: "paced".to_owned(), rows, post_us };
        let missed = report.missed();
        assert_eq!(missed, ["rate of 1048576 bytes: found 45.50 GB/s; required 45.54 to 46.46"]);
        for line in report.to_string().lines().skip(1) {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}
