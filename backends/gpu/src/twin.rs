//! The ranks of a twin: GPUs that stand for ranks that are not there, see `standins/twin`. For tools.
//!
//! `args.cuh` of the kernels has the same functions, where `TY_TWIN` is the number of GPUs.

/// Numbers of GPUs that a twin may have.
pub const GPUS: [u32; 2] = [2, 4];

/// The rank whose GPU stands for `rank` in the eyes of `me`, where the first `gpus` ranks have one each.
///
/// Two GPUs stand for each other. Of four, each is the other of a pair in turn. One alone stands for all: its rail is
/// a loop. The GPU that stands for `rank` in the eyes of `me` knows `me` by that number.
pub fn stand_in(gpus: u32, me: u32, rank: u32) -> u32 {
    match gpus {
        _ if rank < gpus || me >= gpus => rank,
        1 => me,
        _ => me ^ (1 + (rank - gpus) % (gpus - 1)),
    }
}

/// The number under which `me` writes into the windows of `peer`.
pub fn writer_at(gpus: u32, me: u32, peer: u32) -> u32 {
    if me < gpus && peer >= gpus { peer } else { me }
}

/// The GPU that sends to `me` as the rank at a place of the world, and the rank for which it takes `me`.
pub fn sender(gpus: u32, domain_ranks: u32, me: u32, place: u32) -> (u32, u32) {
    let index = place % domain_ranks;
    let to = if index < gpus { me } else { index };
    (stand_in(gpus, me, index), place - index + to)
}

