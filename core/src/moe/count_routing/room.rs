//! Counts of a routing on a device, before anything is sent.

use crate::abi;
use crate::communicator::memory::{Argument, check_memory};
use crate::communicator::{OnStream, Stream, TensorMut, TensorRef};
use crate::moe::DType;
use crate::{Error, ErrorKind, Result};

/// Memory of the caller, on the communicator's device, for counts of a routing of any experts and ranks.
#[derive(Debug)]
pub struct RoutingRoom<'a> {
    /// `[R, 1]` i32: tokens for each rank, each token once.
    pub rank_tokens: TensorMut<'a>,
    /// `[E, 1]` i32: tokens for each expert.
    pub expert_tokens: TensorMut<'a>,
    /// `[T, R]` u8: 1 where a token goes to the rank, else 0.
    pub is_token_in_rank: TensorMut<'a>,
}

impl RoutingRoom<'_> {
    fn check(&self, topk_idx: &TensorRef<'_>) -> Result<[u32; 2]> {
        let (ranks, experts) =
            (self.rank_tokens.as_ref().rows(), self.expert_tokens.as_ref().rows());
        if ranks == 0 || experts == 0 || experts % ranks != 0 {
            return refuse(format!(
                "expert_tokens: found {experts} experts for {ranks} ranks; expected a multiple"
            ));
        }
        let tokens = topk_idx.rows();
        expect("topk_idx", topk_idx, DType::I64, [tokens, topk_idx.cols()])?;
        expect("rank_tokens", &self.rank_tokens.as_ref(), DType::I32, [ranks, 1])?;
        expect("expert_tokens", &self.expert_tokens.as_ref(), DType::I32, [experts, 1])?;
        let is_in = self.is_token_in_rank.as_ref();
        expect("is_token_in_rank", &is_in, DType::U8, [tokens, ranks])?;
        Ok([ranks as u32, experts as u32])
    }
}

fn expect(name: &str, tensor: &TensorRef<'_>, dtype: DType, shape: [usize; 2]) -> Result<()> {
    let found = [tensor.rows(), tensor.cols()];
    if tensor.dtype() == Some(dtype) && found == shape && tensor.is_contiguous() {
        return Ok(());
    }
    let found_type = tensor.dtype().map_or("unknown", DType::name);
    refuse(format!(
        "{name}: found {found_type} {found:?}; expected {} {shape:?}, contiguous",
        dtype.name()
    ))
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidInput, "count routing", message))
}

impl OnStream<'_> {
    /// Counts a routing in the order of the stream. Experts and ranks are as many as the room has; ids that are no
    /// experts count nowhere. Local: no other rank takes part.
    ///
    /// # Errors
    /// Tensors of another type, shape or place; a kernel set without streams; errors of the device.
    pub fn count_routing(
        &mut self,
        topk_idx: TensorRef<'_>,
        room: &mut RoutingRoom<'_>,
    ) -> Result<()> {
        let (course, stream) = self.course();
        course.check_open()?;
        let components = &course.components;
        components.check_stream(stream)?;
        let arguments = [
            Argument::other("topk_idx", Some(topk_idx)),
            Argument::other("rank_tokens", Some(room.rank_tokens.as_ref())),
            Argument::other("expert_tokens", Some(room.expert_tokens.as_ref())),
            Argument::other("is_token_in_rank", Some(room.is_token_in_rank.as_ref())),
        ];
        check_memory(&arguments, components.user.device)?;
        let [ranks, experts] = room.check(&topk_idx)?;
        let counts = abi::TyRoutingCounts {
            size: size_of::<abi::TyRoutingCounts>(),
            topk_idx: topk_idx.raw(),
            experts,
            ranks,
            rank_tokens: room.rank_tokens.raw().data.cast(),
            expert_tokens: room.expert_tokens.raw().data.cast(),
            is_token_in_rank: room.is_token_in_rank.raw().data,
            stream: stream.map_or(std::ptr::null_mut(), Stream::raw),
        };
        // SAFETY: checked above: memory of the device with these lengths, which is borrowed; on the stream for
        // the time that the contract of `Stream::new` states.
        unsafe { components.kernels().count_routing(&counts) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_must_fit_the_routing() {
        let ids = [0_i64; 6];
        let ids = TensorRef::from_slice(&ids, 3, 2).unwrap();
        let check = |ranks: usize, experts: usize, tokens: usize| {
            let (mut of_ranks, mut of_experts) = (vec![0_i32; ranks], vec![0_i32; experts]);
            let mut is_in = vec![0_u8; tokens * ranks];
            let room = RoutingRoom {
                rank_tokens: TensorMut::from_slice(&mut of_ranks, ranks, 1).unwrap(),
                expert_tokens: TensorMut::from_slice(&mut of_experts, experts, 1).unwrap(),
                is_token_in_rank: TensorMut::from_slice(&mut is_in, tokens, ranks).unwrap(),
            };
            room.check(&ids).map_err(|error| error.to_string())
        };
        assert_eq!(check(2, 8, 3), Ok([2, 8]));
        let text = check(3, 8, 3).unwrap_err();
        assert!(text.contains("found 8 experts for 3 ranks"), "{text}");
        let text = check(2, 8, 4).unwrap_err();
        assert!(text.contains("is_token_in_rank: found u8 [4, 2]; expected u8 [3, 2]"), "{text}");
    }
}
