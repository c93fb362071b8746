//! The claims that a transport may declare, and the proofs that they are true.
//!
//! `CLAIMS` has a row for each capability, kind of memory and limit of `probe`. The row lists the cases of
//! L0 that fail if the claim is false, each with a mutant that proves it (`tests/mutants`,
//! `tests/lost_peers`), or says why no case can exist. A capability without a row fails the tests.

use std::fmt::Write;

use serde::Serialize;
use tokenyard_core::capabilities::Declared;

use crate::report::{Line, Status};

/// One claim and its proofs.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// The name of a flag, `memory.KIND`, or the name of a limit.
    pub name: &'static str,
    /// The proofs that the claim is true.
    pub proofs: &'static [Proof],
}

/// A proof that a claim is true.
#[derive(Clone, Copy, Debug)]
pub enum Proof {
    /// A case of L0 that fails on a transport whose claim is false.
    Case {
        /// The case, without `l0/` and the number of ranks.
        case: &'static str,
        /// The broken transport that proves the case.
        mutant: &'static str,
        /// Words that the failure of that mutant contains.
        says: &'static str,
    },
    /// No case of L0 can test the claim; the reason.
    Cannot(&'static str),
}

const fn case(case: &'static str, mutant: &'static str, says: &'static str) -> Proof {
    Proof::Case { case, mutant, says }
}

const ON_DEVICES: &str = "windows of L0 lie on a device only where host memory is refused: then all of its cases \
                          are such tests; L1 and L2 run on the device of the config";

/// All claims that `probe` can make.
pub const CLAIMS: &[Claim] = &[
    Claim {
        name: "load_store",
        proofs: &[
            case("peer_addresses_see_puts_and_stores", "address_of_itself", "window 0, written by"),
            case("stored_payload_before_signal", "address_of_itself", "seen with their signal"),
        ],
    },
    Claim {
        name: "ordered",
        proofs: &[case("ordered_puts_arrive_in_order", "held_put", "which was posted before")],
    },
    Claim {
        name: "native_atomics",
        proofs: &[Proof::Cannot(
            "a signal has one writer, so a total that is written looks like one that is added to",
        )],
    },
    Claim {
        name: "immediate",
        proofs: &[Proof::Cannot(
            "how a signal crosses is not seen; that ids and adds fit is l0/signals_of_many_ids",
        )],
    },
    Claim {
        name: "get",
        proofs: &[
            case("get_reads_the_peer", "get_from_itself", "after a get"),
            case(
                "commands_under_way_to_a_lost_peer_end_once",
                "lost_forgets_gets",
                "has not ended",
            ),
        ],
    },
    Claim {
        name: "bounded_put",
        proofs: &[
            case("a_put_to_a_killed_peer_ends", "lost_is_done", "ended as done"),
            case("a_put_to_a_killed_peer_ends", "lost_never_ends", "has not ended"),
            case("a_put_to_a_stopped_peer_ends", "lost_is_done", "ended as done"),
            case("a_put_to_a_stopped_peer_ends", "lost_never_ends", "has not ended"),
            case("a_put_to_a_stopped_peer_ends", "stopped_holds_gets", "a get to rank 1"),
            case("a_put_to_a_killed_peer_ends", "lost_hangs_in_poll", "hangs in slot `poll`"),
        ],
    },
    Claim {
        name: "manual_progress",
        proofs: &[
            case("puts_move_without_a_poll", "needs_driving", "no rank calls poll or progress"),
            case("progress_alone_moves_puts", "idle_progress", "calls progress alone"),
        ],
    },
    Claim {
        name: "owns_memory",
        proofs: &[case("puts_reach_the_right_place", "private_memory", "bytes are wrong")],
    },
    Claim {
        name: "masking",
        proofs: &[
            case("a_killed_peer_holds_up_no_other", "nameless_loss", "does not name rank 2"),
            case("a_killed_peer_holds_up_no_other", "lost_holds_up_all", "beside rank 2"),
            case("a_stopped_peer_holds_up_no_other", "nameless_loss", "does not name rank 2"),
            case("a_stopped_peer_holds_up_no_other", "lost_holds_up_all", "beside rank 2"),
        ],
    },
    Claim {
        name: "device_api",
        proofs: &[Proof::Cannot(
            "kernels call it, on a device: L1 runs through it where the config's kernel set does",
        )],
    },
    Claim {
        name: "placed_nics",
        proofs: &[Proof::Cannot(
            "it takes a machine with several NICs: conformance/tests/nics.rs, on NICs that are made up",
        )],
    },
    Claim {
        name: "memory.host",
        proofs: &[case("puts_reach_the_right_place", "unregistered_memory", "bytes are wrong")],
    },
    Claim { name: "memory.cuda", proofs: &[Proof::Cannot(ON_DEVICES)] },
    Claim { name: "memory.hip", proofs: &[Proof::Cannot(ON_DEVICES)] },
    Claim {
        name: "max_peers",
        // The test runs as many ranks as the machine starts: up to four, and those of --ranks in L1 to L3.
        proofs: &[case(
            "puts_reach_the_right_place",
            "two_peers",
            "connect to peer 2; expected it to succeed",
        )],
    },
    Claim {
        name: "max_queues",
        proofs: &[case("every_declared_queue_works", "four_queues", "found total")],
    },
    Claim { name: "max_signals", proofs: &[case("signals_of_many_ids", "narrow_id", "no more")] },
    Claim {
        name: "max_queue_depth",
        proofs: &[case(
            "a_queue_of_the_declared_depth_loses_nothing",
            "shallow_queue",
            "expected 4196",
        )],
    },
    Claim {
        name: "max_windows",
        proofs: &[case("every_declared_window_is_reached", "four_windows", "of 8:")],
    },
    Claim {
        name: "largest_put",
        // The test moves as much as one may: up to 16 MiB.
        proofs: &[case("puts_beyond_socket_buffers_arrive", "cut_at_a_buffer", "bytes are wrong")],
    },
];

/// The result of a run for one claim.
#[derive(Clone, Debug, Serialize)]
pub struct ClaimResult {
    /// As [`Claim::name`].
    pub claim: &'static str,
    /// The declaration of `probe`: `yes`, `no`, or the limit.
    pub declared: String,
    /// Cases that ran.
    pub tested: Vec<&'static str>,
    /// Cases that ran and failed.
    pub failed: Vec<&'static str>,
    /// Why no case ran, if none did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untested: Option<String>,
}

impl ClaimResult {
    /// One line for the report's text form.
    pub fn line(&self) -> String {
        let mut text = format!("{:<16} {:<14}", self.claim, self.declared);
        // Writing to a String cannot fail.
        let _ = match (&self.untested, self.failed.is_empty()) {
            (Some(why), _) => write!(text, "not tested: {why}"),
            (None, true) => write!(text, "tested: {}", self.tested.join(", ")),
            (None, false) => write!(text, "FAILED: {}", self.failed.join(", ")),
        };
        text
    }
}

/// The result of a run for each claim.
pub(crate) fn results(declared: &Declared, lines: &[Line]) -> Vec<ClaimResult> {
    CLAIMS.iter().map(|claim| result(claim, declared, lines)).collect()
}

fn result(claim: &Claim, declared: &Declared, lines: &[Line]) -> ClaimResult {
    let (mut tested, mut failed, mut untested) = (Vec::new(), Vec::new(), None);
    for proof in claim.proofs {
        let case = match proof {
            Proof::Case { case, .. } => *case,
            Proof::Cannot(why) => {
                untested = Some((*why).to_owned());
                continue;
            }
        };
        let of_case = |line: &&Line| line.name.split('/').nth(1) == Some(case);
        let mut of_case = lines.iter().filter(of_case).peekable();
        if of_case.peek().is_none() {
            untested = untested.or_else(|| Some(format!("l0/{case} was not chosen")));
        }
        for line in of_case {
            match &line.status {
                Status::NotSupported { why } => untested = untested.or_else(|| Some(why.clone())),
                status => {
                    tested.push(case);
                    failed.extend((!matches!(status, Status::Pass)).then_some(case));
                }
            }
        }
    }
    tested.dedup();
    failed.dedup();
    let untested = untested.filter(|_| tested.is_empty());
    ClaimResult {
        claim: claim.name,
        declared: value(claim.name, declared),
        tested,
        failed,
        untested,
    }
}

fn value(name: &str, declared: &Declared) -> String {
    let yes = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
    match name {
        "max_peers" => declared.max_peers.to_string(),
        "max_queues" => declared.max_queues.to_string(),
        "max_signals" => declared.max_signals.to_string(),
        "max_queue_depth" => declared.max_queue_depth.to_string(),
        "max_windows" => declared.max_windows.to_string(),
        "largest_put" => declared.largest_put.to_string(),
        _ => match name.strip_prefix("memory.") {
            Some(kind) => yes(declared.memory.contains(&kind)),
            None => yes(declared.flags.contains(&name)),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;
    use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES};

    use super::*;
    use crate::suite::Level;
    use crate::transport;

    const ALL: Capabilities = Capabilities { flags: !0, memory_kinds: !0, ..NO_CAPABILITIES };

    /// Every name that a report can give to a declaration of a transport.
    fn declarable() -> BTreeSet<String> {
        let Value::Object(fields) = serde_json::to_value(Declared::from(&ALL)).unwrap() else {
            panic!("a structure");
        };
        let names = fields.into_iter().flat_map(|(field, value)| match value {
            Value::Array(names) => names
                .iter()
                .map(|name| match field.as_str() {
                    "flags" => name.as_str().unwrap().to_owned(),
                    _ => format!("{field}.{}", name.as_str().unwrap()),
                })
                .collect(),
            _ => vec![field],
        });
        names.collect()
    }

    #[test]
    fn every_claim_that_probe_can_make_has_a_row_and_there_are_no_others() {
        let rows: BTreeSet<String> = CLAIMS.iter().map(|claim| claim.name.to_owned()).collect();
        assert_eq!(rows, declarable());
        assert_eq!(rows.len(), CLAIMS.len(), "a claim is there twice");
        for claim in CLAIMS {
            assert!(!claim.proofs.is_empty(), "{}", claim.name);
        }
    }

    #[test]
    fn every_capability_of_the_header_has_a_row() {
        let header = include_str!("../../abi/include/tokenyard_plugin.h");
        let capabilities: Vec<String> = header
            .lines()
            .filter_map(|line| line.strip_prefix("#define TY_CAP_")?.split(' ').next())
            .map(str::to_ascii_lowercase)
            .collect();
        assert!(capabilities.contains(&"ordered".to_owned()), "{capabilities:?}");
        for capability in capabilities {
            assert!(CLAIMS.iter().any(|claim| claim.name == capability), "{capability}");
        }
    }

    #[test]
    fn every_case_of_the_table_is_a_test_of_l0() {
        let tests = transport::tests(&ALL);
        for proof in CLAIMS.iter().flat_map(|claim| claim.proofs) {
            if let Proof::Case { case, .. } = proof {
                let named = |test: &crate::suite::Test| test.name.split('/').nth(1) == Some(*case);
                assert!(tests.iter().any(named), "{case}");
            }
        }
    }

    #[test]
    fn a_claim_is_tested_failed_or_says_why_it_was_not() {
        let line = |case: &str, status| Line {
            name: format!("l0/{case}/r2"),
            level: Level::L0,
            ranks: 2,
            about: String::new(),
            invariants: "",
            status,
            seconds: 0.0,
        };
        let declared = Declared::from(&ALL);
        let lines = [
            line("get_reads_the_peer", Status::Pass),
            line("ordered_puts_arrive_in_order", Status::Fail { message: "late".into() }),
            line("progress_alone_moves_puts", Status::NotSupported { why: "no threads".into() }),
        ];
        let results = results(&declared, &lines);
        let of = |name: &str| results.iter().find(|result| result.claim == name).unwrap().line();
        assert!(of("get").ends_with("tested: get_reads_the_peer"), "{}", of("get"));
        assert!(of("ordered").ends_with("FAILED: ordered_puts_arrive_in_order"));
        assert!(of("max_queues").contains("l0/every_declared_queue_works was not chosen"));
        assert!(of("native_atomics").contains("not tested: a signal has one writer"));
        assert!(of("manual_progress").contains("not tested"), "{}", of("manual_progress"));
    }
}
