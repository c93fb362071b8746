"""The drop-in's calls of Hybrid-EP against a reference of these tests, on 1 to 4 processes, bit for bit."""

import hybrid_cases
import numpy as np
import pytest
import torch
from hybrid_cases import Case, outputs_of, probs_of, rows_of, same, scaled, shifted
from test_deep_ep_normal import buffer_of
from test_deep_ep_refusals import raises

from tokenyard import errors
from tokenyard.deep_ep import HybridEPBuffer, _pool, indices_to_map
from tokenyard.deep_ep._calls import hybrid_by_rank, hybrid_routing

CASES = [
    Case(1, (5,)),
    Case(2, (7, 9), seed=2),
    Case(2, (0, 6), seed=3, most=8),
    Case(2, (0, 0), seed=4),
    Case(4, (9, 0, 1, 5), seed=5, hidden=128, most=6),
]
NAMES = [f"{case.ranks} ranks {case.tokens}" for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)
# Maps with more experts of a token than ids may have columns.
WIDE = Case(2, (6, 3), local=40, hidden=64, most=70, seed=7)
BY_RANK = Case(2, (9, 4), local=40, hidden=64, most=6, seed=7)
every_split = pytest.mark.parametrize("domains", [1, 2], ids=["one domain", "two domains"])


def hybrid(world, case, domains=1, **options):
    buffer_of(world, domains).destroy()  # for its config
    return HybridEPBuffer(world, case.hidden, max(case.tokens), case.local, **options)


def permuted(world, case, domains, *arguments):
    hybrid_cases.permuted(hybrid(world, case, domains), case, *arguments)


def flat(world, case, domains):
    hybrid_cases.flat(hybrid(world, case, domains), case)


def quantised(world, case):
    buffer = hybrid(world, case, use_fp8=True)
    assert buffer.configurer.buffer_config.token_data_type == "UINT8"
    hybrid_cases.quantised(buffer, case)


def without_waiting(world, case):
    hybrid_cases.without_waiting(hybrid(world, case), case)


@every_case
@every_split
@pytest.mark.parametrize("unit", [1, 8])
def test_permuted_rows_are_grouped_by_expert_and_come_back(ranks, case, domains, unit):
    if case.ranks > 1 or domains == 1:
        ranks(case.ranks, permuted, case, domains, unit)


def test_a_map_may_have_more_experts_of_a_token_than_ids_have_columns(ranks):
    ranks(2, permuted, WIDE, 1, 8, shifted)
    ranks(2, flat, WIDE, 1)


@every_case
@every_split
def test_rows_that_are_not_permuted_come_once_per_rank(ranks, case, domains):
    if case.ranks > 1 or domains == 1:
        ranks(case.ranks, flat, case, domains)


def as_on_gpus(world, case, act):
    """Where the kernel set takes no rows of another width, and no cap."""
    takes, lacks = _pool.Opened.takes, ("round_once", "max_rows")
    _pool.Opened.takes = lambda opened, form: form not in lacks and takes(opened, form)
    try:
        act(world, case)
    finally:
        _pool.Opened.takes = takes


def flat_as_on_gpus(world, case):
    as_on_gpus(world, case, lambda world, case: flat(world, case, 1))


def without_waiting_as_on_gpus(world, case):
    as_on_gpus(world, case, without_waiting)


def test_what_comes_beside_rows_may_have_their_width(ranks):
    for case in (*CASES[1:3], WIDE):
        ranks(2, flat_as_on_gpus, case)


def test_rows_beyond_the_number_asked_for_are_dropped_without_a_cap(ranks):
    for case in (*CASES[1:3], BY_RANK):
        ranks(2, without_waiting_as_on_gpus, case)


def test_quantised_rows_bring_their_scales(ranks):
    for case in CASES[1:3]:
        ranks(2, quantised, case)


def test_rows_beyond_the_number_asked_for_are_dropped_where_the_host_does_not_wait(ranks):
    for case in (*CASES, WIDE):
        ranks(case.ranks, without_waiting, case)


