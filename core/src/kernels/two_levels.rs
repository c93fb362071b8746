//! The hand-over between the two exchanges of an operation over several domains. For kernel sets.
//!
//! The host calls both exchanges of an operation, one after the other: see `host/kernels/levels.rs`. A set has them as
//! an [`ExchangePair`], and does the [`Part`] that a call is about. The second exchange moves what the first one has
//! left in the arena of the rail: a dispatch the rows that it received there, a combine the [`Sums`] that it made
//! inside. Both are [`HeldRows`] until the operation is received. `calls` derives the call of each exchange from the
//! caller's.
//!
//! A set does the rest: how an exchange runs, and how the second one waits for the first.

mod calls;
mod held;

pub use held::{HeldRows, Rows, SumRows, Sums, bytes_of};

use crate::call::ExchangeKind;
use crate::{Error, ErrorKind, Result};

/// The exchanges of a communicator, each an `E`.
#[derive(Debug)]
pub struct ExchangePair<E> {
    /// With the owners of experts: all ranks, or the ranks of this domain.
    pub owners: E,
    /// Between several domains.
    pub rail: Option<Rail<E>>,
}

/// The exchange between domains.
#[derive(Debug)]
pub struct Rail<E> {
    /// With the ranks of other domains that have this rank's index there.
    pub between: E,
    /// The rows that pass between the two exchanges.
    pub held: HeldRows,
}

/// The part of an operation that a call is about.
#[derive(Debug)]
pub enum Part<'a, E> {
    /// All of it: there is one domain.
    Whole(&'a mut E),
    /// The exchange with owners inside this domain, which the rail has rows for, or is to get sums from.
    Inside(&'a mut E, &'a mut Rail<E>),
    /// The exchange on the rail, beside that with owners.
    OnRail(&'a mut E, &'a mut Rail<E>),
}

impl<E> ExchangePair<E> {
    /// The exchanges of a communicator that has at most `in_flight` operations open.
    pub fn new(owners: E, between: Option<E>, in_flight: u32) -> Self {
        let rail = between.map(|between| Rail { between, held: HeldRows::new(in_flight) });
        Self { owners, rail }
    }

    /// The part of a call about `exchange`.
    ///
    /// # Errors
    /// `Internal`: that on the rail, where there is one domain.
    pub fn part(&mut self, exchange: ExchangeKind) -> Result<Part<'_, E>> {
        if exchange == ExchangeKind::Owners && self.rail.is_none() {
            return Ok(Part::Whole(&mut self.owners));
        }
        let (owners, rail) = self.both()?;
        Ok(match exchange {
            ExchangeKind::Owners => Part::Inside(owners, rail),
            ExchangeKind::Rail => Part::OnRail(owners, rail),
        })
    }

    /// Both exchanges.
    ///
    /// # Errors
    /// `Internal`: there is one domain.
    pub fn both(&mut self) -> Result<(&mut E, &mut Rail<E>)> {
        let Some(rail) = &mut self.rail else {
            let message = "there is one domain";
            return Err(Error::new(ErrorKind::Internal, "exchange among domains", message));
        };
        Ok((&mut self.owners, rail))
    }

    /// The exchanges that there are, that with owners first.
    pub fn each(&mut self) -> impl Iterator<Item = &mut E> {
        [&mut self.owners].into_iter().chain(self.rail.as_mut().map(|rail| &mut rail.between))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_about_all_of_an_operation_where_there_is_one_domain() {
        let mut levels = ExchangePair::new("owners", None, 2);
        assert!(matches!(levels.part(ExchangeKind::Owners), Ok(Part::Whole(&mut "owners"))));
        let error = levels.part(ExchangeKind::Rail).expect_err("no rail").to_string();
        assert!(error.contains("there is one domain"), "{error}");
        assert_eq!(levels.each().collect::<Vec<_>>(), [&"owners"]);
    }

    #[test]
    fn a_call_about_one_exchange_of_several_domains_gets_the_other_one_too() {
        let mut levels = ExchangePair::new("owners", Some("rail"), 2);
        for exchange in [ExchangeKind::Owners, ExchangeKind::Rail] {
            let (kind, owners, rail) = match levels.part(exchange).expect("two levels") {
                Part::Whole(_) => panic!("two levels"),
                Part::Inside(owners, rail) => (ExchangeKind::Owners, owners, rail),
                Part::OnRail(owners, rail) => (ExchangeKind::Rail, owners, rail),
            };
            assert_eq!((kind, *owners, rail.between), (exchange, "owners", "rail"));
        }
        assert_eq!(levels.each().collect::<Vec<_>>(), [&"owners", &"rail"]);
    }
}
