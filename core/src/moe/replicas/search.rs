//! The search for a plan: steps that help the busiest rank most, one after the other. Where no single step helps, a few
//! together may.

use std::cmp::Ordering;

use super::ReplicaPlan;

/// Steps that are tried as the first of several, the best ones, by the number of all.
const WIDTHS: [usize; 4] = [1, 64, 32, 16];
/// Steps that are looked at before the search ends with what it has: it has to end soon for many experts, too.
const LOOKS: usize = 1 << 18;

/// A change of the plan.
#[derive(Clone, Copy, Debug)]
struct Change {
    rank: usize,
    /// The replica that leaves the rank.
    out: Option<usize>,
    /// The one that comes.
    into: Option<usize>,
}

impl Change {
    fn back(self) -> Self {
        Self { out: self.into, into: self.out, ..self }
    }
}

/// How busy ranks are. Less is better.
#[derive(Clone, Copy, Debug)]
struct Score {
    /// The load of the busiest one.
    most: f64,
    /// The sum of squares of all loads: of plans with an equal `most`, the flatter one is better.
    squares: f64,
}

impl Score {
    fn of(loads: &[f64]) -> Self {
        let add = |score: Self, load: &f64| Self {
            most: score.most.max(*load),
            squares: score.squares + load * load,
        };
        loads.iter().fold(Self { most: 0.0, squares: 0.0 }, add)
    }

    fn is_better(self, than: Self) -> bool {
        // Sums in another order differ by a little. Without a margin the search could turn in circles.
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.max(b);
        match close(self.most, than.most) {
            true => !close(self.squares, than.squares) && self.squares < than.squares,
            false => self.most < than.most,
        }
    }

    fn compare(self, other: Self) -> Ordering {
        self.most.total_cmp(&other.most).then(self.squares.total_cmp(&other.squares))
    }
}

/// See the [module](self).
pub(super) struct Search<'a> {
    given: &'a [u64],
    spare: usize,
    /// Experts of a rank.
    local: usize,
    /// By expert, the ranks that have it.
    places: Vec<Vec<usize>>,
    /// By rank.
    replicas: Vec<Vec<usize>>,
    /// By rank.
    loads: Vec<f64>,
    /// Steps that may still be looked at.
    looks: usize,
}

impl<'a> Search<'a> {
    /// `ranks` divides the number of loads.
    pub(super) fn new(given: &'a [u64], ranks: usize, spare: usize) -> Self {
        let local = given.len() / ranks;
        let mut loads = vec![0.0; ranks];
        for (expert, load) in given.iter().enumerate() {
            loads[expert / local] += *load as f64;
        }
        let places = (0..given.len()).map(|expert| vec![expert / local]).collect();
        let replicas = vec![Vec::new(); ranks];
        Self { given, spare, local, places, replicas, loads, looks: LOOKS }
    }

    /// As [`new`](Self::new), with replicas from the start: of the expert that gives the busiest rank most, on the rank
    /// with the least load, as long as that is less busy then.
    pub(super) fn filled(given: &'a [u64], ranks: usize, spare: usize) -> Self {
        let mut search = Self::new(given, ranks, spare);
        while let Some(change) = search.plain_change() {
            search.apply(change);
        }
        search
    }

    fn plain_change(&self) -> Option<Change> {
        let busiest = self.busiest()?;
        let own = busiest * self.local..(busiest + 1) * self.local;
        let here = own.chain(self.replicas[busiest].iter().copied());
        let share = |expert: usize| self.given[expert] as f64 / self.places[expert].len() as f64;
        let expert = here.max_by(|a, b| share(*a).total_cmp(&share(*b)))?;
        let is_free = |rank: &usize| {
            self.replicas[*rank].len() < self.spare && !self.places[expert].contains(rank)
        };
        let ranks = (0..self.loads.len()).filter(is_free);
        let rank = ranks.min_by(|a, b| self.loads[*a].total_cmp(&self.loads[*b]))?;
        let places = self.places[expert].len() as f64;
        let after = self.loads[rank] + self.given[expert] as f64 / (places + 1.0);
        (after < self.loads[busiest]).then_some(Change { rank, out: None, into: Some(expert) })
    }

