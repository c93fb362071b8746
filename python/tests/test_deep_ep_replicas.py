"""Redundant experts of the drop-in: weights for slots of other ranks, and gradients of slots."""

import numpy as np
import pytest
import torch
from oracle import Case
from test_deep_ep_normal import buffer_of, same
from test_deep_ep_operations import MIB, TYPES, drawn, equal
from test_deep_ep_refusals import raises

from tokenyard import errors
from tokenyard.deep_ep import BufferAllocator, EPBuffer, EventOverlap

KEPT = 0xA5
# Elements of an expert: from 64 bytes to 4 MiB of float32, and views of several dimensions.
SHAPES = ((16,), (4, 24), (2, 3, 50), (100_003,), (1024, 1024))


def ep_buffer(world, plan=0, domains=1):
    buffer_of(world, domains).destroy()  # for its config
    return EPBuffer(world, 2 * MIB, lb_allocation_plan_or_num_bytes=plan, explicitly_destroy=True)


def mapping_of(ranks, local, spare, seed):
    """Some slots are empty, and all of the last rank where there are more than two."""
    draw = np.random.default_rng(seed)
    mapping = np.full((ranks, spare), -1, np.int32)
    for rank in range(ranks - (ranks > 2)):
        others = [e for e in range(ranks * local) if e // local != rank]
        mapping[rank] = draw.choice(others, spare, replace=False)
        mapping[rank][draw.random(spare) < 0.25] = -1
    return torch.from_numpy(mapping)


def expect_slots(slots, mapping, me, local, weights):
    """`weights(rank)`: of the experts of a rank."""
    for slot, expert in enumerate(mapping[me].tolist()):
        if expert < 0:
            assert (slots[slot].reshape(-1).view(torch.uint8) == KEPT).all()
        else:
            equal(slots[slot], weights(expert // local)[expert % local])


def prefetched(world, local, spare):
    me, ranks = world.rank, world.ranks
    plan = BufferAllocator()
    pools = [plan.allocate((spare, *shape), torch.float32) for shape in SHAPES]
    many = [plan.allocate((spare, 40), dtype) for dtype in TYPES]
    buffer = ep_buffer(world, plan)
    assert buffer.num_lb_bytes == plan.num_bytes == buffer.runtime.lb_storage.numel()
    assert pools[0].data_ptr() == buffer.lb_storage.data_ptr()
    for seed, pool in enumerate(pools):
        mapping = mapping_of(ranks, local, spare, seed)
        buffer.lb_storage.fill_(KEPT)

        def weights(rank, seed=seed):
            return drawn(torch.float32, (local, *SHAPES[seed]), seed, rank)

        sms = buffer.lb_get_theoretical_num_sms()
        event = buffer.lb_prefetch_weights(pool, weights(me), mapping, sms, buffer.capture())
        assert isinstance(event, EventOverlap)
        assert event.wait() is None
        expect_slots(pool, mapping, me, local, weights)
    # Several tensors of any types in one call, by arrays, too; the event is never waited for.
    buffer.lb_storage.fill_(KEPT)
    own = [drawn(dtype, (local, 40), 7, me) for dtype in TYPES]
    buffer.lb_prefetch_weights(many, own, mapping.numpy())
    arrays = np.zeros((spare, 3), np.float32)
    buffer.lb_prefetch_weights(arrays, np.full((local, 3), me, np.float32), mapping).wait()
    for place, dtype in enumerate(TYPES):
        expect_slots(
            many[place], mapping, me, local, lambda rank, of=dtype: drawn(of, (local, 40), 7, rank)
        )
    expected = [expert // local if expert >= 0 else 0 for expert in mapping[me].tolist()]
    same(arrays[:, 0], np.array(expected, np.float32))
    event = buffer.lb_prefetch_weights(many, own, mapping)
    buffer.destroy()
    event.wait()
    with pytest.raises(errors.InvalidInputError, match="it was destroyed"):
        buffer.lb_prefetch_weights(many, own, mapping)


@pytest.mark.parametrize(("count", "local", "spare"), [(2, 4, 2), (4, 4, 3)])
def test_weights_of_experts_come_to_the_slots(ranks, count, local, spare):
    ranks(count, prefetched, local, spare)


WIDTHS = (24, 40, 1000, 4099, 1 << 18)


def reduced(world, local, spare):
    me, ranks = world.rank, world.ranks
    buffer = ep_buffer(world)
    assert (buffer.num_lb_bytes, buffer.lb_storage.numel()) == (0, 0)
    for seed, width in enumerate(WIDTHS):
        mapping = mapping_of(ranks, local, spare, seed)
        pools = [drawn(torch.float32, (spare, width), seed, rank) for rank in range(ranks)]
        own = drawn(torch.float32, (local, width), seed, 50 + me)
        expected = own.clone()
        for rank, row in enumerate(mapping.tolist()):
            for slot, expert in enumerate(row):
                if expert >= 0 and expert // local == me:
                    expected[expert % local] += pools[rank][slot]
        given = pools[me].clone()
        buffer.lb_reduce_grads(given, own, mapping, num_sms=2).wait()
        equal(own, expected)
        equal(given, pools[me])
    buffer.destroy()


@pytest.mark.parametrize(("count", "local", "spare"), [(2, 4, 2), (4, 2, 4)])
def test_gradients_of_slots_are_added_to_those_of_the_owners(ranks, count, local, spare):
    ranks(count, reduced, local, spare)


def of_domains(world):
    """Each domain has a mapping of its own, of its own experts."""
    me, domain = world.rank, world.rank // 2
    buffer = ep_buffer(world, domains=2)
    mapping = torch.tensor([[[2, 3], [0, -1]], [[-1, 2], [1, 0]]][domain], dtype=torch.int32)

    def weights(rank):
        return drawn(torch.float32, (2, 30), 1, 2 * domain + rank)

    slots = torch.full((2, 30), 0, dtype=torch.float32)
    slots.view(torch.uint8).fill_(KEPT)
    buffer.lb_prefetch_weights(slots, weights(me % 2), mapping).wait()
    expect_slots(slots, mapping, me % 2, 2, weights)
    buffer.destroy()


def test_domains_have_mappings_of_their_own(ranks):
    ranks(4, of_domains)


def beside_a_dispatch(world):
    me, case = world.rank, Case(2, seed=4)
    buffer = ep_buffer(world)
    own, slots = drawn(torch.float32, (4, 1 << 18), me), torch.zeros(1, 1 << 18)
    mapping = torch.tensor([[4], [3]], dtype=torch.int32)
    event = buffer.lb_prefetch_weights(slots, own, mapping)
    rows, _, _, handle, _ = buffer.dispatch(
        case.x[me],
        topk_idx=case.idx[me],
        topk_weights=case.weights[me],
        num_experts=case.experts,
        num_max_tokens_per_rank=12,
    )
    same(rows, case.rows(case.sources(me)))
    buffer.combine(rows, handle)
    event.wait()
    equal(slots[0], drawn(torch.float32, (4, 1 << 18), 1 - me)[0 if me == 0 else 3])
    buffer.destroy()


def test_weights_travel_beside_a_dispatch(ranks):
    ranks(2, beside_a_dispatch)


def wrong(world):
    buffer = ep_buffer(world)
    slots, own = torch.zeros(2, 8), torch.zeros(4, 8)
    names = ("redundant_expert_weights", "expert_weights", "redundancy_mapping")
    good = dict(zip(names, (slots, own, torch.tensor([[4, -1], [0, 1]]).int()), strict=True))
    for says, bad in {
        "redundancy_mapping: found type int64; expected int32": ("redundancy_mapping", torch.zeros(2, 2).long()),
        "redundancy_mapping: found shape [1, 2]; expected [2, any]": ("redundancy_mapping", torch.zeros(1, 2).int()),
        "redundancy_mapping: found strides [1, 2]": ("redundancy_mapping", torch.full((2, 2), -1).int().t()),
        "redundancy_mapping[1][0]: found expert 7, which rank 1 owns": (
            "redundancy_mapping",
            torch.tensor([[4, -1], [7, 1]]).int(),
        ),
        "redundancy_mapping[0][1]: found expert 8; expected -1, or below 8": (
            "redundancy_mapping",
            torch.tensor([[4, 8], [0, 1]]).int(),
        ),
        "redundancy_mapping[0][1]: found expert -2": (
            "redundancy_mapping",
            torch.tensor([[4, -2], [0, 1]]).int(),
        ),
        "redundant_expert_weights: found 3 slots; expected": ("redundant_expert_weights", torch.zeros(3, 8)),
        "redundant_expert_weights: found 36 bytes of an expert": ("redundant_expert_weights", torch.zeros(2, 9)),
        "redundant_expert_weights: found a view with gaps": ("redundant_expert_weights", torch.zeros(8, 2).t()),
        "redundant_expert_weights: found 2 tensors; expected 1": ("redundant_expert_weights", [slots] * 2),
        "expert_weights: found 0 tensors": ("expert_weights", []),
        "expert_weights: found a tensor on meta; expected one on cpu": ("expert_weights", own.to("meta")),
        "expert_weights: found int in a list": ("expert_weights", [1]),
    }.items():  # fmt: skip
        given = {**good, bad[0]: bad[1]} if world.rank == 1 else good
        raises(world, says, buffer.lb_prefetch_weights, **given)
        buffer.lb_prefetch_weights(**good).wait()
    mapping = good["redundancy_mapping"]
    for says, bad in {
        "expert_grads: found type int32; expected one of float32": (slots.int(), own.int()),
        "redundant_expert_grads: found type float64; expected float32": (
            slots[:, :4].double().contiguous(),
            own,
        ),
    }.items():
        given = bad if world.rank == 1 else (slots, own)
        raises(world, says, buffer.lb_reduce_grads, *given, mapping)
    others = {**good, "redundancy_mapping": torch.tensor([[5, -1], [0, 1]]).int()}
    with pytest.raises(errors.MismatchError, match="another redundancy_mapping on rank 1"):
        buffer.lb_prefetch_weights(**(others if world.rank == 1 else good))
    buffer.lb_prefetch_weights(**good).wait()
    buffer.destroy()
    used = BufferAllocator()
    used.allocate((4,), torch.float32)
    used.materialize(torch.zeros(used.num_bytes, dtype=torch.uint8))
    for says, plan in (("found a plan that a buffer has used", used), ("found 7; expected a", 7)):
        plan = plan if world.rank == 1 else 0
        says = f"lb_allocation_plan_or_num_bytes: {says}"
        raises(world, says, EPBuffer, world, lb_allocation_plan_or_num_bytes=plan)


def test_what_is_wrong_on_one_rank_is_refused_on_all_and_the_buffer_goes_on(ranks):
    ranks(2, wrong)
