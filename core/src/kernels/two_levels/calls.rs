//! The calls of both exchanges, derived from the caller's. Signatures stay the caller's, which ranks compare.

use super::Sums;
use crate::abi;
use crate::call::{CombineCall, DispatchCall};
use crate::host::NO_TENSOR;
use crate::moe::{Cast, Layout};

impl DispatchCall<'_> {
    /// Between domains. Rows go to their forwarders in the order of tokens, whatever the caller's layout, and cast.
    /// There is room for the most that may come, so that their number decides no place.
    pub fn on_rail(&self) -> Self {
        let order = self.order.waiting();
        Self { layout: Layout::Flat, worst_case: true, order, ..*self }
    }

    /// Inside a domain: the rows that came over the rail, where they lie as one output. A set whose rows of each source
    /// lie apart has no such tensors, and takes their places from its exchange on the rail.
    pub fn forwarded(&self, received: &abi::TyReceived) -> Self {
        Self {
            cast: Cast::None,
            x: received.x,
            scales: received.scales,
            topk_idx: received.ids,
            topk_weights: received.weights,
            // N of the rail is T here. Its high half is zero.
            tokens: received.totals.data as *const u32,
            ..*self
        }
    }
}

impl CombineCall<'_> {
    /// Inside a domain: a row for each row that this forwarder had forwarded. Sources add biases, and count what is
    /// missing.
    pub fn inside(&self, sums: &Sums) -> Self {
        Self {
            bias: [NO_TENSOR; 2],
            out: sums.x,
            out_weights: sums.weights,
            missing: NO_TENSOR,
            ..*self
        }
    }

    /// Between domains: the sums, weighted already, return to the sources of their rows. Without sums the call is
    /// refused.
    pub fn on_rail(&self, sums: Option<&Sums>) -> Self {
        let (x, weights) = sums.map_or((NO_TENSOR, NO_TENSOR), |sums| (sums.x, sums.weights));
        let order = self.order.waiting();
        Self { weighted: false, beside: NO_TENSOR, order, x, weights, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::CallOrder;
    use crate::host::NO_OUTPUT;

    /// A tensor that is known by its rows.
    fn tensor(rows: u64) -> abi::TyTensor {
        abi::TyTensor { data: std::ptr::dangling_mut(), shape: [rows, 4], ..NO_TENSOR }
    }

    fn rows(tensors: [abi::TyTensor; 4]) -> [u64; 4] {
        tensors.map(|tensor| tensor.shape[0])
    }

    const AT_ONCE: CallOrder = CallOrder { stream: None, no_sync: false, at_once: true, sms: 3 };

    #[test]
    fn rows_cross_the_rail_cast_and_flat_and_go_on_as_they_came() {
        let mut call = DispatchCall::blank(7, 2, Layout::Packed);
        (call.cast, call.x, call.order) = (Cast::Fp8, tensor(5), AT_ONCE);
        call.complete(Default::default(), Default::default());
        let rail = call.on_rail();
        assert_eq!((rail.layout, rail.worst_case, rail.cast), (Layout::Flat, true, Cast::Fp8));
        assert_eq!((rail.order.at_once, rail.order.sms, rail.x.shape[0]), (false, 3, 5));
        let received = abi::TyReceived {
            x: tensor(11),
            scales: tensor(12),
            ids: tensor(13),
            weights: tensor(14),
            ..NO_OUTPUT
        };
        let inside = call.forwarded(&received);
        assert_eq!(
            (inside.layout, inside.cast, inside.order),
            (Layout::Packed, Cast::None, AT_ONCE)
        );
        let found = [inside.x, inside.scales, inside.topk_idx, inside.topk_weights];
        assert_eq!(rows(found), [11, 12, 13, 14]);
        for derived in [rail, inside] {
            assert_eq!((derived.signature, derived.format), (call.signature, call.format));
        }
    }

    #[test]
    fn sums_of_a_domain_are_weighted_inside_and_get_their_biases_at_the_source() {
        let mut call = CombineCall { weighted: true, round_once: true, ..CombineCall::blank(7, 2) };
        (call.x, call.out, call.missing, call.beside) =
            (tensor(5), tensor(6), tensor(6), tensor(5));
        (call.bias, call.out_weights, call.order) = ([tensor(6); 2], tensor(6), AT_ONCE);
        call.complete();
        let sums = Sums { region: 1, x: tensor(11), weights: tensor(12) };
        let inside = call.inside(&sums);
        assert!(inside.weighted && inside.bias.iter().all(|bias| bias.data.is_null()));
        assert_eq!(
            rows([inside.x, inside.out, inside.out_weights, inside.missing]),
            [5, 11, 12, 0]
        );
        let rail = call.on_rail(Some(&sums));
        assert!(!rail.weighted && rail.round_once && rail.beside.data.is_null());
        assert_eq!(rows([rail.x, rail.weights, rail.out, rail.bias[1]]), [11, 12, 6, 6]);
        assert!(!rail.order.at_once && call.on_rail(None).x.data.is_null());
        for derived in [inside, rail] {
            assert_eq!(derived.signature, call.signature);
        }
    }
}
