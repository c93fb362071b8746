//! Any bytes as reports of ranks, one per line. Reports that can be read can be explained and printed, and a
//! verdict that blames names ranks or a reason.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokenyard_reports::{Kind, explain};
use tokenyard_core::report::{Report, read, text};

fuzz_target!(|bytes: &[u8]| {
    let lines = bytes.split(|byte| *byte == b'\n').take(16);
    let reports: Vec<Report> = lines.filter_map(|line| read(line).ok()).collect();
    for report in &reports {
        let text = text(report);
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    }
    let Some(explanation) = explain(reports) else { return };
    let verdict = explanation.verdict;
    assert!(!verdict.sentence.is_empty());
    assert_eq!(verdict.fix.is_empty(), verdict.kind == Kind::Healthy);
});
