//! Kernels and host agree on where the arrays of a region lie: `region.cuh` is compiled for the host.

use std::path::Path;
use std::process::Command;

use tokenyard_core::Result;
use tokenyard_core::moe::{Layout, RegionLayout, RegionRows, RegionSpec, RowFormat, Shape};

/// Prints the offsets of one region per line. `CASES` is written by the test.
const MAIN: &str = r#"
#include <cstdio>
#include "region.cuh"
struct Case { ty::RegionShape shape; unsigned long long tokens, experts; };
const Case cases[] = {CASES};
int main() {
  for (const Case& c : cases) {
    ty::Region r(c.shape, c.tokens, c.experts);
    unsigned long long all[] = {r.scales, r.weights, r.ids, r.source, r.slots, r.rank_counts,
                                r.expert_counts, r.expert_starts, r.expert_ends, r.rank_ends, r.ranges, r.landed_scales,
                                r.landed_weights, r.landed_source, r.totals, r.lost, r.bytes};
    for (unsigned long long at : all) std::printf("%llu ", at);
    std::printf("\n");
  }
}
"#;

fn cases() -> Result<Vec<(RegionSpec, RegionRows)>> {
    let layouts =
        [Layout::Flat, Layout::ExpertMajor { alignment: 8, zero_padding: false }, Layout::Packed];
    let mut all = Vec::new();
    for (ranks, experts, topk, max_tokens) in [(1, 1, 1, 1), (3, 12, 3, 12), (8, 256, 8, 4096)] {
        let shape = Shape { ranks, experts, topk, hidden: 64, max_tokens };
        for (scale_bytes, weights) in [(0, false), (4, true), (224, false), (36, true)] {
            let row = RowFormat { x_bytes: 48, scale_bytes, weights };
            for layout in layouts {
                let spec = RegionSpec { shape, layout, row };
                let worst = RegionRows::worst(&spec)?;
                let few = |tokens| RegionRows { tokens, experts: 2 * tokens };
                let exact = [0, 1, u64::from(max_tokens)].map(few);
                // Packed regions always have space for all rows.
                let exact = exact.into_iter().filter(|_| layout != Layout::Packed);
                all.extend(exact.chain([worst]).map(|rows| (spec, rows)));
            }
        }
    }
    Ok(all)
}

fn as_cpp(case: &(RegionSpec, RegionRows)) -> String {
    let (spec, rows) = case;
    let Shape { ranks, topk, max_tokens, .. } = spec.shape;
    let local = spec.shape.local_experts();
    let (layout, experts) = match spec.layout {
        Layout::Flat => (1, rows.experts),
        Layout::ExpertMajor { .. } => (2, rows.experts),
        Layout::Packed => (3, u64::from(local) * u64::from(ranks) * u64::from(max_tokens)),
    };
    let RowFormat { x_bytes, scale_bytes, weights } = spec.row;
    let words = scale_bytes / 4;
    format!(
        "{{{{{layout}, {ranks}, {topk}, {local}, {x_bytes}, {words}, {weights}}}, {}, {experts}}}",
        rows.tokens
    )
}

fn offsets(region: &RegionLayout) -> String {
    let arrays = [
        region.scales,
        region.weights,
        region.ids,
        region.source,
        region.slots,
        region.rank_counts,
        region.expert_counts,
        region.expert_starts,
        region.expert_ends,
        region.rank_ends,
        region.ranges,
        region.landed_scales,
        region.landed_weights,
        region.landed_source,
        region.totals,
        region.lost,
    ];
    let starts = arrays.map(|array| array.offset).into_iter().chain([region.bytes]);
    starts.map(|at| format!("{at} ")).collect()
}

#[test]
fn kernels_and_host_lay_out_every_region_alike() {
    let cases = cases().expect("small shapes");
    let folder = tempfile::tempdir().expect("a folder");
    let (source, program) = (folder.path().join("main.cpp"), folder.path().join("main"));
    let list: Vec<_> = cases.iter().map(as_cpp).collect();
    std::fs::write(&source, MAIN.replace("CASES", &list.join(",\n"))).expect("written");
    let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("device/moe");
    let compiled = Command::new("g++")
        .args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(&headers)
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap_or_else(|e| panic!("g++ cannot be run ({e}): apt-get install g++"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&program).output().expect("it runs").stdout;
    let printed = String::from_utf8(printed).expect("numbers");
    assert_eq!(printed.lines().count(), cases.len());
    for (found, (spec, rows)) in printed.lines().zip(&cases) {
        let expected = RegionLayout::new(spec, *rows).expect("a small region");
        assert_eq!(found, offsets(&expected), "{spec:?}, {rows:?}");
    }
}
