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
    use super::super::LevelCost;
    use super::*;

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
