//! The cost of commands that kernels post through a ring in host memory, into a transport that only
//! counts.

use std::collections::VecDeque;
use std::fmt;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use tokenyard_core::abi;
use tokenyard_core::config::Config;
use tokenyard_core::gpu_ring::Fabric;
use tokenyard_core::transport::{Command, Event, NO_EVENT};
use tokenyard_gpu::probe::{Posters, RingProbe};

use super::backend::Backend;
use super::machine::Machine;
use crate::report::{BenchReport, heading};
use crate::spread::Spread;
use crate::table::table;
use tokenyard_allocations::{Allocations, are_counted};

/// The required commands per second and thread, from 16 blocks.
const REQUIRED_RATE: f64 = 3e6;
/// The most microseconds for a round trip.
const REQUIRED_US: f64 = 6.0;
/// Blocks, as many as an exchange has.
const BLOCKS: u32 = 16;
/// Warps of a block that post at once: one as for signals, more as for rows.
const WARPS: [u32; 3] = [1, 4, 16];
/// Commands of all warps of a launch.
const COMMANDS: u32 = 1 << 18;
/// Launches of each kind that are timed.
const LAUNCHES: usize = 9;
/// Round trips of a launch.
const TRIPS: u32 = 2000;
/// Launches whose allocations are counted.
const COUNTED: u32 = 1000;
/// The most commands in flight.
const DEPTH: usize = 256;

/// Figures of the ring.
#[derive(Clone, Debug, Serialize)]
pub struct RingReport {
    /// The GPU.
    pub machine: Machine,
    /// Commands of 16 blocks, by warps of a block.
    pub rates: Vec<RingRate>,
    /// From a kernel's command to the signal that it raises, as the kernel sees it, in microseconds.
    pub trip_us: Spread,
    /// Launches whose allocations were counted.
    pub counted_launches: u32,
    /// Allocations of all threads over them; 0 is required.
    pub allocations: u64,
}

/// The rate at which one thread serves kernels.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RingRate {
    /// Blocks.
    pub blocks: u32,
    /// Posting warps of each block.
    pub warps: u32,
    /// Commands per second, the median of several launches.
    pub commands_per_s: f64,
    /// The required rate.
    pub required: f64,
}

impl RingReport {
    pub(crate) fn missed(&self) -> Vec<String> {
        let mut missed = Vec::new();
        for rate in self.rates.iter().filter(|rate| rate.commands_per_s < rate.required) {
            missed.push(format!(
                "ring, {} blocks of {} warps: found {:.2} million commands per second; required {:.0}",
                rate.blocks,
                rate.warps,
                rate.commands_per_s / 1e6,
                rate.required / 1e6
            ));
        }
        if self.trip_us.median > REQUIRED_US {
            missed.push(format!(
                "ring: found a round trip of {:.1} us; required at most {REQUIRED_US}",
                self.trip_us.median
            ));
        }
        if self.allocations > 0 {
            missed.push(format!(
                "ring: found {} allocations in {} launches; required 0",
                self.allocations, self.counted_launches
            ));
        }
        missed
    }
}

impl fmt::Display for RingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.machine.line(1))?;
        let mut lines = vec![heading("ring blocks warps M_commands/s required")];
        for rate in &self.rates {
            lines.push(vec![
                "kernels to counting transport".to_owned(),
                rate.blocks.to_string(),
                rate.warps.to_string(),
                format!("{:.2}", rate.commands_per_s / 1e6),
                format!(">= {:.0}", rate.required / 1e6),
            ]);
        }
        write!(f, "{}", table(1, &lines))?;
        let Spread { min, median, p99 } = self.trip_us;
        writeln!(
            f,
            "round trip, kernel to kernel: min {min:.2}, median {median:.2}, p99 {p99:.2} us (required: <= \
             {REQUIRED_US})"
        )?;
        write!(f, "allocations in {} launches: {}", self.counted_launches, self.allocations)
    }
}

/// Ends what it accepts at the next poll, and moves nothing.
#[derive(Debug)]
struct CountingFabric {
    in_flight: VecDeque<u64>,
    raised: u64,
}

impl Fabric for CountingFabric {
    unsafe fn post(&mut self, commands: &[Command]) -> Result<usize, i32> {
        let count = commands.len().min(DEPTH - self.in_flight.len());
        for command in &commands[..count] {
            self.in_flight.push_back(command.tag);
            self.raised += u64::from(command.add);
        }
        Ok(count)
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        let count = events.len().min(self.in_flight.len());
        for (event, tag) in events.iter_mut().zip(self.in_flight.drain(..count)) {
            *event = Event { kind: abi::TY_EVENT_DONE, tag, ..NO_EVENT };
        }
        Ok(count)
    }

