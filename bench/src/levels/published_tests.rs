//! Figures that other libraries publish for exchanges among several nodes, beside the model.
//!
//! They count a row once for each node that it goes to, its own included ("algorithm bandwidth"), over
//! the time of the operation. So bytes of rows cancel out, and the model has one figure for all types.

use std::fmt::Write as _;

use super::{Gate, RankRows, Rates, TwoLevels, UNIFORM};

/// One published pair of figures.
#[derive(Clone, Copy, Debug)]
struct Published {
    /// GPU and NIC.
    hardware: &'static str,
    /// The library, and where it publishes the figures.
    library: &'static str,
    /// Nodes of 8 GPUs.
    nodes: u32,
    /// E of its test; K is 8.
    experts: u32,
    /// Groups that its test chooses experts from.
    gate: Gate,
    /// Rates of the links: the best that are known.
    rates: Rates,
    /// Dispatch, combine in GB/s.
    gb_per_s: [f64; 2],
}

const fn rates(out: f64, inside: f64) -> Rates {
    Rates { out, inside, sm: 45.0 }
}

/// The test of DeepEP V1 chooses from at most 4 nodes.
const fn nodes(groups: u32) -> Gate {
    Gate { groups, chosen: if groups < 4 { groups } else { 4 } }
}

/// NVLink of H800, H100 and H200, and B200; xGMI of MI300X. Of EFA no better figures are known than those
/// that are compared: 54 * 3/4 and 57 * 3/4.
const H800: Rates = rates(46.0, 160.0);
const H100: Rates = rates(46.0, 340.0);
const B200: Rates = rates(46.0, 648.0);
const MI300X: Rates = rates(46.0, 289.0);
const H200_EFA: Rates = rates(40.5, 340.0);
const B200_EFA: Rates = rates(42.8, 648.0);

const DEEP_EP_V1: Published = Published {
    hardware: "H800, CX7",
    library: "DeepEP V1",
    nodes: 2,
    experts: 256,
    gate: nodes(2),
    rates: H800,
    gb_per_s: [43.0, 43.0],
};
const DEEP_EP_V2: Published = Published {
    hardware: "H100, CX7",
    library: "DeepEP V2",
    gate: UNIFORM,
    rates: H100,
    gb_per_s: [90.0, 81.0],
    ..DEEP_EP_V1
};
const HYBRID_EP: Published =
    Published { library: "Hybrid-EP", gb_per_s: [76.8, 68.0], ..DEEP_EP_V2 };
const UCCL: Published = Published { library: "UCCL-EP", experts: 288, ..DEEP_EP_V1 };
const UCCL_H200: Published =
    Published { hardware: "H200, EFA", rates: H200_EFA, gb_per_s: [50.0, 18.0], ..UCCL };
const UCCL_B200: Published =
    Published { hardware: "B200, EFA", rates: B200_EFA, gb_per_s: [53.0, 60.0], ..UCCL };
const UCCL_MI300X: Published =
    Published { hardware: "MI300X, CX7", rates: MI300X, gb_per_s: [82.0, 78.0], ..UCCL };
const MORI: Published = Published {
    hardware: "MI300X, CX7",
    library: "MORI",
    rates: MI300X,
    gb_per_s: [52.0, 67.0],
    ..DEEP_EP_V2
};

