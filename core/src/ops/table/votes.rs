//! The votes of ranks before a write: a byte, then the entries of each layer, 8 bytes each; or why a rank refuses.

use super::TableOptions;
use crate::{Error, ErrorKind, Result};

const GOES: u8 = 0;
const REFUSES: u8 = 1;

/// The vote of this rank.
pub(super) enum Vote<'a> {
    /// It has so many entries, by layer.
    Goes(&'a [u64]),
    Refuses(&'a str),
}

impl Vote<'_> {
    pub(super) fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Goes(counts) => {
                let counts = counts.iter().flat_map(|count| count.to_le_bytes());
                std::iter::once(GOES).chain(counts).collect()
            }
            Self::Refuses(why) => std::iter::once(REFUSES).chain(why.bytes()).collect(),
        }
    }
}

/// The votes of all ranks.
#[derive(Debug)]
pub(super) enum Votes {
    /// All write: by layer, the entries of each rank.
    Go(Vec<Vec<u64>>),
    /// The first refusal, in order of ranks. No rank writes.
    Refused(Error),
}

impl Votes {
    /// # Errors
    /// `Protocol`: the vote of a rank cannot be.
    pub(super) fn read(votes: &[Vec<u8>], options: &TableOptions) -> Result<Self> {
        let TableOptions { layers, max_entries, .. } = *options;
        let mut by_layer = vec![Vec::with_capacity(votes.len()); layers as usize];
        for (rank, vote) in (0..).zip(votes) {
            match vote.split_first() {
                Some((&REFUSES, why)) => {
                    let why = String::from_utf8_lossy(why);
                    let text = format!("rank {rank} refused the write: {why}");
                    let refusal = Error::new(ErrorKind::Refused, "write table", text);
                    return Ok(Self::Refused(refusal.with_rank(rank)));
                }
                Some((&GOES, counts)) if counts.len() == 8 * layers as usize => {
                    for (all, word) in by_layer.iter_mut().zip(counts.as_chunks().0) {
                        let count = u64::from_le_bytes(*word);
                        if count > max_entries {
                            let text = format!("{count} entries; expected at most {max_entries}");
                            return Err(bad_vote(rank, &text));
                        }
                        all.push(count);
                    }
                }
                _ => {
                    let text = format!(
                        "{} bytes; expected one, then 8 for each of {layers} layers",
                        vote.len()
                    );
                    return Err(bad_vote(rank, &text));
                }
            }
        }
        Ok(Self::Go(by_layer))
    }
}

#[cold]
fn bad_vote(rank: u32, found: &str) -> Error {
    let text = format!("the vote of rank {rank}: found {found}");
    Error::new(ErrorKind::Protocol, "write table", text).with_rank(rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(votes: &[Vec<u8>], layers: u32) -> Result<Votes> {
        Votes::read(votes, &TableOptions { layers, ..TableOptions::new(8, 9, 1) })
    }

    #[test]
    fn votes_give_the_entries_of_each_rank_by_layer() {
        let votes = [Vote::Goes(&[3, 0]).bytes(), Vote::Goes(&[1, 9]).bytes()];
        let Votes::Go(by_layer) = read(&votes, 2).unwrap() else { panic!("no rank refuses") };
        assert_eq!(by_layer, [[3, 1], [0, 9]]);
    }

    #[test]
    fn the_first_rank_that_refuses_is_named() {
        let refusals = ["no entries", "none either"].map(|why| Vote::Refuses(why).bytes());
        let votes = [Vote::Goes(&[3]).bytes(), refusals[0].clone(), refusals[1].clone()];
        let Votes::Refused(error) = read(&votes, 1).unwrap() else { panic!("two ranks refuse") };
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(1)));
        assert!(error.to_string().contains("no entries"), "{error}");
    }

    #[test]
    fn a_vote_that_cannot_be_is_an_error_of_its_rank() {
        let many = Vote::Goes(&[10]).bytes();
        for vote in [vec![], vec![0], vec![2; 9], vec![0; 10], many] {
            let error = read(&[vec![0; 9], vote], 1).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Protocol, Some(1)));
        }
    }
}