    fn read_signal(&mut self, _: u32) -> u64 {
        self.raised
    }

    fn is_healthy(&mut self) -> bool {
        true
    }
}

/// Measures the ring on the GPU of these kernels, in a program that counts allocations.
///
/// # Errors
/// The program does not count allocations, the driver reports an error, or a command is lost.
pub fn measure(config: &Config) -> Result<BenchReport> {
    let backend = Backend::named(config)?;
    let platform = backend.platform();
    let kernels = config.kernels.table.parse(platform.names.kernels)?;
    ensure!(are_counted(), "ring: this program does not use the counting allocator");
    let fabric = CountingFabric { in_flight: VecDeque::with_capacity(DEPTH), raised: 0 };
    let mut probe = RingProbe::open(platform, &kernels, fabric)?;
    let mut posted = 0;
    let rates = WARPS.map(|warps| {
        let posters = Posters { blocks: BLOCKS, warps, commands: COMMANDS / (BLOCKS * warps) };
        rate(&mut probe, &posters, &mut posted)
    });
    let trip_us = trips(&mut probe, &mut posted)?;
    let few = Posters { blocks: BLOCKS, warps: 1, commands: 8 };
    let before = Allocations::now();
    for _ in 0..COUNTED {
        probe.posts_us(&few)?;
    }
    let (allocations, _) = Allocations::now().since(&before);
    posted += u64::from(COUNTED) * few.all();
    ensure!(probe.counted() == posted, "found {} commands; expected {posted}", probe.counted());
    let report = RingReport {
        machine: Machine::new(backend, probe.about(), true),
        rates: rates.into_iter().collect::<Result<_>>()?,
        trip_us,
        counted_launches: COUNTED,
        allocations,
    };
    Ok(BenchReport { ring: Some(report), ..BenchReport::new(config) })
}

fn rate(probe: &mut RingProbe, posters: &Posters, posted: &mut u64) -> Result<RingRate> {
    let mut seconds = Vec::with_capacity(LAUNCHES);
    for _ in 0..LAUNCHES {
        seconds.push(probe.posts_us(posters).context("post commands")? / 1e6);
        *posted += posters.all();
    }
    let middle = Spread::of(seconds).context("found no launch; expected some")?;
    Ok(RingRate {
        blocks: posters.blocks,
        warps: posters.warps,
        commands_per_s: posters.all() as f64 / middle.median,
        required: REQUIRED_RATE,
    })
}

fn trips(probe: &mut RingProbe, posted: &mut u64) -> Result<Spread> {
    let mut us = Vec::with_capacity(LAUNCHES * TRIPS as usize);
    for _ in 0..LAUNCHES {
        us.extend(probe.trips_us(TRIPS).context("post commands and see their signals")?);
        *posted += u64::from(TRIPS);
    }
    Spread::of(us).context("found no round trip; expected some")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_that_is_slow_late_or_that_allocates_is_named() {
        let rate =
            RingRate { blocks: 16, warps: 4, commands_per_s: 3.1e6, required: REQUIRED_RATE };
        let good = RingReport {
            machine: Machine::default(),
            rates: vec![rate],
            trip_us: Spread { min: 3.0, median: 5.9, p99: 20.0 },
            counted_launches: COUNTED,
            allocations: 0,
        };
        assert!(good.missed().is_empty(), "{:?}", good.missed());
        let slow = RingRate { commands_per_s: 2.9e6, ..rate };
        let bad = RingReport {
            rates: vec![slow],
            trip_us: Spread { min: 3.0, median: 6.1, p99: 20.0 },
            allocations: 2,
            ..good
        };
        let missed = bad.missed();
        assert!(missed[0].contains("16 blocks of 4 warps: found 2.90 million"), "{missed:?}");
        assert!(missed[1].contains("found a round trip of 6.1 us"), "{missed:?}");
        assert!(missed[2].contains("found 2 allocations in 1000"), "{missed:?}");
    }

    #[test]
    fn the_counting_transport_ends_each_command_once_and_shows_its_signal() {
        let mut fabric = CountingFabric { in_flight: VecDeque::with_capacity(DEPTH), raised: 0 };
        let commands: Vec<_> = (0..300)
            .map(|tag| Command { tag, add: 1, ..tokenyard_core::transport::NO_COMMAND })
            .collect();
        // SAFETY: it touches no memory.
        let accepted = unsafe { fabric.post(&commands) }.unwrap();
        assert_eq!((accepted, fabric.read_signal(0)), (DEPTH, DEPTH as u64));
        let mut events = [NO_EVENT; 200];
        let counts = [(); 3].map(|()| fabric.poll(&mut events).unwrap());
        assert_eq!((counts, events[0].tag, fabric.is_healthy()), ([200, 56, 0], 200, true));
    }
}
