use super::*;

fn world(versions: &[&str], hosts: &[&str]) -> Vec<Summary> {
    let rank = |(version, host): (&&str, &&str)| {
        let items = [("tokenyard".to_owned(), (*version).to_owned())].into();
        Summary { host: (*host).to_owned(), items, ..Summary::default() }
    };
    versions.iter().zip(hosts).map(rank).collect()
}

fn bad(findings: &[Finding]) -> Vec<(&str, &str)> {
    let bad = findings.iter().filter(|finding| finding.verdict != Verdict::Ok);
    bad.map(|finding| (finding.subject.as_str(), finding.found.as_str())).collect()
}

#[test]
fn the_one_that_differs_from_most_is_named() {
    let found = compare(&world(&["1", "1", "2", "1"], &["a", "b", "c", "d"]));
    assert_eq!(bad(&found), [("tokenyard of c (rank 2)", "2")]);
    assert_eq!(found[0].verdict, Verdict::Broken);
    assert_eq!(found[0].expected, "1, as on most");
}

#[test]
fn of_two_hosts_both_are_named() {
    let found = compare(&world(&["1", "1", "2"], &["a", "a", "b"]));
    let expected = [("tokenyard of a (ranks 0-1)", "1"), ("tokenyard of b (rank 2)", "2")];
    assert_eq!(bad(&found), expected);
    assert!(bad(&compare(&world(&["1", "1"], &["a", "b"]))).is_empty());
}

#[test]
fn what_one_node_lacks_is_named_too() {
    let mut all = world(&["1", "1", "1"], &["a", "b", "c"]);
    all[0].items.insert("module efa".into(), "2.1".into());
    all[1].items.insert("module efa".into(), "2.1".into());
    assert_eq!(bad(&compare(&all)), [("module efa of c (rank 2)", "none")]);
}

#[test]
fn a_skew_counts_only_beyond_what_the_measurement_leaves_open() {
    assert_eq!(Skew::of(1000, 1000, 1200), Skew { ahead: 100, error: 101 });
    assert!(!Skew { ahead: 150_000, error: 60_000 }.is_large());
    assert!(Skew { ahead: -200_000, error: 60_000 }.is_large());
    let mut all = world(&["1", "1"], &["a", "b"]);
    all[1].clock = Some(Skew { ahead: -2_000_000, error: 500 });
    let found = compare(&all);
    let expected = [("clock of b (rank 1)", "-2000.0 ms against a, within 0.5 ms")];
    assert_eq!(bad(&found), expected);
    let odd = found.iter().find(|finding| finding.id == "world-clock").unwrap();
    assert_eq!(odd.verdict, Verdict::Unknown);
    assert!(odd.fix.as_ref().unwrap().contains("chronyc tracking"));
    assert!(odd.impact.as_ref().unwrap().contains("tokenyard explain"));
}

#[test]
fn the_node_with_the_odd_clock_is_named_be_it_that_of_rank_0() {
    let clocks = |ahead: [i64; 5]| {
        let mut all = world(&["1"; 6], &["a", "a", "b", "b", "c", "d"]);
        for (summary, ahead) in all[1..].iter_mut().zip(ahead) {
            summary.clock = Some(Skew { ahead, error: 400 });
        }
        let found = compare(&all);
        bad(&found).into_iter().map(|(s, f)| (s.to_owned(), f.to_owned())).collect::<Vec<_>>()
    };
    assert!(clocks([0, 300, -200, 90_000, 0]).is_empty());
    let of_c =
        ("clock of c (rank 4)".to_owned(), "+5000.0 ms against most, within 0.8 ms".to_owned());
    assert_eq!(clocks([0, 0, 0, 5_000_000, 0]), [of_c]);
    let all = clocks([0, 1_500_000, 1_500_000, 1_500_000, 1_500_000]);
    let of_a =
        ("clock of a (ranks 0-1)".to_owned(), "-1500.0 ms against most, within 0.4 ms".to_owned());
    assert_eq!(all, [of_a]);
}

#[test]
fn a_fault_that_several_nodes_have_is_shown_once() {
    let mut all = world(&["1", "1", "1"], &["a", "b", "b"]);
    let fault = (Fault::Slow, "mtu".to_owned(), "mlx5_0".to_owned());
    all[1].faults.push(fault.clone());
    all[2].faults.push(fault);
    let found = compare(&all);
    assert_eq!(bad(&found), [("b (ranks 1-2)", "mtu mlx5_0")]);
    all[1].faults = vec![(Fault::Unknown, "nvidia-smi".to_owned(), "GPUs".to_owned())];
    let found = compare(&all);
    let unknown = found.iter().find(|finding| finding.verdict == Verdict::Unknown).unwrap();
    assert_eq!((&*unknown.subject, &*unknown.found), ("b (rank 1)", "nvidia-smi GPUs"));
}