/// The published figures of the comparison: BF16 dispatches where a library publishes both types.
const PUBLISHED: [Published; 20] = [
    DEEP_EP_V1,
    Published { nodes: 4, gate: nodes(4), gb_per_s: [58.0, 57.0], ..DEEP_EP_V1 },
    Published { nodes: 8, gate: nodes(8), gb_per_s: [51.0, 50.0], ..DEEP_EP_V1 },
    DEEP_EP_V2,
    Published { nodes: 4, gb_per_s: [61.0, 61.0], ..DEEP_EP_V2 },
    Published { hardware: "B200, CX7", rates: B200, gb_per_s: [90.0, 91.0], ..DEEP_EP_V2 },
    HYBRID_EP,
    Published { nodes: 4, gb_per_s: [57.7, 57.5], ..HYBRID_EP },
    Published { nodes: 8, gb_per_s: [50.6, 51.0], ..HYBRID_EP },
    UCCL_H200,
    Published { nodes: 3, gate: nodes(3), gb_per_s: [53.0, 26.0], ..UCCL_H200 },
    Published { nodes: 4, gate: nodes(4), gb_per_s: [54.0, 43.0], ..UCCL_H200 },
    UCCL_B200,
    Published { nodes: 3, gate: nodes(3), gb_per_s: [53.0, 59.0], ..UCCL_B200 },
    Published { nodes: 4, gate: nodes(4), gb_per_s: [53.0, 57.0], ..UCCL_B200 },
    UCCL_MI300X,
    Published { nodes: 4, gate: nodes(4), gb_per_s: [61.0, 60.0], ..UCCL_MI300X },
    // 288 experts do not fit 64 ranks; their number does not matter where the NIC is slower.
    Published { nodes: 8, experts: 256, gate: nodes(8), gb_per_s: [53.0, 51.0], ..UCCL_MI300X },
    MORI,
    Published { nodes: 4, gb_per_s: [57.0, 50.0], ..MORI },
];

/// The model's answer to a published pair of figures.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Modelled {
    /// GB/s, both levels overlapped.
    gb_per_s: f64,
    /// GB/s, one level after the other.
    serial: f64,
    /// Whether the link between nodes is the slower one.
    is_out: bool,
}

impl Published {
    /// None where the gate does not fit the nodes.
    fn modelled(&self) -> Option<Modelled> {
        let (domains, domain_ranks) = (self.nodes, 8);
        let levels = TwoLevels { domains, domain_ranks, experts: self.experts, topk: 8 };
        let rows = RankRows::expected(&levels, &self.gate, 1.0)?;
        let counted: f64 = rows.to_domains.iter().sum();
        let out = rows.crossing() / self.rates.out;
        let inside = rows.moved_inside() / self.rates.inside;
        Some(Modelled {
            gb_per_s: counted / out.max(inside),
            serial: counted / (out + inside),
            is_out: out > inside,
        })
    }
}

/// The table of `docs/two-levels.md`.
fn table() -> String {
    let mut text = "| hardware | library | ranks | links, GB/s | slower | model | serial | \
                    published | of the model |\n|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for published in &PUBLISHED {
        let Some(found) = published.modelled() else { continue };
        let [dispatch, combine] = published.gb_per_s;
        let part = |figure: f64| format!("{:.0} %", 100.0 * figure / found.gb_per_s);
        let _ = writeln!(
            text,
            "| {} | {} | {} | {}, {} | {} | {:.0} | {:.0} | {dispatch}, {combine} | {}, {} |",
            published.hardware,
            published.library,
            8 * published.nodes,
            published.rates.out,
            published.rates.inside,
            if found.is_out { "out" } else { "inside" },
            found.gb_per_s,
            found.serial,
            part(dispatch),
            part(combine)
        );
    }
    text
}

#[test]
fn the_page_has_the_table_as_the_model_makes_it() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/two-levels.md");
    let page = std::fs::read_to_string(path).unwrap();
    assert!(page.contains(&table()), "docs/two-levels.md has another table than\n{}", table());
}

#[test]
fn every_published_pair_has_an_answer_and_none_beats_the_links() {
    for published in &PUBLISHED {
        let found = published.modelled().unwrap();
        assert!(found.serial < found.gb_per_s, "{published:?}");
        // Figures have two or three digits, and the rates are those of other runs.
        let best = published.gb_per_s[0].max(published.gb_per_s[1]);
        assert!(best <= 1.05 * found.gb_per_s, "{published:?}: {found:?}");
    }
}
