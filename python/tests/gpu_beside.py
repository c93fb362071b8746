"""The drop-in's operations beside dispatch and combine, on tensors of torch: messages, all-gathers and entries."""

import pytest
import torch
from gpu_common import is_gpu, prepare
from gpu_work import slow

from tokenyard import errors
from tokenyard.deep_ep import BucketBuffer, ElasticBuffer, EngramBuffer, PPBuffer

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


CHECKS = [messages, gathers, entries, buckets]
