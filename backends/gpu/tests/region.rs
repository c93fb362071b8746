//! Kernels and host agree on where the arrays of a region lie, and on formats of rows: `region.cuh` and `quant.cuh` are
//! compiled for the host.

// Helpers of a test may panic as a test may.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::Command;

use tokenyard_core::Result;
use tokenyard_core::moe::{
    Cast, DType, Layout, Quant, RegionLayout, RegionRows, RegionSpec, RowFormat, Shape,
};

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

/// Prints types, casts and formats, each in a line.
const FORMATS: &str = r#"
#include <cstdio>
#include "quant.cuh"
using namespace ty;
const char* const scales[] = {"F32", "PowerOfTwo", "Bf16Range"};
const char* const packings[] = {"Words", "Exponents"};
template <class Q> void print(Q q) {
  std::printf("%u bits, %u channels, %s, %s, ", q.bits, q.group, scales[(u32)q.scale], packings[(u32)q.packing]);
  std::printf("%u in a word\n", q.word_channels());
}
int main() {
  std::printf("%u %u %u\n", (u32)DType::kBf16, (u32)DType::kFp16, (u32)DType::kFp32);
  std::printf("%u %u %u\n", bytes_of(DType::kBf16), bytes_of(DType::kFp16), bytes_of(DType::kFp32));
  std::printf("%u %u %u %u\n", (u32)Cast::kNone, (u32)Cast::kFp8, (u32)Cast::kFp8Round, (u32)Cast::kFp8Ue8m0);
  const Cast casts[] = {Cast::kFp8, Cast::kFp8Round, Cast::kFp8Ue8m0};
  for (Cast cast : casts) print(quant_of(cast));
  print(kLogFmt10);
}
"#;
/// The words of the kernels' dialect that formats need.
const DIALECT: &str = "#define __device__\nnamespace ty { using u32 = unsigned; }\n";

fn cases() -> Result<Vec<(RegionSpec, RegionRows)>> {
    let major = Layout::ExpertMajor { alignment: 8, zero_padding: false };
    let rank_major = Layout::RankMajor { zero_padding: true };
    let layouts = [Layout::Flat, major, Layout::Packed, rank_major];
    let mut all = Vec::new();
    for (ranks, experts, topk, max_tokens) in [(1, 1, 1, 1), (3, 12, 3, 12), (8, 256, 8, 4096)] {
        let shape = Shape { ranks, experts, topk, hidden: 64, max_tokens };
        for (scale_bytes, weights) in [(0, false), (4, true), (224, false), (36, true)] {
            let row = RowFormat { x_bytes: 48, scale_bytes, weights };
            for layout in layouts {
                let spec = RegionSpec::new(shape, layout, row);
                let worst = RegionRows::worst(&spec)?;
                let few = |tokens| RegionRows { tokens, experts: 2 * tokens };
                let exact = [0, 1, u64::from(max_tokens)].map(few);
                // Regions of fixed places always have space for all rows.
                let exact = exact.into_iter().filter(|_| !layout.has_fixed_places());
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
    let layout = match spec.layout {
        // Kernels lay out as many flat rows.
        Layout::RankMajor { .. } => Layout::Flat.code(),
        layout => layout.code(),
    };
    let experts = match spec.layout {
        Layout::Flat | Layout::ExpertMajor { .. } | Layout::RankMajor { .. } => rows.experts,
        Layout::Packed => u64::from(local) * u64::from(ranks) * u64::from(max_tokens),
    };
    let RowFormat { x_bytes, scale_bytes, weights } = spec.row;
    let words = scale_bytes / 4;
    format!(
        "{{{{ty::Layout({layout}), {ranks}, {topk}, {local}, {x_bytes}, {words}, {weights}}}, {}, {experts}}}",
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

/// The output of a program that includes headers of the kernels.
fn printed_by(text: &str, headers: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, program) = (folder.path().join("main.cpp"), folder.path().join("main"));
    std::fs::write(&source, text).expect("written");
    std::fs::write(folder.path().join("arch.cuh"), DIALECT).expect("written");
    let compiled = Command::new("g++")
        .args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(headers))
        .arg("-I")
        .arg(folder.path())
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap_or_else(|e| panic!("g++ cannot be run ({e}): apt-get install g++"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&program).output().expect("it runs").stdout;
    String::from_utf8(printed).expect("text")
}

#[test]
fn kernels_and_host_lay_out_every_region_alike() {
    let cases = cases().expect("small shapes");
    let list: Vec<_> = cases.iter().map(as_cpp).collect();
    let printed = printed_by(&MAIN.replace("CASES", &list.join(",\n")), "device/moe");
    assert_eq!(printed.lines().count(), cases.len());
    for (found, (spec, rows)) in printed.lines().zip(&cases) {
        let expected = RegionLayout::new(spec, *rows).expect("a small region");
        assert_eq!(found, offsets(&expected), "{spec:?}, {rows:?}");
    }
}

#[test]
fn kernels_and_host_have_the_same_formats_and_codes_of_types() {
    let line = |codes: &[u32]| codes.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let types = [DType::Bf16, DType::F16, DType::F32];
    let casts = [Cast::Fp8, Cast::Fp8Round, Cast::Fp8Ue8m0];
    let mut expected = vec![
        line(&types.map(DType::code)),
        line(&types.map(|of| of.bytes() as u32)),
        line(&[Cast::None, casts[0], casts[1], casts[2]].map(Cast::code)),
    ];
    let formats = casts.iter().filter_map(|cast| cast.quant()).chain([Quant::LOGFMT_10]);
    expected.extend(formats.map(|quant| {
        let in_word = (1..).find(|&channels| quant.scale_words(channels + 1) > 1);
        format!(
            "{} bits, {} channels, {:?}, {:?}, {} in a word",
            quant.bits,
            quant.group,
            quant.scale,
            quant.packing,
            in_word.expect("a row of two words")
        )
    }));
    let found = printed_by(FORMATS, "device/codec");
    assert_eq!(found.lines().collect::<Vec<_>>(), expected);
}