def grown(world, case):
    """Sizes grow with the calls, for all ranks; a handle from before is refused on all."""
    me, buffer = world.rank, hybrid(world, case)
    assert buffer.rank == me
    assert (buffer.group_size, buffer.local_rank, buffer.node_rank) == (case.ranks, me, 0)
    assert (buffer.num_of_nodes, buffer.group) == (1, world)
    assert buffer.num_of_hybrid_ep_ranks_per_nvlink_domain == case.ranks
    config = buffer.configurer.buffer_config
    found = config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank
    assert found == (case.hidden, 512, case.local)
    assert (config.num_of_ranks_per_node, config.num_of_nodes) == (case.ranks, 1)
    assert config.token_data_type == "UINT16"
    assert config.is_valid()
    x, form = case.x[me], {"routing_map": case.maps[me]}
    rows, none, _, _, handle = buffer.dispatch_with_permute(hidden=x, **form)
    assert none is None
    assert buffer.runtime.buffer_generation == 0
    template = buffer.update_template_config(
        num_of_tokens_per_rank=100, pad_multiple=32, use_fp8=True, num_of_blocks_permute=7
    )
    assert (template.num_of_tokens_per_rank, template.pad_multiple) == (112, 32)
    assert (template.token_data_type, template.num_of_blocks_permute) == ("UINT8", 7)
    assert "pad_multiple=32" in repr(template)
    assert buffer.configurer.adjust_template(template, True) is template
    assert buffer.configurer.get_default_config(True).hidden_dim == case.hidden
    buffer.combine_with_unpermute(hidden=rows, handle=handle)
    with pytest.raises(AssertionError, match="a row for each token"):
        indices_to_map(torch.zeros((2, 3), dtype=torch.int64), None, 3, 4)
    for given in ({"num_of_tokens_per_rank": -1}, {"use_fp8": 7}):
        with pytest.raises(errors.InvalidInputError, match=": found"):
            buffer.update_template_config(**given)
    slots = 513
    rows, *_, handle2 = buffer.dispatch_with_permute(hidden=x, **form, num_of_tokens_per_rank=slots)
    assert handle2[8] == 528
    assert buffer.runtime.buffer_generation == 1
    assert config.max_num_of_tokens_per_rank == 576
    flat_rows, _, _, flat_handle = buffer.dispatch(x, **form)
    for call in (
        lambda: buffer.combine_with_unpermute(hidden=rows, handle=handle),
        lambda: buffer.dispatch_with_permute(hidden=x, handle=handle),
    ):
        with pytest.raises(RuntimeError, match="generation 0; expected one of generation 1"):
            call()
    buffer.update_template_config(hidden_dim=2 * case.hidden)
    assert buffer.runtime.buffer_generation == 2
    with pytest.raises(RuntimeError, match="generation"):
        buffer.combine(flat_rows, handle=flat_handle)
    raises(
        world,
        "num_of_tokens_per_rank: found 3; expected at least the 9 tokens",
        buffer.dispatch_with_permute,
        hidden=x,
        **form,
        **({"num_of_tokens_per_rank": 3} if me == 1 else {}),
    )
    *_, handle = buffer.dispatch_with_permute(hidden=x, **form)
    *_, flat_handle = buffer.dispatch(x, **form)
    raises(
        world,
        "handle: found one of the other dispatch",
        buffer.dispatch,
        x,
        handle=handle if me == 1 else flat_handle,
    )
    raises(
        world,
        "handle: found one that no dispatch of this process returned",
        buffer.dispatch_with_permute,
        hidden=x,
        handle=(1, 2) if me == 1 else handle,
    )
    buffer.dispatch_with_permute(hidden=x, handle=handle)


def test_a_buffer_grows_and_handles_from_before_are_refused(ranks):
    ranks(2, grown, CASES[1])


