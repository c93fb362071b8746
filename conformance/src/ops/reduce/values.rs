//! L1: the bits of sums, of each type and length, of several tensors, with few and many calls in flight.

use anyhow::Result;
use tokenyard_core::moe::DType::{Bf16, F32};
use tokenyard_core::ops::gather::GatherOptions;
use tokenyard_core::ops::gather::reduce::Precision;
use tokenyard_core::ops::gather::reduce::Spread::{All, Scatter};

use super::end::ReduceEnd;
use super::rules::Form;
use crate::ops::bodies::stream;
use crate::ops::case::{CaseBody, EndCase};

/// Most bytes of a rank's part, where a case does not ask for more.
const MOST: usize = 4100;

const PLAIN: Form =
    Form { spread: Scatter, precision: Precision::Fp32, scale: 1.0, tensors: &[(F32, 250)] };
const NARROW: Form = Form { precision: Precision::Bf16, ..PLAIN };

/// Several tensors, none, and some without elements; of both types, with parts that begin at each place of four.
const FORMS: &[Form] = &[
    PLAIN,
    Form { spread: All, scale: 0.25, ..PLAIN },
    NARROW,
    Form { tensors: &[], ..PLAIN },
    Form { spread: All, tensors: &[(F32, 0), (Bf16, 1)], ..PLAIN },
    Form { scale: 1.0 / 3.0, tensors: &[(Bf16, 33), (F32, 7), (Bf16, 1000)], ..PLAIN },
    Form { spread: All, scale: -0.5, tensors: &[(F32, 1025)], ..NARROW },
    Form { scale: 0.0, tensors: &[(Bf16, 2050)], ..NARROW },
    Form { spread: All, scale: 2.0, tensors: &[(Bf16, 5), (F32, 9), (F32, 3)], ..NARROW },
];

/// Several puts where a transport takes no large ones, and several blocks of a sum.
const LARGE: usize = 1 << 18;

pub(super) fn cases() -> Vec<EndCase<ReduceEnd>> {
    let case = |name, ranks, in_flight, body: fn(&mut ReduceEnd) -> Result<()>| EndCase {
        name,
        about: "each rank gets the sums of all ranks, added in their order and rounded once, each bit of them",
        ranks,
        options: GatherOptions { max_bytes: MOST as u64, in_flight, reduces: true },
        lengths: FORMS,
        body: CaseBody::Alone(body),
    };
    vec![
        case("lengths", 2, 2, whole_calls),
        case("three_ranks", 3, 2, whole_calls),
        case("in_flight_1", 2, 1, |end| stream(end, 36)),
        case("in_flight_2", 3, 2, |end| stream(end, 36)),
        case("in_flight_32", 2, 32, |end| stream(end, 81)),
        EndCase {
            name: "large",
            about: "the part of a rank may need several puts",
            ranks: 2,
            options: GatherOptions { max_bytes: 4 * LARGE as u64, in_flight: 1, reduces: true },
            lengths: &[
                Form { tensors: &[(F32, LARGE)], ..PLAIN },
                Form { spread: All, tensors: &[(Bf16, LARGE), (F32, LARGE / 2)], ..NARROW },
            ],
            body: CaseBody::Alone(|end| stream(end, 4)),
        },
    ]
}

fn whole_calls(end: &mut ReduceEnd) -> Result<()> {
    (0..3 * FORMS.len()).try_for_each(|_| end.pass())
}