    /// The last of equals, as `max_by` finds it.
    fn busiest(&self) -> Option<usize> {
        (0..self.loads.len()).max_by(|a, b| self.loads[*a].total_cmp(&self.loads[*b]))
    }

    pub(super) fn plan(mut self) -> ReplicaPlan {
        while let Some(steps) = self.improvement() {
            steps.into_iter().for_each(|step| self.apply(step));
        }
        let slots = self.replicas.iter_mut().map(|replicas| {
            replicas.sort_unstable();
            let experts = replicas.iter().map(|expert| Some(*expert as u32));
            experts.chain(std::iter::repeat(None)).take(self.spare).collect()
        });
        ReplicaPlan { slots: slots.collect(), loads: self.loads }
    }

    /// Steps that together make the plan better, as few as do.
    fn improvement(&mut self) -> Option<Vec<Change>> {
        let than = Score::of(&self.loads);
        (1..=WIDTHS.len()).find_map(|count| self.improve(count, than))
    }

    fn improve(&mut self, count: usize, than: Score) -> Option<Vec<Change>> {
        let mut scored = self.scored();
        if count == 1 {
            let (step, score) = *scored.first()?;
            return score.is_better(than).then(|| vec![step]);
        }
        scored.truncate(WIDTHS[count - 1]);
        scored.into_iter().find_map(|(step, _)| {
            let behind = self.after(step, |search| search.improve(count - 1, than));
            behind.map(|steps| std::iter::once(step).chain(steps).collect())
        })
    }

    /// The steps that change the load of the busiest rank, the best first.
    fn scored(&mut self) -> Vec<(Change, Score)> {
        let mut steps = self.busiest().map_or_else(Vec::new, |busiest| self.steps(busiest));
        steps.truncate(self.looks);
        self.looks -= steps.len();
        let score = |step| (step, self.after(step, |search| Score::of(&search.loads)));
        let mut scored: Vec<_> = steps.into_iter().map(score).collect();
        scored.sort_by(|(_, a), (_, b)| a.compare(*b));
        scored
    }

    fn steps(&self, busiest: usize) -> Vec<Change> {
        let own = busiest * self.local..(busiest + 1) * self.local;
        let here = own.chain(self.replicas[busiest].iter().copied());
        let mut steps = Vec::new();
        for expert in here.filter(|expert| self.given[*expert] > 0) {
            let ranks = 0..self.replicas.len();
            for rank in ranks.filter(|rank| !self.places[expert].contains(rank)) {
                let replicas = &self.replicas[rank];
                let into = Some(expert);
                if replicas.len() < self.spare {
                    steps.push(Change { rank, out: None, into });
                }
                steps.extend(replicas.iter().map(|out| Change { rank, out: Some(*out), into }));
            }
        }
        // A replica that leaves the busiest rank, alone or for another one.
        let is_other =
            |expert: &usize| self.given[*expert] > 0 && !self.places[*expert].contains(&busiest);
        for out in &self.replicas[busiest] {
            let others = (0..self.given.len()).filter(is_other).map(Some);
            let into = std::iter::once(None).chain(others);
            steps.extend(into.map(|into| Change { rank: busiest, out: Some(*out), into }));
        }
        steps
    }

    /// The result of `look` behind a step, which is not taken.
    fn after<T>(&mut self, step: Change, look: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.loads.clone();
        self.apply(step);
        let found = look(self);
        self.apply(step.back());
        // Not those of a sum and its difference.
        self.loads = before;
        found
    }

    fn apply(&mut self, step: Change) {
        let Change { rank, out, into } = step;
        if let Some(expert) = out {
            self.spread(expert, -1.0);
            self.places[expert].retain(|place| *place != rank);
            self.replicas[rank].retain(|replica| *replica != expert);
            self.spread(expert, 1.0);
        }
        if let Some(expert) = into {
            self.spread(expert, -1.0);
            self.places[expert].push(rank);
            self.replicas[rank].push(expert);
            self.spread(expert, 1.0);
        }
    }

    /// Adds the load of an expert to its ranks, `sign` times.
    fn spread(&mut self, expert: usize, sign: f64) {
        let places = &self.places[expert];
        let each = sign * self.given[expert] as f64 / places.len() as f64;
        for rank in places {
            self.loads[*rank] += each;
        }
    }
}
