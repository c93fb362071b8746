//! The traffic of each rank for a recorded routing.

use std::path::Path;

use anyhow::{Result, ensure};
use serde::Serialize;
use tokenyard_bench::levels::{RankRows, Rates};
use tokenyard_conformance::moe::input::InputFile;

use super::traffic::{AskedExchange, Operation};
use crate::output::{Cell, People, Table};

/// One rank of the world that is asked about.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct RankTraffic {
    rank: u32,
    tokens: f64,
    /// Rows of its output: (token, rank) pairs.
    rows_received: f64,
    dispatch: Operation,
    combine: Operation,
}

impl RankTraffic {
    fn new(rank: u32, rows: &RankRows, asked: &AskedExchange, rates: &Rates) -> Self {
        let model = asked.model(asked.levels);
        Self {
            rank,
            tokens: rows.tokens,
            rows_received: rows.from_sources.iter().sum(),
            dispatch: Operation::new(&model.dispatch(rows), rates),
            combine: Operation::new(&model.combine(rows), rates),
        }
    }

    fn us(&self) -> f64 {
        self.dispatch.overlapped_us + self.combine.overlapped_us
    }

    /// Tokens, then MB out, MB inside and microseconds of each operation.
    fn figures(&self) -> [f64; 7] {
        let Self { tokens, dispatch: d, combine: c, .. } = *self;
        [
            tokens,
            d.out.mb(),
            d.inside.mb(),
            d.overlapped_us,
            c.out.mb(),
            c.inside.mb(),
            c.overlapped_us,
        ]
    }
}

/// The traffic of each rank, for the routing of a file.
pub(super) fn of(path: &Path, asked: &AskedExchange, rates: &Rates) -> Result<Vec<RankTraffic>> {
    let file = InputFile::read(path)?;
    let levels = &asked.levels;
    let case = file.case(levels.ranks() as usize, Some(levels.experts as usize))?;
    ensure!(
        case.topk == levels.topk as usize,
        "read options: found top-{} of --topk; expected top-{} as in {}",
        levels.topk,
        case.topk,
        path.display()
    );
    let ranks = file.inputs(&case)?.ranks;
    let routings: Vec<Vec<i64>> = ranks.into_iter().map(|rank| rank.topk_idx).collect();
    let rows = RankRows::exact(levels, &routings);
    let ranks = (0..).zip(&rows).map(|(rank, rows)| RankTraffic::new(rank, rows, asked, rates));
    Ok(ranks.collect())
}

/// Prints the mean of the ranks, and the busiest.
pub(super) fn print(path: &Path, all: &[RankTraffic], people: People) {
    let Some(busiest) = all.iter().max_by(|a, b| a.us().total_cmp(&b.us())) else { return };
    let figures: Vec<[f64; 7]> = all.iter().map(RankTraffic::figures).collect();
    let sum = |at: usize| figures.iter().map(|of_rank| of_rank[at]).sum::<f64>();
    let mean = std::array::from_fn(|at| sum(at) / all.len() as f64);
    let head = ["ranks", "tokens", "out MB", "inside MB", "us", "out MB", "inside MB", "us"];
    let mut table = Table::new(&head);
    table.row(cells("mean of all".to_owned(), mean));
    table.row(cells(format!("busiest: {}", busiest.rank), busiest.figures()));
    people.say(format_args!("\n{}: a dispatch, then a combine", path.display()));
    people.say(table.render(people));
}

fn cells(name: String, figures: [f64; 7]) -> Vec<Cell> {
    let mut cells = vec![Cell::from(name)];
    // Whole tokens and microseconds, MB with two digits.
    let digits = [0, 2, 2, 0, 2, 2, 0];
    let texts = figures.iter().zip(digits).map(|(figure, digits)| format!("{figure:.digits$}"));
    cells.extend(texts.map(Cell::from));
    cells
}
