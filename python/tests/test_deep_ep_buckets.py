"""The drop-in's buffers of DeepEP 2.5 beside `EPBuffer`: messages, entries, buckets, and `deep_ep.comm`."""

import contextlib
import inspect
import io
import pathlib

import numpy as np
import pytest
import torch
from test_deep_ep_normal import buffer_of
from test_deep_ep_operations import MIB, TYPES, drawn, equal
from test_deep_ep_refusals import raises

import tokenyard.deep_ep
from tokenyard import errors
from tokenyard.deep_ep import (
    BucketBuffer,
    BucketSession,
    BufferAllocator,
    BufferBase,
    ElasticBuffer,
    EngramBuffer,
    EPBuffer,
    PPBuffer,
    comm,
)


def config_of(world):
    buffer_of(world).destroy()


def messages(world):
    config_of(world)
    me, ranks = world.rank, world.ranks
    raises(world, "num_max_inflight_tensors: found 0", PPBuffer, world, 64, 0 if me else 2)
    buffer = PPBuffer(world, 4096, 2, explicitly_destroy=True)
    assert isinstance(buffer, BufferBase)
    about = (buffer.rank_idx, buffer.num_ranks, buffer.storage, buffer.runtime is buffer)
    assert about == (me, ranks, None, True)
    for seed, dtype in enumerate(TYPES):
        for step in (1, ranks - 1):
            sent = drawn(dtype, (4, 6), seed, me)
            buffer.send(sent, (me + step) % ranks, num_sms=None)
            found = torch.zeros(4, 6).to(dtype)
            buffer.recv(found, (me - step) % ranks)
            equal(found, drawn(dtype, (4, 6), seed, (me - step) % ranks))
    if me == 0:
        with pytest.raises(errors.InvalidInputError, match="to: found -1"):
            buffer.send(found, -1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        buffer.print_memory_usage()
    assert "0 communicators and 1 operations" in printed.getvalue()
    comm.barrier(buffer)
    buffer.destroy()
    assert buffer.main_context is None


@pytest.mark.parametrize("count", [2, 4])
def test_a_pipeline_passes_messages(ranks, count):
    ranks(count, messages)


def entries(world, dtype, layers):
    config_of(world)
    me, ranks = world.rank, world.ranks
    counts = [5 + (7 * layer) % 4 for layer in range(layers)]
    hidden, tokens, each = 32, 4, 3
    is_fp8 = dtype == torch.float8_e4m3fn
    packs = 2 if is_fp8 else 0
    sizes = EngramBuffer.get_storage_size_hint(world, counts, hidden, tokens, each, dtype, packs)
    config = EngramBuffer.get_theoretical_config(world, layers, tokens, each)
    buffer = EngramBuffer(world, *sizes, True, *config, explicitly_destroy=True)
    assert (buffer.num_gpu_bytes, buffer.num_rdma_storage_bytes) == sizes
    with pytest.raises(errors.InvalidInputError, match=r"expected EngramBuffer\.set_config before"):
        buffer.fetch(torch.zeros((1, 1, 1), dtype=torch.int32))
    buffer.set_config(counts, hidden, tokens, each, dtype, packs)
    of = [[drawn(dtype, (n, hidden), k, r) for r in range(ranks)] for k, n in enumerate(counts)]
    whole = [torch.cat([one.view(torch.uint8) for one in layer]) for layer in of]
    sfs = None
    if is_fp8:
        sfs = [drawn(torch.int32, (ranks * n, packs), k) for k, n in enumerate(counts)]
    buffer.write([layer[me] for layer in of], sfs)
    drawer = np.random.default_rng((me, layers))
    for order in (1, -1):
        ids = np.stack([drawer.integers(0, ranks * n, (tokens - 1, each)) for n in counts])
        hooks = buffer.fetch(torch.from_numpy(ids).int(), 2, is_fp8 and order == 1)
        for layer in range(layers)[::order]:
            found = hooks[layer]()
            data, scales = found if is_fp8 else (found, None)
            expected = whole[layer][ids[layer].reshape(-1)].view(dtype)
            equal(data, expected.view(tokens - 1, each * hidden))
            if is_fp8:
                expected = sfs[layer][ids[layer].reshape(-1)].view(tokens - 1, each * packs)
                equal(scales, expected)
                assert scales.stride() == ((1, 4) if order == 1 else (each * packs, 1))
    # Rows of ids that name no entry stay as they were.
    before = hooks[0]()
    before = (before[0] if is_fp8 else before).view(torch.uint8).clone()
    some = torch.zeros((layers, 1, each), dtype=torch.int32)
    some[:, 0, 0], some[:, 0, 2] = -1, ranks * max(counts)
    found = buffer.fetch(some)[0]()
    data = (found[0] if is_fp8 else found).view(torch.uint8)
    width = hidden * dtype.itemsize
    assert torch.equal(data[0, :width], before[0, :width])
    assert torch.equal(data[0, width : 2 * width], whole[0][0])
    assert torch.equal(data[0, 2 * width :], before[0, 2 * width : 3 * width])
    found = buffer.fetch(some.numpy())[0]()
    assert isinstance(found[0] if is_fp8 else found, np.ndarray)
    buffer.barrier()
    buffer.destroy()


@pytest.mark.parametrize(
    ("count", "dtype", "layers"),
    [
        (2, torch.bfloat16, 1),
        (4, torch.bfloat16, 3),
        (4, torch.float8_e4m3fn, 3),
        # More than may be sent at once.
        (2, torch.float8_e4m3fn, 40),
    ],
)
def test_layers_of_entries_come_by_hooks_in_any_order(ranks, count, dtype, layers):
    ranks(count, entries, dtype, layers)


def wrong_entries(world):
    config_of(world)
    me = world.rank
    with pytest.raises(TypeError, match="not both"):
        EngramBuffer(world, 64, 64, True, 1, 1024, num_rdma_storage_size=64)
    buffer = EngramBuffer(
        world,
        64,
        num_rdma_storage_size=64,
        use_cpu_rdma_storage=False,
        num_allocated_qps=1,
        qp_depth=1024,
        explicitly_destroy=True,
    )
    assert buffer.num_rdma_storage_bytes == 64
    good = ([4, 5], 8, 2, 2)
    for says, bad in {
        "num_entries_per_layer: found int; expected a list": (4, 8, 2, 2),
        "num_entries_per_layer: found 0 layers; expected 1 to 128": ([], 8, 2, 2),
        "hidden: found 0": ([4, 5], 0, 2, 2),
        "num_max_tokens: found None": ([4, 5], 8, None, 2),
        "dtype: found torch.float32": (*good, torch.float32),
        "num_sf_packs: found 1; expected 0 for bfloat16": (*good, torch.bfloat16, 1),
        "num_sf_packs: found 0; expected at least 1 for": (*good, torch.float8_e4m3fn),
    }.items():
        raises(world, says, buffer.set_config, *(bad if me == 1 else good))
    buffer.set_config(*good)
    with pytest.raises(errors.InvalidInputError, match="expected a write on all ranks before"):
        buffer.fetch(torch.zeros((2, 1, 2), dtype=torch.int32))
    layers = [torch.full((n, 8), float(me), dtype=torch.bfloat16) for n in (4, 5)]
    for says, bad in {
        "storages: found Tensor; expected a list of 2": (layers[0],),
        "storages: found 1 tensors; expected a list of 2": (layers[:1],),
        "storages[1]: found shape [4, 8]; expected [5, 8]": ([layers[0]] * 2,),
        "storages[0]: found type float32; expected bfloat16": ([one.float() for one in layers],),
        "sfs: found some; expected None for bfloat16": (layers, layers),
    }.items():
        raises(world, says, buffer.write, *(bad if me == 1 else (layers,)))
    buffer.write(layers)
    for bad in (torch.zeros(2, 3, 2), torch.zeros(1, 1, 2), torch.zeros(2, 2)):
        with pytest.raises(errors.InvalidInputError, match=r"expected \[2, at most 2, 2\]"):
            buffer.fetch(bad.int())
    with pytest.raises(errors.InvalidInputError, match="indices: found type int16"):
        buffer.fetch(torch.zeros((2, 1, 2), dtype=torch.int16))
    hooks = buffer.fetch(torch.tensor([[[0, 4]], [[0, 5]]]).int())
    assert [hook()[0, ::8].tolist() for hook in hooks] == [[0.0, 1.0]] * 2
    buffer.destroy()


def test_wrong_layers_are_refused_on_all_ranks(ranks):
    ranks(2, wrong_entries)


def buckets(world):
    config_of(world)
    me, ranks = world.rank, world.ranks
    plan = BufferAllocator()
    shard = plan.allocate((ranks, 3, 5), torch.bfloat16)
    grads = plan.allocate((ranks * 8,), torch.float32)
    odd = plan.allocate((7,), torch.float32)
    assert (shard.device.type, plan.num_bytes) == ("meta", 6 * MIB)
    buffer = BucketBuffer(world, plan, explicitly_destroy=True)
    assert (buffer.num_bytes, buffer.groups, len(buffer.contexts)) == (6 * MIB, [world], 1)
    assert [one.data_ptr() - buffer.storage.data_ptr() for one in (shard, grads, odd)] == [
        0,
        2 * MIB,
        4 * MIB,
    ]
    assert (shard.shape, shard.dtype) == ((ranks, 3, 5), torch.bfloat16)
    # In place, of this rank's part.
    every = [drawn(torch.bfloat16, (3, 5), 1, rank) for rank in range(ranks)]
    shard[me] = every[me]
    event = buffer.all_gather(shard[me])
    assert event.num_sms == 0
    whole = event.wait()
    equal(whole, torch.stack(every).view(-1))
    equal(shard, torch.stack(every))
    # From anywhere, in a list, of any types, and later than another call.
    parts = [drawn(dtype, (2, 3), 2, me) for dtype in TYPES]
    rooms = [torch.zeros(ranks * 6).to(dtype) for dtype in TYPES]
    first, second = buffer.all_gather(parts, rooms), buffer.all_gather(parts[0], rooms[0].clone())
    third = buffer.all_gather(parts[:2], [rooms[0].clone(), rooms[1].clone()])
    second = second.wait()
    for found, dtype, room in zip(first.wait(), TYPES, rooms, strict=True):
        expected = torch.cat([drawn(dtype, (6,), 2, rank) for rank in range(ranks)])
        equal(found, expected)
        equal(room, expected)
    equal(second, rooms[0])
    assert [one.dtype for one in third.wait()] == list(TYPES[:2])
    # Sums of integers are exact, in any order.
    each = [drawn(torch.float32, (ranks * 8,), 3, rank) for rank in range(ranks)]
    total = sum(each)
    grads.copy_(each[me])
    part = buffer.reduce_scatter(grads, scale=0.5).wait()
    equal(part, total[8 * me : 8 * me + 8] / 2)
    assert part.data_ptr() == grads.data_ptr() + 32 * me
    grads.copy_(each[me])
    odd.copy_(each[me][:7])
    found = buffer.all_reduce([grads, odd], scale=2.0).wait()
    equal(found[0], total * 2)
    equal(odd, total[:7] * 2)
    assert [one.data_ptr() for one in found] == [grads.data_ptr(), odd.data_ptr()]
    grads.copy_(each[me])
    rounded = buffer.reduce_scatter([grads], comm_precision="bf16").wait()[0]
    torch.testing.assert_close(rounded, total[8 * me : 8 * me + 8], rtol=0.02, atol=0)
    buffer.barrier()
    comm.barrier(buffer, context_idx=0)
    before = shard.clone()
    buffer.destroy()
    equal(shard, before)
    with pytest.raises(errors.InvalidInputError, match="it was destroyed"):
        buffer.all_reduce(grads)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_buckets_gather_and_sum(ranks, count):
    ranks(count, buckets)


def sessions(world):
    config_of(world)
    me, ranks = world.rank, world.ranks
    buffer = BucketBuffer(world, 4096, explicitly_destroy=True)
    every = [drawn(torch.float32, (ranks, 8), rank) for rank in range(ranks)]
    x, total = every[me].clone(), sum(every)
    for _ in range(2):
        with buffer.session() as session:
            assert isinstance(session, BucketSession)
            # Tensors from anywhere stay, and results lie in the storage.
            found = buffer.all_reduce(x).wait()
            equal(found, total.view(-1))
            equal(buffer.reduce_scatter(x).wait(), total[me])
            whole = buffer.all_gather(x[me]).wait()
            equal(whole, torch.cat([one[rank] for rank, one in enumerate(every)]))
            equal(x, every[me])
            room = torch.zeros(ranks * ranks, 8)
            assert buffer.all_gather(x, room).wait() is room
            equal(room, torch.cat(every))
            begin, end = buffer.storage.data_ptr(), buffer.storage.data_ptr() + 4096
            assert all(begin <= one.data_ptr() < end for one in (found, whole))
            one, two = session.allocate([(4,), (2, 3)], torch.bfloat16)
            assert (one.shape, two.shape) == ((4,), (2, 3))
            assert (one.data_ptr() - begin) % 64 == (two.data_ptr() - begin) % 64 == 0
            # A tensor of the storage is summed in place.
            made = session.allocate((8,))
            made.fill_(me + 1)
            assert buffer.all_reduce(made).wait().data_ptr() == made.data_ptr()
            assert made.tolist() == [ranks * (ranks + 1) / 2] * 8
            with pytest.raises(RuntimeError, match="session out of storage: found"):
                session.allocate((2048,))
            inner = buffer.session()
            with pytest.raises(errors.InvalidInputError, match="found one that is open"):
                inner.__enter__()
    # In place without a session.
    buffer.all_reduce(x).wait()
    equal(x, total)
    buffer.destroy()


@pytest.mark.parametrize("count", [2, 4])
def test_sessions_take_tensors_from_anywhere(ranks, count):
    ranks(count, sessions)


def half_of(world):
    """The world of this rank's half, by the gathers of the whole one."""
    me, half = world.rank, world.ranks // 2

    def exchange(mine):
        every = world.all_gather("half", mine)
        return every[me // half * half :][:half]

    return tokenyard.World(me % half, half, exchange=exchange, local_rank=me)


def groups(world):
    config_of(world)
    half, me = half_of(world), world.rank
    buffer = BucketBuffer([world, half], 4096, explicitly_destroy=True)
    x = torch.full((4,), float(me + 1))
    with pytest.raises(errors.InvalidInputError, match="group: found None; expected one of the 2"):
        buffer.all_reduce(x)
    with pytest.raises(errors.InvalidInputError, match="a group that it does not have"):
        buffer.all_reduce(x, group=5)
    found = buffer.all_reduce(x.clone(), group=half).wait()
    assert found.tolist() == [3.0 if me < 2 else 7.0] * 4
    assert buffer.all_reduce(x.clone(), group=world).wait().tolist() == [10.0] * 4
    gathered = buffer.all_gather(x[:1], torch.zeros(2), group=half).wait()
    assert gathered.tolist() == ([1, 2] if me < 2 else [3, 4])
    with buffer.session():
        buffer.all_reduce(x, group=half).wait()
        with pytest.raises(errors.InvalidInputError, match="found group 0 of the buffer"):
            buffer.all_reduce(x, group=world)
    assert comm.get_physical_domain_size(buffer) == (1, 4)
    assert comm.get_physical_domain_size(buffer.contexts[1]) == (1, 2)
    comm.barrier(buffer, context_idx=1)
    buffer.destroy()


def test_a_bucket_has_several_groups(ranks):
    ranks(4, groups)


def wrong_buckets(world):
    config_of(world)
    me = world.rank
    name = "allocation_plan_or_num_bytes: found"
    raises(world, f"{name} 0; expected", BucketBuffer, world, 0 if me else 64)
    raises(world, f"{name} 'all'; expected", BucketBuffer, world, "all" if me else 64)
    plan = BufferAllocator()
    plan.allocate((3,), torch.uint8)
    with pytest.raises(errors.InvalidInputError, match="found 5 bytes; expected contiguous uint8"):
        plan.materialize(torch.zeros(5, dtype=torch.uint8))
    buffer = BucketBuffer(world, plan, explicitly_destroy=True)
    with pytest.raises(errors.InvalidInputError, match="found a plan that a buffer has used"):
        plan.allocate((3,), torch.uint8)
    raises(world, f"{name} a plan that a buffer has", BucketBuffer, world, plan if me else 64)
    x = torch.full((4,), float(me))

    def waited(call, *arguments, **options):
        return call(*arguments, **options).wait()

    for says, bad in {
        "srcs[0]: found list; expected a tensor": ([[1, 2]],),
        "srcs[0]: found strides [2]; expected a contiguous": (torch.zeros(8)[::2],),
        "srcs[0]: found type torch.int32; expected float32 or": (x.int(),),
        "srcs: found 65 tensors; expected at most 64": ([x] * 65,),
    }.items():
        for call in (buffer.all_reduce, buffer.reduce_scatter):
            raises(world, says, waited, call, *(bad if me == 1 else (x.clone(),)))
    precision = {"comm_precision": "fp8"} if me == 1 else {}
    says = "comm_precision: found 'fp8'"
    raises(world, says, waited, buffer.reduce_scatter, x.clone(), **precision)
    for says, bad in {
        "srcs[0]: found a tensor that is no part": (x,),
        "dsts: found 2 tensors; expected 1, as of srcs": (x, [x, x]),
        "dsts[0]: found 28 bytes; expected 32, 2 times those of srcs[0]": (x, torch.zeros(7)),
    }.items():
        good = (x, torch.zeros(8))
        raises(world, says, waited, buffer.all_gather, *(bad if me == 1 else good))
    assert buffer.all_gather(x, torch.zeros(8)).wait().tolist() == [0.0] * 4 + [1.0] * 4
    with pytest.raises(NotImplementedError, match="expected one of all_gather"):
        buffer.get_theoretical_num_sms("broadcast")
    assert buffer.get_theoretical_num_sms("all_gather") == 0
    buffer.destroy()


def test_wrong_calls_of_a_bucket_are_refused_on_all_ranks(ranks):
    ranks(2, wrong_buckets)


def examples(world, blocks):
    """The examples of the page, with the names that they leave to the reader."""
    config_of(world)
    me, ranks = world.rank, world.ranks
    buffer = ElasticBuffer(world, explicitly_destroy=True)
    names = {"deep_ep": tokenyard.deep_ep, "torch": torch, "group": world, "buffer": buffer}
    names |= {"rank": me, "ranks": ranks, "x": torch.full((3,), me), "y": torch.zeros(3).long()}
    names |= {"entries": 4, "hidden": 8, "tokens": 2, "each": 3, "shard": torch.full((2, 2), me)}
    names |= {"mine": torch.full((4, 8), float(me), dtype=torch.bfloat16)}
    names |= {"indices": torch.tensor([[0, 4, 0], [4, 4, 0]], dtype=torch.int32)}
    exec(blocks[0], names)
    assert names["y"].tolist() == [(me - 1) % ranks] * 3
    assert names["whole"].tolist() == [[[rank] * 2] * 2 for rank in range(ranks)]
    assert names["data"][:, ::8].tolist() == [[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
    exec(blocks[1], names)
    assert names["mine"].shape == ((1 << 20) // ranks,)
    assert names["whole"].tolist() == [rank for rank in range(ranks) for _ in range(4)]
    for one in ("engram", "bucket"):
        del names[one]
    buffer.destroy()


def test_the_examples_of_the_documentation_run(ranks):
    page = (pathlib.Path(__file__).parents[2] / "docs/deep_ep-beside.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    ranks(2, examples, blocks)


def described(world):
    config_of(world)
    buffer = EPBuffer(world, explicitly_destroy=True)
    comm.barrier(buffer, False, with_cpu_sync=True)
    assert comm.get_comm_stream(buffer) is None
    assert comm.get_physical_domain_size(buffer) == comm.get_logical_domain_size(buffer) == (1, 2)
    assert comm.get_physical_domain_size(world) == (1, 2)
    with pytest.raises(NotImplementedError, match=r"deep_ep\.comm: found get_nccl_comm_handle"):
        comm.get_nccl_comm_handle(world)
    comm.destroy_all_managed_nccl_comm()
    buffer.destroy()


def test_the_module_of_communication_serves_all_buffers(ranks):
    ranks(2, described)


def test_hints_are_those_of_2_5():
    class Group:
        ranks = 4

    hint = EngramBuffer.get_storage_size_hint
    found = hint(Group, [524288, 524309], 256, 512, 24)
    assert found == (2 * 512 * 24 * 512, 514 * MIB)
    theory = EngramBuffer.get_theoretical_config
    assert theory(Group, 2, 512, 24) == (8, 1024, False)
    assert theory(Group, 2, 4096, 24) == (8, 8192, False)
    assert theory(Group, 100, 8192, 24) == (150, 32768, True)


def test_the_calls_have_the_arguments_of_2_5():
    engram = "group num_gpu_bytes num_rdma_storage_bytes use_cpu_rdma_storage num_allocated_qps qp_depth "
    engram += "restrict_rd_atomic allow_hybrid_mode sl_idx num_gpu_timeout_secs explicitly_destroy "
    engram += "num_rdma_storage_size"
    layers = "num_entries_per_layer hidden num_max_tokens num_entries_per_token dtype num_sf_packs"
    ends = "sl_idx num_gpu_timeout_secs explicitly_destroy"
    for call, names in {
        PPBuffer.__init__: f"self group num_max_tensor_bytes num_max_inflight_tensors {ends}",
        PPBuffer.send: "self x dst_rank_idx num_sms",
        PPBuffer.recv: "self x src_rank_idx num_sms",
        EngramBuffer.__init__: f"self {engram}",
        EngramBuffer.set_config: f"self {layers}",
        EngramBuffer.get_storage_size_hint: f"group {layers}",
        EngramBuffer.write: "self storages sfs",
        EngramBuffer.fetch: "self indices num_qps use_tma_aligned_col_major_sf",
        BucketBuffer.__init__: f"self group allocation_plan_or_num_bytes {ends}",
        BucketBuffer.all_gather: "self srcs dsts group num_sms",
        BucketBuffer.all_reduce: "self srcs scale group num_sms",
        BucketBuffer.reduce_scatter: "self srcs comm_precision scale group num_sms",
        BucketBuffer.barrier: "self wait_comm_stream with_cpu_sync sequential group",
        BucketSession.allocate: "self shapes dtype group",
        comm.barrier: "buffer wait_comm_stream with_cpu_sync sequential context_idx",
    }.items():
        assert list(inspect.signature(call).parameters) == names.split(), call
