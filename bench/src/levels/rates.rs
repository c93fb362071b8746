//! Times and SMs of an operation, by what links and SMs carry.

use super::OperationCost;

/// GB/s, in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Rate of a rank to other domains.
    pub out: f64,
    /// Rate of a rank to the others of its domain.
    pub inside: f64,
    /// Rate of one SM that copies or sums rows.
    pub sm: f64,
}

/// Microseconds for which each link is busy, and SMs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperationTime {
    /// The link between domains.
    pub out_us: f64,
    /// The link inside the domain.
    pub inside_us: f64,
    /// The fewest SMs that move rows as fast as the slower link.
    pub sms: f64,
}

/// The numbers of SMs among which the formula chooses.
const CHOICES: [u32; 4] = [6, 8, 12, 24];
/// SMs for each one that only just keeps up: the first rows leave late, the last ones come late, and links that are
/// nearly as slow as the slower one are shared.
const MARGIN: f64 = 1.3;
/// The rate of one SM: 45 to 47 GB/s were measured on H200.
pub const SM_GB_PER_S: f64 = 45.0;

/// The number of SMs for an operation of two levels whose SMs move `sm_bytes`, where links are busy for these times in
/// microseconds, between domains and inside.
pub fn sms_of(sm_bytes: f64, [out_us, inside_us]: [f64; 2]) -> u32 {
    let slower = out_us.max(inside_us);
    let least = if slower > 0.0 { sm_bytes / SM_GB_PER_S / 1e3 / slower } else { 0.0 };
    let choice = CHOICES.into_iter().find(|sms| f64::from(*sms) >= MARGIN * least);
    choice.unwrap_or(CHOICES[CHOICES.len() - 1])
}

impl OperationTime {
    /// Both levels move rows at once: the slower link's time.
    pub fn overlapped_us(&self) -> f64 {
        self.out_us.max(self.inside_us)
    }

    /// One level after the other.
    pub fn serial_us(&self) -> f64 {
        self.out_us + self.inside_us
    }
}

impl Rates {
    /// The time of an operation in which links do nothing but carry bytes.
    pub fn time(&self, cost: &OperationCost) -> OperationTime {
        let us = |bytes: f64, gb_per_s: f64| bytes / gb_per_s / 1e3;
        let (out_us, inside_us) =
            (us(cost.out.bytes(), self.out), us(cost.inside.bytes(), self.inside));
        let slower = out_us.max(inside_us);
        let busy = us(cost.sm_bytes, self.sm);
        let sms = if slower > 0.0 { (busy / slower).ceil() } else { 0.0 };
        OperationTime { out_us, inside_us, sms }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LevelCost, RankRows, TwoLevels, UNIFORM};
    use super::*;

    /// An operation of the prototype of two levels at once: D, S, rate out, bytes of a row, whether it is a combine,
    /// and microseconds by number of SMs. 4 H200, a stand-in for the NIC, 4096 tokens, top-8 of 256, hidden 7168.
    type Measured = (u32, u32, f64, f64, bool, &'static [(u32, f64)]);

    const INSIDE: f64 = 365.0;
    const FP8: f64 = 7460.0;
    const BF16: f64 = 14_404.0;
    const BACK: f64 = 14_336.0;
    const MEASURED: [Measured; 12] = [
        (2, 8, 46.0, FP8, false, &[(8, 701.0), (12, 700.0), (16, 705.0), (24, 700.0), (32, 700.0)]),
        (2, 8, 46.0, BF16, false, &[(8, 1318.0), (12, 1317.0), (16, 1326.0), (24, 1317.0)]),
        (2, 8, 46.0, BACK, true, &[(8, 1614.0), (12, 1315.0), (16, 1326.0), (24, 1320.0)]),
        (2, 8, 92.0, FP8, false, &[(8, 633.0), (12, 584.0), (16, 572.0), (24, 539.0), (32, 533.0)]),
        (
            2,
            8,
            92.0,
            BF16,
            false,
            &[(8, 1184.0), (12, 1089.0), (16, 1076.0), (24, 998.0), (32, 993.0)],
        ),
        (
            2,
            8,
            92.0,
            BACK,
            true,
            &[(8, 1615.0), (12, 1185.0), (16, 1074.0), (24, 1042.0), (32, 1068.0)],
        ),
        (2, 2, 46.0, FP8, false, &[(4, 764.0), (6, 715.0), (8, 710.0), (12, 701.0), (24, 702.0)]),
        (
            2,
            2,
            46.0,
            BF16,
            false,
            &[(4, 1407.0), (6, 1327.0), (8, 1314.0), (12, 1322.0), (24, 1318.0)],
        ),
        (
            2,
            2,
            46.0,
            BACK,
            true,
            &[(4, 2254.0), (6, 1511.0), (8, 1317.0), (12, 1316.0), (24, 1352.0)],
        ),
        (2, 2, 92.0, FP8, false, &[(6, 523.0), (8, 414.0), (12, 395.0), (16, 404.0), (24, 370.0)]),
        (4, 8, 46.0, FP8, false, &[(6, 1859.0), (8, 1856.0), (12, 1856.0), (16, 1865.0)]),
        (4, 8, 46.0, BACK, true, &[(6, 3541.0), (8, 3516.0), (12, 3517.0), (16, 3539.0)]),
    ];

    #[test]
    fn the_formula_takes_at_most_3_percent_longer_than_the_best_of_the_prototype() {
        for (domains, domain_ranks, out, bytes, is_combine, times) in MEASURED {
            let levels = TwoLevels { domains, domain_ranks, experts: 256, topk: 8 };
            let rows = RankRows::expected(&levels, &UNIFORM, 4096.0).unwrap();
            let us = |rows: f64, rate: f64| rows * bytes / rate / 1e3;
            let [cross, inside] = rows.busiest();
            let links = [us(cross, out), us(inside, INSIDE)];
            let sms = sms_of(rows.by_sms()[usize::from(is_combine)] * bytes, links);
            let best = times.iter().map(|(_, us)| *us).fold(f64::INFINITY, f64::min);
            let what = format!("{domains} x {domain_ranks}, {out} GB/s, {bytes} bytes: {sms} SMs");
            let found = times.iter().find(|(measured, _)| *measured == sms);
            let (_, found) = found.unwrap_or_else(|| panic!("{what} were not measured"));
            assert!(*found <= 1.03 * best, "{what}: {found}, {best} at best");
        }
        assert_eq!((sms_of(0.0, [0.0; 2]), sms_of(1e12, [1.0; 2])), (6, 24));
    }

    #[test]
    fn the_slower_link_decides_time_and_sms() {
        let level = |row_bytes: f64| LevelCost { row_bytes, ..LevelCost::default() };
        let cost = OperationCost { out: level(1e6), inside: level(4e6), sm_bytes: 9e6 };
        let time = Rates { out: 50.0, inside: 400.0, sm: 45.0 }.time(&cost);
        assert_eq!((time.out_us, time.inside_us), (20.0, 10.0));
        assert_eq!((time.overlapped_us(), time.serial_us()), (20.0, 30.0));
        // 200 us of one SM in 20 us.
        assert_eq!(time.sms, 10.0);
        let nothing = Rates { out: 50.0, inside: 400.0, sm: 45.0 }.time(&OperationCost::default());
        assert_eq!((nothing.overlapped_us(), nothing.sms), (0.0, 0.0));
    }
}
