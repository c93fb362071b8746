//! Any sequence of steps keeps the order. The letters of the messages:
//! (a) no call of the driver fails, and captures end well;
//! (b) kernels of operations run one after the other, in eager order and within a capture;
//! (c) memory is written behind all that used it before;
//! (d) operations run behind the work before them on the caller's stream, which goes on behind them.

use proptest::prelude::*;

use super::UNITS;
use super::steps::{Call, Caller, CallerStep};
use crate::driver::stream_model as model;

const STREAMS: usize = 3;

fn call() -> impl Strategy<Value = Call> {
    let stream = prop::option::weighted(0.9, 0..STREAMS);
    let [no_sync, at_once] = [0.8, 0.6].map(prop::bool::weighted);
    (stream, no_sync, at_once).prop_map(|(stream, no_sync, at_once)| Call {
        stream,
        no_sync,
        at_once,
    })
}

/// Sizes of regions; a few fit no arena.
fn units() -> impl Strategy<Value = u64> {
    prop_oneof![9 => 1..4_u64, 1 => Just(2 * UNITS)]
}

fn step() -> impl Strategy<Value = CallerStep> {
    let (output, stream) = (0..8_usize, 0..STREAMS);
    prop_oneof![
        6 => (call(), units()).prop_map(|(call, units)| CallerStep::Dispatch { call, units }),
        4 => (call(), output.clone(), prop_oneof![1 => Just(0), 2 => units()])
            .prop_map(|(call, output, copied)| CallerStep::Combine { call, output, copied }),
        3 => (0..2_usize).prop_map(|index| CallerStep::Receive { index }),
        4 => (output.clone(), units()).prop_map(|(output, units)| CallerStep::Lend { output, units }),
        3 => (output.clone(), stream.clone(), any::<bool>())
            .prop_map(|(output, stream, returns)| CallerStep::Read { output, stream, returns }),
        5 => output.prop_map(|output| CallerStep::Drop { output }),
        4 => (0..1_usize << STREAMS).prop_map(|streams| CallerStep::ReleaseAfter { streams }),
        4 => stream.clone().prop_map(|stream| CallerStep::Work { stream }),
        2 => (stream.clone(), stream.clone()).prop_map(|(first, then)| CallerStep::Wait { first, then }),
        2 => stream.clone().prop_map(|stream| CallerStep::Begin { stream }),
        1 => stream.clone().prop_map(|stream| CallerStep::End { stream }),
        1 => stream.prop_map(|stream| CallerStep::Pass { stream }),
        1 => Just(CallerStep::Flush),
    ]
}

/// Takes steps on this many streams, and ends everything.
fn take<'a>(streams: usize, puts: bool, steps: impl IntoIterator<Item = &'a CallerStep>) {
    let mut caller = Caller::new(streams, puts).expect("(a) the model has streams");
    for step in steps {
        let taken = caller.take(*step);
        let errors = model::errors();
        assert!(taken.is_ok() && errors.is_empty(), "(a) at {step:?}: {taken:?}, {errors:?}");
    }
    let (closed, errors) = (caller.close(), model::errors());
    assert!(closed.is_ok() && errors.is_empty(), "(a) at the end: {closed:?}, {errors:?}");
}

fn steps() -> impl Strategy<Value = Vec<CallerStep>> {
    prop::collection::vec(step(), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn operations_keep_their_order_and_captures_end_well_whatever_a_caller_does(
        streams in 1..=STREAMS,
        steps in steps(),
    ) {
        take(streams, false, &steps);
    }

    #[test]
    fn operations_keep_their_order_on_parallel_branches_of_a_capture(steps in steps()) {
        let branch = |then| CallerStep::Wait { first: 0, then };
        let first = [CallerStep::Begin { stream: 0 }, branch(1), branch(2)];
        let rest = steps.iter().filter(|step| !matches!(step, CallerStep::Begin { .. } | CallerStep::End { .. }));
        take(STREAMS, false, first.iter().chain(rest));
    }

    #[test]
    fn operations_keep_their_order_where_rows_are_put(streams in 1..=STREAMS, steps in steps()) {
        take(streams, true, &steps);
    }
}

#[test]
fn a_second_capture_has_halves_of_operations_once_the_first_has_ended() {
    let dispatch = |stream: usize, at_once: bool| CallerStep::Dispatch {
        call: Call { stream: Some(stream), no_sync: true, at_once },
        units: 1,
    };
    let mut caller = Caller::new(2, false).expect("the model has streams");
    let mut outputs_after = |steps: &[CallerStep]| {
        steps.iter().try_for_each(|step| caller.take(*step)).expect("(a) steps");
        caller.outputs()
    };
    let receive = CallerStep::Receive { index: 0 };
    let begin = [0, 1].map(|stream| CallerStep::Begin { stream });
    assert_eq!(outputs_after(&begin), 0);
    assert_eq!(outputs_after(&[dispatch(0, false), receive]), 1);
    assert_eq!(outputs_after(&[dispatch(1, false), receive]), 1, "refused");
    assert_eq!(outputs_after(&[dispatch(1, true)]), 2, "a whole call is not");
    assert_eq!(outputs_after(&[CallerStep::End { stream: 0 }, dispatch(1, false), receive]), 3);
    caller.close().expect("(a) the end");
    assert!(model::errors().is_empty());
}

#[test]
fn rows_lent_on_a_branch_of_a_capture_are_written_behind_the_work_that_had_their_place() {
    let dispatch = |stream| CallerStep::Dispatch {
        call: Call { stream: Some(stream), no_sync: true, at_once: true },
        units: 1,
    };
    let steps = [
        CallerStep::Begin { stream: 0 },
        CallerStep::Wait { first: 0, then: 1 },
        dispatch(0),
        dispatch(1),
        // Work that reads the first output, on a branch that the second does not wait for.
        CallerStep::Work { stream: 0 },
        CallerStep::Drop { output: 0 },
        CallerStep::ReleaseAfter { streams: 0 },
        CallerStep::Lend { output: 0, units: 1 },
    ];
    take(2, false, &steps);
}