def of_arrays(world, case):
    """Arrays of numpy go in and come out; handles are found again, also as another tuple of the same tensors."""
    me, buffer = world.rank, hybrid(world, case)
    x = case.x[me].float().numpy()
    form = {"routing_map": case.maps[me].numpy(), "probs": case.probs[me].numpy()}
    places, _ = case.permuted(me)
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(hidden=x, **form)
    assert all(isinstance(one, np.ndarray) for one in (rows, probs, counts, handle[0], handle[-1]))
    np.testing.assert_array_equal(rows, rows_of(case, places, [one.float() for one in case.x]))
    out, back = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=[*handle])
    assert isinstance(out, np.ndarray)
    np.testing.assert_array_equal(back, case.probs[me])
    ids, weights = case.columns(me, case.most)
    routing_map, probs = indices_to_map(ids.numpy(), weights.numpy(), len(x), case.experts)
    np.testing.assert_array_equal(routing_map, case.maps[me])
    np.testing.assert_array_equal(probs, case.probs[me])
    assert indices_to_map(ids, None, len(x), case.experts)[1] is None
    # Ranks may have other numbers of tokens, and of experts of a token, in every call.
    for step in range(3):
        tokens, most = 3 + 600 * step * (1 - me), 1 + (step + me) % 4
        chosen = np.arange(case.experts)[None] < np.full((tokens, 1), most)
        rows, _, _, counts, handle = buffer.dispatch_with_permute(
            hidden=np.ones((tokens, case.hidden), np.float32), routing_map=chosen
        )
        out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        np.testing.assert_array_equal(out, np.full((tokens, case.hidden), most, np.float32))
    with pytest.warns(UserWarning, match="num_dispatched_tokens is deprecated"):
        buffer.combine_with_unpermute(hidden=rows, handle=handle, num_dispatched_tokens=3)
    with pytest.warns(UserWarning, match="use_host_meta is deprecated"):
        buffer.dispatch_with_permute(hidden=x, **form, use_host_meta=True)


def test_arrays_are_taken_and_sizes_may_differ_in_every_call(ranks):
    ranks(2, of_arrays, CASES[1])


def more_experts(world, case):
    hybrid_cases.more_experts_than_before(hybrid(world, case), case)


def test_no_expert_is_lost_where_the_host_does_not_wait(ranks):
    for case in (CASES[1], CASES[4], WIDE):
        ranks(case.ranks, more_experts, case)


def by_rank(world, case, domains):
    """Rows that come once per rank and are permuted there: sums have the bits of those that come by expert."""
    me, unit, buffer = world.rank, 8, hybrid(world, case, domains)
    places, counts = case.permuted(me, unit)
    room = len(places) + 16
    form = {"routing_map": case.maps[me], "probs": case.probs[me], "pad_multiple": unit}
    without = {"non_blocking": True, "num_permuted_tokens": room, "num_of_tokens_per_rank": 20}
    x = case.x[me]
    rows, probs, _, padded, handle = buffer.dispatch_with_permute(hidden=x, **form, **without)
    assert hybrid_by_rank.is_of(handle)
    same(rows[: len(places)], rows_of(case, places, case.x))
    same(probs[: len(places)], probs_of(case, places))
    # Behind them lie zeros.
    assert not rows[len(places) :].any()
    assert (len(rows), padded.tolist()) == (room, counts)
    assert handle[8] == 32
    y = outputs_of(rows, places, scaled)
    out, back = buffer.combine_with_unpermute(hidden=y, probs=probs, handle=handle)
    expected = case.summed(me, scaled)
    if domains == 1:
        same(out + 0, expected + 0)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    same(back, case.probs[me])
    for count in (None, room + 5, torch.tensor(7)):
        again, probs, _, none, same_handle = buffer.dispatch_with_permute(
            hidden=-x, probs=2 * case.probs[me], handle=handle, num_permuted_tokens=count
        )
        assert len(again) == len(probs) == (room if count is None else int(count))
        found = min(len(again), len(places))
        same(again[:found], rows_of(case, places, [-one for one in case.x])[:found])
        same(probs[:found], 2 * probs_of(case, places)[:found])
        assert none is None
        assert same_handle is handle
    draw = torch.Generator().manual_seed(9)
    eight = [torch.randint(0, 256, (t, case.hidden), generator=draw) for t in case.tokens]
    eight = [one.to(torch.uint8) for one in eight]
    scales = [torch.rand(t, 3, generator=draw) for t in case.tokens]
    rows, _, found, _, _ = buffer.dispatch_with_permute(
        hidden=eight[me].view(torch.float8_e4m3fn), scaling_factor=scales[me], **form, **without
    )
    same(rows[: len(places)].view(torch.uint8), rows_of(case, places, eight))
    same(found[: len(places)], rows_of(case, places, scales))
    says = "hidden: found 1 rows"
    with pytest.raises((errors.InvalidInputError, errors.RefusedError), match=says):
        buffer.combine_with_unpermute(hidden=x.new_zeros((1, case.hidden)), handle=handle)
    raises(
        world,
        "num_permuted_tokens: found 3 with non_blocking",
        buffer.dispatch_with_permute,
        hidden=x,
        **form,
        **{**without, "num_permuted_tokens": 3 if me == 1 else room},
    )
    for name, wrong in (
        ("hidden", None),
        ("routing_map", torch.zeros(3)),
        ("probs", 7),
        ("pad_multiple", "x"),
        ("non_blocking", "x"),
        ("num_permuted_tokens", 1.5),
        ("num_of_experts_per_rank", "x"),
        ("num_of_experts", 3),
        ("num_of_tokens_per_rank", -1),
    ):
        call = {"hidden": x, **form, **without}
        spoilt = {**call, name: wrong} if me == 1 else call
        raises(world, f"{name}: found", buffer.dispatch_with_permute, **spoilt)
        *_, handle = buffer.dispatch_with_permute(**call)
    given = {"handle": (1, 2) if me == 1 else handle}
    says = "handle: found one that no dispatch of this process returned"
    raises(world, says, buffer.dispatch_with_permute, hidden=x, **given)
    raises(world, says, buffer.combine_with_unpermute, hidden=y, **given)
    buffer.combine_with_unpermute(hidden=y, handle=handle)
    buffer.update_template_config(num_of_tokens_per_rank=4096)
    with pytest.raises(errors.InvalidInputError, match="generation"):
        buffer.combine_with_unpermute(hidden=y, handle=handle)


