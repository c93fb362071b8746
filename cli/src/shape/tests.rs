use clap::Parser;
use proptest::prelude::*;

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: ShapeArgs,
}

fn args(more: &str) -> ShapeArgs {
    let base = "shape --ranks 4 --experts 16 --topk 2 --hidden 256 --max-tokens 8";
    let words = base.split_whitespace().chain(more.split_whitespace());
    Cli::try_parse_from(words).map(|cli| cli.args).unwrap()
}

fn buffer(more: &str, name: &str) -> Option<Buffer> {
    let args = args(more);
    let shape = Shape { ranks: 4, experts: 16, topk: 2, hidden: 256, max_tokens: 8 }.new().unwrap();
    list(&args, &shape).unwrap().into_iter().find(|b| b.name == name)
}

#[test]
fn the_rows_of_a_region_follow_the_type() {
    let x = |more: &str| buffer(more, "flat region: x").unwrap().bytes;
    assert_eq!(x(""), 4 * 8 * 512);
    assert_eq!(x("--dtype fp32"), 4 * 8 * 1024);
    assert_eq!(x("--dtype fp8"), 4 * 8 * 256);
    let scales = |more: &str| buffer(more, "flat region: scales").map(|b| b.bytes);
    assert_eq!(scales("--dtype fp8"), Some(4 * 8 * 2 * 4));
    assert_eq!(scales("--dtype fp8-ue8m0"), Some(4 * 8 * 4));
    assert_eq!(scales(""), None);
}

#[test]
fn one_layout_can_be_asked_for() {
    assert!(buffer("--layout packed", "flat region: x").is_none());
    assert!(buffer("--layout packed", "packed region: x").is_some());
    assert!(buffer("--layout rank-major", "rank-major region: x").is_some());
    assert!(buffer("--layout packed", "control area").is_some());
}

#[test]
fn a_cap_bounds_the_rows_of_flat_and_expert_major_regions() {
    let x = |more: &str| buffer(more, "expert-major region: x").unwrap().bytes;
    // 32 tokens, each for 2 of the 4 experts of a rank.
    assert_eq!((x(""), x("--max-rows 10"), x("--max-rows 100")), (64 * 512, 10 * 512, 64 * 512));
    assert_eq!(buffer("--max-rows 10", "flat region: source").unwrap().bytes, 10 * 4);
    let shape = Shape { ranks: 4, experts: 16, topk: 2, hidden: 256, max_tokens: 8 }.new().unwrap();
    for (more, word) in [
        ("--kernels cuda", "--kernels cuda"),
        ("--domains 2", "--domains 2"),
        ("--layout packed", "--layout packed"),
        ("--layout rank-major", "--layout rank-major"),
    ] {
        let error = list(&args(&format!("--max-rows 10 {more}")), &shape).unwrap_err().to_string();
        assert!(error.contains(&format!("found --max-rows with {word}")), "{error}");
    }
}

#[test]
fn staging_is_needed_only_where_rows_are_put() {
    assert_eq!(buffer("", "staging").unwrap().bytes, 0);
    assert!(buffer("--path put", "staging").unwrap().bytes > 0);
}

#[test]
fn several_domains_need_room_for_the_rail() {
    assert!(buffer("", "rail staging").is_none());
    let bytes = |name| buffer("--domains 2", name).unwrap().bytes;
    assert!(bytes("rail staging") > 0);
    assert_eq!(2 * bytes("rail landing places"), bytes("landing places"));
    let slot = bytes("control area") + bytes("landing places") * 2 + 2 * bytes("rail records");
    let rail = 2 * bytes("rail staging") + 2 * bytes("rail landing places");
    assert_eq!(bytes("control window"), slot + bytes("control area") + rail);
}

#[test]
fn handles_cost_what_their_number_and_the_domains_make_of_it() {
    let bytes = |more: &str| buffer(more, "handles").unwrap().bytes;
    assert_eq!(bytes("--handles 16"), 2 * bytes(""));
    let plans = buffer("", "send plan").unwrap().bytes + buffer("", "receive plan").unwrap().bytes;
    // Routing; places of 32 bytes with the rows that each takes; first rows.
    assert_eq!(bytes("--handles 1"), plans + 4 * 8 * 2 + 36 * 4 + 4 * 16);
    let plans: u64 = [
        "send plans inside the domain",
        "send plan between domains",
        "receive plan between domains",
        "receive plan",
    ]
    .map(|name| buffer("--domains 2", name).unwrap().bytes)
    .iter()
    .sum();
    let routing = 2 * (4 * 8 * 2 + 36 * 2 + 4 * 8) + 4 * 8 * 2 + 36 * 2 + 4 * 16;
    assert_eq!(bytes("--domains 2 --handles 1"), plans + routing);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Sizes near a power of two, or near zero, where sums and products may overflow.
    #[test]
    fn extreme_sizes_are_refused_or_summed_up_but_never_overflow(
        sizes in prop::array::uniform5((0_u32..33, 0_u32..3)),
        (alignment, in_flight, handles) in (1_u32..=4096, 1_u32..=16, 1_u32..=1024),
        (domains, put, dtype) in (0_u32..33, any::<bool>(), 0_usize..5),
        (groups, gpu) in (0_u32..11, any::<bool>()),
    ) {
        let [ranks, experts, topk, hidden, max_tokens] =
            sizes.map(|(bits, off)| (1_u64 << bits).saturating_sub(off.into()) as u32);
        let path = if put { PathName::Put } else { PathName::LoadStore };
        let dtype = *RowName::value_variants().get(dtype).unwrap();
        let domains = (1_u64 << domains).min(u32::MAX.into()) as u32;
        let json = true;
        let layout = None;
        let traffic = args(&format!("--groups {}", 1_u32 << groups)).traffic;
        let args = ShapeArgs {
            ranks, experts, topk, hidden, max_tokens, dtype, layout, alignment, in_flight,
            handles, domains, path, traffic, json,
            kernels: if gpu { KernelsName::Cuda } else { KernelsName::Cpu },
            card_memory: None,
            max_rows: None,
            arena_mib: None,
            low_latency: false,
            between: PutsName::Host,
        };
        let asked = shape_of(&args).and_then(|shape| asked(&args, &shape));
        if let Ok(all) = asked.and_then(|asked| args.traffic.of(&asked)) {
            prop_assert!(all.iter().all(Traffic::is_finite));
        }
        if let Ok(all) = shape_of(&args).and_then(|shape| list(&args, &shape)) {
            let all = all.iter().map(|buffer| buffer.bytes).collect::<Vec<_>>();
            // Every expert has a count in the records, on every rank.
            prop_assert!(all.iter().max().unwrap() >= &(8 * u64::from(experts)));
        }
    }
}

#[test]
fn a_row_that_cannot_cross_is_refused() {
    let mut args = args("--dtype fp8");
    args.hidden = 24;
    assert!(row_format(&args).unwrap_err().to_string().contains("hidden = 24"));
    args.dtype = RowName::Bf16;
    assert!(row_format(&args).is_ok());
    args.hidden = u32::MAX;
    assert!(row_format(&args).is_err());
}