/// The rows that GPU `me` gets: those that each GPU has for each rank of the world as it knows it, `sends`.
pub fn received(gpus: u32, domain_ranks: u32, me: u32, sends: &[&[u64]]) -> u64 {
    let ranks = sends.first().map_or(0, |rows| rows.len() as u32);
    let from = |place: u32| {
        let (sender, to) = sender(gpus, domain_ranks, me, place);
        sends[sender as usize][to as usize]
    };
    (0..ranks).map(from).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_windows_of_ranks_from_2_on_are_those_of_the_other_gpu() {
        assert_eq!([0, 1, 2, 7].map(|peer| stand_in(2, 0, peer)), [0, 1, 1, 1]);
        assert_eq!([0, 1, 2, 7].map(|peer| stand_in(2, 1, peer)), [0, 1, 0, 0]);
        assert_eq!([0, 1, 2, 7].map(|peer| stand_in(2, 5, peer)), [0, 1, 2, 7]);
        assert_eq!([0, 1, 7].map(|peer| stand_in(1, 0, peer)), [0, 0, 0], "a rail is a loop");
    }

    #[test]
    fn of_four_gpus_each_stands_for_ranks_of_every_other() {
        for me in 0..4 {
            let seen: Vec<u32> = (4..7).map(|rank| stand_in(4, me, rank)).collect();
            let mut others: Vec<u32> = (0..4).filter(|other| *other != me).collect();
            assert!(others.iter().all(|other| seen.contains(other)), "{me}: {seen:?}");
            others.retain(|other| !seen.contains(other));
            assert!(others.is_empty());
        }
    }

    #[test]
    fn a_gpu_gets_rows_under_the_number_of_each_rank_once() {
        for (gpus, ranks) in [(1, 4), (2, 2), (2, 8), (4, 4), (4, 8)] {
            for owner in 0..gpus {
                let mut found: Vec<u32> = (0..gpus)
                    .flat_map(|me| (0..ranks).map(move |peer| (me, peer)))
                    .filter(|(me, peer)| stand_in(gpus, *me, *peer) == owner)
                    .map(|(me, peer)| writer_at(gpus, me, peer))
                    .collect();
                found.sort_unstable();
                assert_eq!(found, (0..ranks).collect::<Vec<_>>(), "{gpus} GPUs, {ranks} ranks");
            }
        }
    }

    /// D domains of S ranks, and the ranks (domain, index) that each token of a source goes to.
    #[derive(Clone, Copy)]
    struct World {
        gpus: u32,
        domains: u32,
        size: u32,
    }
    type Tokens = Vec<Vec<(u32, u32)>>;

    /// The rows of one rank: between domains by the other domain, and inside by source (domain, index), each with the
    /// number of its token.
    #[derive(Debug, Default, PartialEq)]
    struct Load {
        sends_out: Vec<Vec<usize>>,
        comes_out: Vec<Vec<usize>>,
        sends_inside: Vec<Vec<usize>>,
        comes_inside: Vec<Vec<usize>>,
    }

    fn reach_domain(tokens: &Tokens, domain: u32) -> Vec<usize> {
        let goes = |token: &usize| tokens[*token].iter().any(|(d, _)| *d == domain);
        (0..tokens.len()).filter(goes).collect()
    }

    fn reach(tokens: &Tokens, rank: (u32, u32)) -> Vec<usize> {
        (0..tokens.len()).filter(|token| tokens[*token].contains(&rank)).collect()
    }

    impl World {
        fn ranks(self) -> impl Iterator<Item = (u32, u32)> {
            (0..self.domains).flat_map(move |d| (0..self.size).map(move |q| (d, q)))
        }

        /// The load of rank (0, `me`) by the rules of two levels, where each source has tokens of its own.
        fn real(self, me: u32, tokens: impl Fn((u32, u32)) -> Tokens) -> Load {
            let others = || 1..self.domains;
            Load {
                sends_out: others().map(|d| reach_domain(&tokens((0, me)), d)).collect(),
                comes_out: others().map(|d| reach_domain(&tokens((d, me)), 0)).collect(),
                sends_inside: self.ranks().map(|(d, q)| reach(&tokens((d, me)), (0, q))).collect(),
                comes_inside: self.ranks().map(|source| reach(&tokens(source), (0, me))).collect(),
            }
        }

        /// The load of GPU `me` in a twin: by the rows of each GPU, and the windows where they arrive.
        fn twin(self, me: u32, of_gpus: &[Tokens]) -> Load {
            let own = &of_gpus[me as usize];
            let mut load = Load {
                sends_out: (1..self.domains).map(|d| reach_domain(own, d)).collect(),
                comes_out: vec![Vec::new(); self.domains as usize - 1],
                // A row that has come from domain d was for domain d.
                sends_inside: self.ranks().map(|to| reach(own, to)).collect(),
                comes_inside: vec![Vec::new(); (self.domains * self.size) as usize],
            };
            for domain in 1..self.domains {
                let [to, from] = [stand_in(1, 0, domain), writer_at(1, 0, domain)];
                assert_eq!(to, 0, "the same GPU");
                load.comes_out[from as usize - 1].extend(reach_domain(own, domain));
            }
            for (sender, tokens) in (0..self.gpus).zip(of_gpus) {
                for (domain, peer) in self.ranks() {
                    if stand_in(self.gpus, sender, peer) == me {
                        let source = domain * self.size + writer_at(self.gpus, sender, peer);
                        load.comes_inside[source as usize].extend(reach(tokens, (domain, peer)));
                    }
                }
            }
            load
        }

        /// The tokens of `source` in a real world whose rank (0, `me`) has the load of GPU `me`: those of the GPU that
        /// stands for the source, where two domains and two ranks of each have changed names.
        fn stood_for(self, me: u32, source: (u32, u32), of_gpus: &[Tokens]) -> Tokens {
            let swap = |at: u32, a: u32, b: u32| match at {
                _ if at == a => b,
                _ if at == b => a,
                _ => at,
            };
            let (domain, index) = source;
            let sender = stand_in(self.gpus, me, index);
            // A GPU that is there sends to this one under its own number.
            let to = if index < self.gpus { me } else { index };
            let rename = |(d, q): &(u32, u32)| (swap(*d, 0, domain), swap(*q, me, to));
            let tokens = &of_gpus[sender as usize];
            tokens.iter().map(|ranks| ranks.iter().map(rename).collect()).collect()
        }
    }

    #[test]
    fn a_gpu_sends_and_gets_what_the_rank_does_that_it_stands_for() {
        let mut state = 1_u64;
        let mut random = |below: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 33) % u64::from(below)) as u32
        };
        for (gpus, domains, size) in
            [(2, 2, 8), (2, 4, 8), (2, 8, 8), (4, 2, 8), (4, 4, 4), (2, 2, 2)]
        {
            let world = World { gpus, domains, size };
            let of_gpus: Vec<Tokens> = (0..gpus)
                .map(|_| {
                    (0..50)
                        .map(|_| (0..6).map(|_| (random(domains), random(size))).collect())
                        .collect()
                })
                .collect();
            for me in 0..gpus {
                let real = world.real(me, |source| world.stood_for(me, source, &of_gpus));
                let counts: Vec<Vec<u64>> = of_gpus
                    .iter()
                    .map(|tokens| world.ranks().map(|to| reach(tokens, to).len() as u64).collect())
                    .collect();
                let counts: Vec<&[u64]> = counts.iter().map(Vec::as_slice).collect();
                let rows: usize = real.comes_inside.iter().map(Vec::len).sum();
                assert_eq!(received(gpus, size, me, &counts), rows as u64);
                assert_eq!(
                    world.twin(me, &of_gpus),
                    real,
                    "{gpus} GPUs, {domains} x {size}, rank {me}"
                );
            }
        }
    }
}