@every_split
def test_rows_that_come_once_per_rank_are_permuted_there(ranks, domains):
    ranks(4, by_rank, Case(4, (9, 0, 1, 5), local=16, hidden=64, most=40, seed=8), domains)


def unasked(world, case):
    """Behind the first call, ranks with fewer tokens and other maps ask no other for sizes."""
    me, buffer = world.rank, hybrid(world, case)
    common = {"num_of_tokens_per_rank": max(case.tokens)}
    permuted = {**common, "non_blocking": True, "num_permuted_tokens": 2000}

    def asks(*arguments):
        raise AssertionError("found a question to other ranks")

    for call, options in (
        (buffer.dispatch_with_permute, permuted),
        (buffer.dispatch, {**common, "num_dispatched_tokens": 2000}),
    ):
        nothing = torch.zeros_like(case.maps[me])
        call(hidden=case.x[me], routing_map=nothing, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buffer._pool, "agree", asks)
            for tokens in (0, 1 + me, case.tokens[me]):
                form = {"hidden": case.x[me][:tokens], "routing_map": case.maps[me][:tokens]}
                call(**form, **options)
    assert buffer.runtime.buffer_generation == 0
    # Without the largest T, all T are the same.
    with pytest.raises(errors.InvalidInputError, match="found max_tokens = 3 on rank 1"):
        buffer.dispatch_with_permute(
            hidden=case.x[me][: 2 + me],
            routing_map=case.maps[me][: 2 + me],
            non_blocking=True,
            num_permuted_tokens=2000,
        )


def test_ranks_that_do_not_wait_have_the_same_sizes_whatever_they_bring(ranks):
    ranks(2, unasked, WIDE)


