"""Bad input of one rank is an exception of the drop-in on all ranks, before a byte moves; the buffer goes on."""

import numpy as np
import pytest
from oracle import Case
from test_deep_ep_normal import buffer_of, close, layout_of, same, times

from tokenyard import errors

CASE = Case(2, seed=9, tokens=(5, 7))

# Each: what rank 1 spoils, how, and what all ranks read.
DISPATCHES = {
    "no tensor": ("x", lambda a: a.tolist(), "x: found list; expected a tensor"),
    "a type": ("x", lambda a: a.astype(np.float64), "x: found type float64; expected bfloat16"),
    "a dimension": ("x", lambda a: a[None], "x: found shape [1, 7, 64]; expected [any, any]"),
    "a type of ids": (
        "topk_idx",
        lambda a: a.astype(np.int32),
        "topk_idx: found type int32; expected int64",
    ),
    "an expert": ("topk_idx", lambda a: a + 100, "expected below num_experts = 8"),
    "an expert twice": (
        "topk_idx",
        lambda a: np.where(a >= 0, a // 4 * 4, -1),
        "expected distinct experts",
    ),
    "rows of ids": ("topk_idx", lambda a: a[:2], "topk_idx: found shape [2, 3]"),
    "no weights": ("topk_weights", lambda a: None, "topk_weights: found None"),
    "a type of weights": ("topk_weights", lambda a: a.astype(np.float16), "expected float32"),
    "no map": ("is_token_in_rank", lambda a: None, "is_token_in_rank: found None"),
    "another map": ("is_token_in_rank", lambda a: ~a, "num_tokens_per_rank: found"),
    "another count": ("num_tokens_per_rank", lambda a: a + 1, "num_tokens_per_rank: found"),
    "experts": ("num_tokens_per_expert", lambda a: a[:7], "found 7 experts; expected a multiple"),
    "no alignment": ("expert_alignment", lambda a: None, "expert_alignment: found None"),
    "an alignment": ("expert_alignment", lambda a: 0, "expert_alignment: found 0"),
    "too few worst tokens": (
        "num_worst_tokens",
        lambda a: 13,
        "num_worst_tokens: found 13; expected 0, or at least ranks * tokens = 14",
    ),
    "a row of 4 bytes": ("x", lambda a: a[:, :1].copy(), "found hidden = 1 on rank 1"),
    "a hidden size": ("x", lambda a: a[:, :32].copy(), "found hidden = 32 on rank 1; expected 64"),
}


def raises(world, says, call, *arguments, **options):
    """The spoilt call of rank 1, and the good one of rank 0, raise with the same words."""
    with pytest.raises((errors.InvalidInputError, errors.RefusedError)) as raised:
        call(*arguments, **options)
    assert says in str(raised.value), str(raised.value)
    assert raised.value.rank in (1, None) or world.rank == 1


def bad_dispatch(world, name, is_first):
    me, buffer = world.rank, buffer_of(world)
    what, spoil, says = DISPATCHES[name]
    good = {"x": CASE.x[me], "topk_idx": CASE.idx[me], "topk_weights": CASE.weights[me]}
    good |= layout_of(buffer, CASE)
    if not is_first:
        buffer.dispatch(**good)
    bad = dict(good)
    if me == 1:
        bad[what] = spoil(good.get(what))
    raises(world, says, buffer.dispatch, **bad)
    recv_x, *_, handle, _ = buffer.dispatch(**good)
    same(recv_x, CASE.rows(CASE.sources(me)))
    combined, _, _ = buffer.combine(recv_x, handle)
    close(combined, CASE.x[me] * times(CASE, me)[:, None])
    buffer.destroy()


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("name", DISPATCHES)
def test_a_bad_dispatch_is_refused_on_all_ranks_and_the_next_one_works(ranks, name, is_first):
    ranks(2, bad_dispatch, name, is_first)


def bad_later_calls(world):
    me, buffer = world.rank, buffer_of(world)
    good = {"topk_idx": CASE.idx[me], "topk_weights": CASE.weights[me], **layout_of(buffer, CASE)}
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(CASE.x[me], **good)

    def spoilt(good, bad):
        return bad if me == 1 else good

    raises(world, "x: found shape", buffer.dispatch, CASE.x[me][: spoilt(7, 2)], handle=handle)
    raises(world, "x: found shape", buffer.dispatch, CASE.x[me][:, : spoilt(64, 2)], handle=handle)
    raises(world, "handle: found", buffer.dispatch, CASE.x[me], handle=spoilt(handle, (1, 2)))
    for x, says in ((recv_x[:1], "x: found 1 rows; expected"), (recv_x[:, :4], "x: found shape")):
        raises(world, says, buffer.combine, spoilt(recv_x, x), handle)
    raises(world, "handle: found int", buffer.combine, recv_x, spoilt(handle, 5))
    other = buffer_of(world)
    foreign = other.dispatch(CASE.x[me], **good)[4]
    says = "handle: found one of another buffer"
    raises(world, says, buffer.combine, recv_x, spoilt(handle, foreign))
    raises(world, says, buffer.dispatch, CASE.x[me], handle=spoilt(handle, foreign))
    other.destroy()
    raises(
        world,
        "topk_weights: found",
        buffer.combine,
        recv_x,
        handle,
        recv_weights[:, : spoilt(3, 1)],
    )
    bias = np.zeros((CASE.tokens[me], 64), np.float32)
    raises(world, "bias: found 3", buffer.combine, recv_x, handle, bias=spoilt(bias, (bias,) * 3))
    raises(world, "bias: found shape", buffer.combine, recv_x, handle, bias=bias[: spoilt(9, 1)])
    combined, _, _ = buffer.combine(recv_x, handle)
    close(combined, CASE.x[me] * times(CASE, me)[:, None])
    buffer.destroy()
    for call in (
        lambda: buffer.dispatch(CASE.x[me], **good),
        lambda: buffer.dispatch(CASE.x[me], handle=handle),
        lambda: buffer.combine(recv_x, handle),
        lambda: buffer.clean_low_latency_buffer(7, 64, 8),
    ):
        with pytest.raises(errors.InvalidInputError, match=r"was destroyed|was closed"):
            call()


def test_bad_combines_and_cached_dispatches_are_refused_on_all_ranks(ranks):
    ranks(2, bad_later_calls)


def bad_layouts(world):
    buffer = buffer_of(world)
    for idx, experts, says in (
        (np.zeros((2, 2), np.int32), 8, "topk_idx: found type int32"),
        (np.full((2, 2), 8), 8, r"found expert 8 at \[0, 0\]"),
        (np.zeros((2, 2), np.int64), 7, "num_experts: found 7; expected a multiple of the 2 ranks"),
    ):
        with pytest.raises(errors.InvalidInputError, match=says):
            buffer.get_dispatch_layout(idx, experts)
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        buffer.dispatch(None, speed=1)
    buffer.destroy()


def test_a_bad_layout_is_refused_where_it_is(ranks):
    ranks(2, bad_layouts)
