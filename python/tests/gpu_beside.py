"""The drop-in's operations beside dispatch and combine, on tensors of torch: messages, gathers, entries, replicas."""

import pytest
import torch
from gpu_common import is_gpu, prepare
from gpu_work import branch, side_stream, slow

import tokenyard
from tokenyard import errors
from tokenyard.deep_ep import BucketBuffer, ElasticBuffer, EngramBuffer, EPBuffer, PPBuffer

MIB = 1 << 20
TYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.int32)


def placed(tensor):
    return tensor.cuda() if is_gpu() else tensor


def drawn(dtype, shape, *seed):
    """Values of a type, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(hash(seed) % (1 << 31))
    numbers = torch.randint(0, 100, shape, generator=generator)
    return placed(numbers).to(dtype)


def equal(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    views = [one.contiguous().view(-1).view(torch.uint8) for one in (found, expected)]
    assert torch.equal(*views)


def elastic(world, **options):
    prepare(world)
    return ElasticBuffer(world, num_bytes=64 * MIB, explicitly_destroy=True, **options)


def messages(world):
    """Behind work of the stream, and before work that overwrites what was sent."""
    me, other, buffer = world.rank, 1 - world.rank, elastic(world)
    buffer.pp_set_config(4 * MIB, 3)
    for round in range(4):
        for dtype in TYPES:
            sent, expected = (
                drawn(dtype, (1000, 33), round, me),
                drawn(dtype, (1000, 33), round, other),
            )
            found = torch.zeros_like(sent)
            slow()
            late = sent.view(torch.uint8).clone().view(dtype)
            buffer.pp_send(late, other)
            late.zero_()
            buffer.pp_recv(found, other)
            equal(found, expected)
    buffer.destroy()
    pipe = PPBuffer(world, MIB, 2, explicitly_destroy=True)
    sent, found = drawn(torch.bfloat16, (64, 64), me), placed(torch.zeros(64, 64).bfloat16())
    pipe.send(sent, other)
    pipe.recv(found, other)
    equal(found, drawn(torch.bfloat16, (64, 64), other))
    pipe.destroy()


def gathers(world):
    """Of several tensors, in place, and more calls than travel at once, behind work of the stream."""
    me, ranks, buffer = world.rank, world.ranks, elastic(world)
    buffer.agrs_set_config(16 * MIB, 8)
    for round in range(2):
        with buffer.agrs_new_session():
            waited = []
            for call in range(6):
                shards = [
                    drawn(torch.bfloat16, (100 + call, 16), round, call, k, me) for k in (0, 1)
                ]
                slow()
                late = [shard.clone() for shard in shards]
                *whole, handle = buffer.all_gather(late)
                waited.append((call, whole, handle))
            place = buffer.agrs_get_inplace_tensor((50, 7), torch.int32)
            place.copy_(drawn(torch.int32, (50, 7), round, me))
            whole, handle = buffer.all_gather(place)
            handle()
            for rank in range(ranks):
                equal(whole[rank], drawn(torch.int32, (50, 7), round, rank))
            for call, whole, handle in reversed(waited):
                handle()
                for k in (0, 1):
                    for rank in range(ranks):
                        expected = drawn(torch.bfloat16, (100 + call, 16), round, call, k, rank)
                        equal(whole[k][rank], expected)
    buffer.destroy()


def entries(world):
    """Values of each type and width, an index of no entry, and the same by the class of 2.5."""
    me, ranks, count = world.rank, world.ranks, 500
    buffer = elastic(world, num_cpu_bytes=16 * MIB)
    for dtype, hidden in ((torch.bfloat16, 128), (torch.bfloat16, 33)):
        tables = [drawn(dtype, (count, hidden), rank, hidden) for rank in range(ranks)]
        slow()
        buffer.engram_write(tables[me].clone())
        indices = drawn(torch.int32, (40, 5), me, hidden) + count * drawn(
            torch.int32, (40, 5), 9
        ) % (count * ranks)
        data, _ = buffer.engram_fetch(indices)()
        expected = torch.cat(tables)[indices.long().view(-1)].view(40, 5 * hidden)
        equal(data, expected)
        if me == 1:
            hook = buffer.engram_fetch(placed(torch.tensor([[count * ranks]], dtype=torch.int32)))
            with pytest.raises(errors.InvalidInputError, match="is of no rank"):
                hook()
    buffer.destroy()
    engram = EngramBuffer(world, 64 * MIB, 64 * MIB, False, 8, 1024, explicitly_destroy=True)
    sizes = [300, 200]
    engram.set_config(sizes, 64, 32, 4)
    layers = [[drawn(torch.bfloat16, (n, 64), n, rank) for n in sizes] for rank in range(ranks)]
    engram.write([layer.clone() for layer in layers[me]])
    indices = torch.stack([drawn(torch.int32, (32, 4), me, n) for n in sizes])
    for layer, hook in reversed(list(enumerate(engram.fetch(indices)))):
        found = hook()
        whole = torch.cat([layers[rank][layer] for rank in range(ranks)])
        equal(found, whole[indices[layer].long().view(-1)].view(32, 4 * 64))
    engram.destroy()


def buckets(world):
    """All-gathers of buckets; sums need kernels that GPUs do not have, and are refused by name there."""
    prepare(world)
    me, ranks = world.rank, world.ranks
    bucket = BucketBuffer(world, 4 * MIB, explicitly_destroy=True)
    shard = drawn(torch.float32, (1000,), me)
    with bucket.session():
        slow()
        whole = bucket.all_gather(shard.clone()).wait()
        for rank in range(ranks):
            equal(whole.view(ranks, -1)[rank], drawn(torch.float32, (1000,), rank))
    grads = drawn(torch.float32, (ranks * 64,), me)
    if is_gpu():
        with pytest.raises(errors.UnsupportedError) as raised:
            bucket.reduce_scatter(grads).wait()
        bucket.destroy()
        return str(raised.value)
    expected = sum(drawn(torch.float32, (ranks * 64,), rank) for rank in range(ranks))
    equal(bucket.reduce_scatter(grads).wait(), expected.view(ranks, 64)[me])
    bucket.destroy()


def replicas(world):
    """Weights for slots, behind work of the stream and in more parts than may be in flight, and gradients back."""
    prepare(world)
    me, other, local = world.rank, 1 - world.rank, 4
    buffer = EPBuffer(world, lb_allocation_plan_or_num_bytes=64 * MIB, explicitly_destroy=True)
    mapping = torch.tensor([[5, -1, 4], [0, 3, -1]], dtype=torch.int32)
    for round, dtype in enumerate(TYPES):
        shape = (3, 1000, 1500 + round)
        length = 3 * 1000 * shape[2] * dtype.itemsize
        slots = buffer.lb_storage[:length].view(dtype).view(shape)
        slots.view(torch.uint8).fill_(0xA5)
        own = drawn(dtype, (local, *shape[1:]), round, me)
        slow()
        late = own.view(torch.uint8).clone().view(dtype)
        event = buffer.lb_prefetch_weights(slots, late, mapping)
        event.wait()
        late.zero_()
        theirs = drawn(dtype, (local, *shape[1:]), round, other)
        for slot, expert in enumerate(mapping[me].tolist()):
            if expert >= 0:
                equal(slots[slot], theirs[expert % local])
            else:
                assert bool((slots[slot].view(torch.uint8) == 0xA5).all())
    for dtype in (torch.float32, torch.bfloat16):
        grads, own = drawn(dtype, (3, 300_001), 1, me), drawn(dtype, (local, 300_001), 2, me)
        expected, theirs = own.clone(), drawn(dtype, (3, 300_001), 1, other)
        for slot, expert in enumerate(mapping[other].tolist()):
            if expert >= 0:
                expected[expert % local] += theirs[slot]
        slow()
        buffer.lb_reduce_grads(grads.clone(), own, mapping, previous_event=buffer.capture()).wait()
        equal(own, expected)
    if is_gpu():
        redundant_on_streams(buffer, mapping)
    buffer.destroy()


def redundant_on_streams(buffer, mapping):
    """A mapping that another stream writes, behind its event alone; a capture, and another GPU, are refused."""
    me, local, side = buffer.rank_idx, 4, side_stream()
    own, slots = drawn(torch.float32, (local, 1000), 5, me), torch.zeros(3, 1000, device="cuda")
    written, late = torch.full_like(mapping, -1, device="cuda"), mapping.cuda()
    with branch(side):
        slow()
        written.copy_(late)
        event = buffer.capture()
    buffer.lb_prefetch_weights(slots, own, written, previous_event=event).wait()
    theirs = drawn(torch.float32, (local, 1000), 5, 1 - me)
    for slot, expert in enumerate(mapping[me].tolist()):
        if expert >= 0:
            equal(slots[slot], theirs[expert % local])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots.add_(1)
        with pytest.raises(errors.InvalidInputError, match="found a capture of a graph"):
            buffer.lb_prefetch_weights(slots, own, mapping)
    if torch.cuda.device_count() > 1:
        elsewhere = own.to(f"cuda:{1 - own.device.index}")
        with pytest.raises(
            errors.InvalidInputError, match="expert_weights: found a tensor on cuda"
        ):
            buffer.lb_prefetch_weights(slots, elsewhere, mapping)
    buffer.lb_prefetch_weights(slots, own, mapping).wait()


def ids_of_copies(world):
    """The same as in host memory; a graph of them reads ids and plan anew."""
    plan = torch.tensor([[5, -1], [0, 3]], dtype=torch.int32)
    ids = torch.randint(-1, 8, (64, 4), generator=torch.Generator().manual_seed(world.rank))
    options = {"experts": 8, "by": "locality", "rank": world.rank}
    expected = tokenyard.physical_ids(ids, plan, **options)
    given = placed(torch.zeros_like(ids)), placed(torch.full_like(plan, -1))
    if not is_gpu():
        equal(tokenyard.physical_ids(ids, plan, **options), expected)
        return
    tokenyard.physical_ids(*given, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tokenyard.physical_ids(*given, **options)
    given[0].copy_(ids)
    given[1].copy_(plan)
    graph.replay()
    equal(found, placed(expected))


CHECKS = [messages, gathers, entries, buckets, replicas, ids_of_copies]