def generations(world, case):
    """One rank has many tokens: the buffers of all grow, and no handle is old on some of them alone."""
    me, buffer = world.rank, hybrid(world, case)
    x, form = case.x[me], {"routing_map": case.maps[me]}
    rows, *_, handle = buffer.dispatch_with_permute(hidden=x, **form)
    tokens = 600 if me == 0 else 2
    chosen = torch.ones((tokens, case.experts), dtype=torch.bool)
    many = {"hidden": torch.ones(tokens, case.hidden), "routing_map": chosen}
    # A call that is refused lets nothing grow.
    raises(
        world,
        "pad_multiple: found -1",
        buffer.dispatch_with_permute,
        **many,
        num_of_tokens_per_rank=9000,
        **({"pad_multiple": -1} if me == 1 else {}),
    )
    assert buffer.runtime.buffer_generation == 0
    buffer.dispatch_with_permute(**many)
    assert buffer.runtime.buffer_generation == 1
    assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank == 1024
    for _ in range(2):
        with pytest.raises(errors.InvalidInputError, match="generation 0; expected one of"):
            buffer.combine_with_unpermute(hidden=rows, handle=handle)
    rows, *_, handle = buffer.dispatch_with_permute(hidden=x, **form)
    # Narrower rows have another communicator. A handle that is old on one rank alone is refused on its own.
    buffer.dispatch_with_permute(hidden=x[:, :32].contiguous(), **form)
    if me == 1:
        buffer.update_template_config(num_of_tokens_per_rank=4096)
    says = "handle: found one of buffer generation 1"
    raises(world, says, buffer.dispatch_with_permute, hidden=x, handle=handle)
    raises(world, says, buffer.combine_with_unpermute, hidden=rows, handle=handle)
    # Sizes are those of the rank that names the largest.
    other = HybridEPBuffer(world, 64, 100 + 1000 * me, 4)
    assert other.configurer.buffer_config.max_num_of_tokens_per_rank == 1152


def test_buffers_grow_on_all_ranks_by_the_tokens_of_one(ranks):
    ranks(2, generations, CASES[1])


def other_numbers_of_rows(world, case):
    """A token of one rank is sent as several rows, so those of all are: each counts once."""
    me, buffer = world.rank, hybrid(world, case)
    maps = [case.maps[0], case.maps[1] & (case.maps[1].cumsum(1) <= 2)]
    arrived = [sum(int(m[:, case.own(r)].any(1).sum()) for m in maps) for r in range(2)]
    for _ in range(2):
        *_, handle = buffer.dispatch_with_permute(hidden=case.x[me], routing_map=maps[me])
        assert handle[3].tolist() == [arrived[me]]


def test_tokens_count_once_where_one_rank_alone_has_many_experts_of_one(ranks):
    ranks(2, other_numbers_of_rows, WIDE)


def refused(world, case):
    """Faults of one rank before it sends are refused on all."""
    me, buffer = world.rank, hybrid(world, case)
    x, form = case.x[me], {"routing_map": case.maps[me], "probs": case.probs[me]}
    *_, handle = buffer.dispatch_with_permute(hidden=x, **form)
    rows, probs, _, flat_handle = buffer.dispatch(x, **form)

    def fails(*arguments):
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        if me == 1:
            patch.setattr(hybrid_routing.Routing, "columns", fails)
        says = "RuntimeError: out of memory"
        raises(world, says, buffer.dispatch_with_permute, hidden=x, **form)
    buffer.dispatch_with_permute(hidden=x, **form)
    elsewhere = probs.to("meta") if me == 1 else probs
    says = "probs: found a tensor on meta"
    raises(world, says, buffer.combine, rows, probs=elsewhere, handle=flat_handle)
    # A number on a device, for which the host would wait.
    count = torch.empty((), dtype=torch.int64, device="meta") if me == 1 else 2000
    without = {"non_blocking": True, "num_of_tokens_per_rank": max(case.tokens)}
    says = "num_permuted_tokens: found a tensor on meta with non_blocking"
    raises(
        world,
        says,
        buffer.dispatch_with_permute,
        hidden=x,
        **form,
        **without,
        num_permuted_tokens=count,
    )
    *_, handle = buffer.dispatch_with_permute(hidden=x, **form, **without, num_permuted_tokens=64)
    again, *_ = buffer.dispatch_with_permute(hidden=x, handle=handle, num_permuted_tokens=count)
    assert len(again) == (64 if me == 1 else 2000)
    # As many rows as a call asks for, also by a handle.
    again, probs, _, _ = buffer.dispatch(
        x, probs=case.probs[me], handle=flat_handle, num_dispatched_tokens=len(rows) + 3
    )
    assert len(again) == len(probs) == len(rows) + 3
    same(again[: len(rows)], rows)


def test_what_one_rank_cannot_make_ready_is_refused_on_all(ranks):
    ranks(2, refused, CASES[1])
