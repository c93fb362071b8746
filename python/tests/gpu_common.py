"""The common part of the checks on tensors of torch, on GPUs (`gpu_ranks.py`) or, without streams, in host memory."""

import contextlib
import os
import pathlib
import tempfile

import numpy as np
import torch
from oracle import Case
from pool import CONFIG

import tokenyard
from tokenyard.deep_ep import Buffer, ElasticBuffer

# 64 tokens, 32 experts; 30 % of the ids are masked.
CASE = Case(2, experts=32, topk=6, hidden=512, max_tokens=64, tokens=(64, 61), seed=5)
SMALL = Case(2, seed=2, hidden=256)
EMPTY = Case(2, seed=3, hidden=256, tokens=(0, 7))

# Ranks share a GPU, and take turns there, where a config names it.
SHARED = """
[world]
{world}
[kernels]
use = "cuda"
[kernels.cuda]
decode = "{decode}"
device = {device}
{keys}
[transport.scale_up]
use = "nvlink"
[transport.scale_up.nvlink]
device = {device}
"""
WAITS = "deadline_ms = 20000\nlate_ms = 60000"


class Skipped(str):
    """The reason why a check did not run, as its result."""


def is_gpu():
    return torch.cuda.is_available()


def shared(decode, device=0, world=WAITS, keys=""):
    """The text of a config of ranks that share a GPU, with more keys of the world and of the kernels."""
    return SHARED.format(decode=decode, device=device, world=world, keys=keys)


def config(decode="direct"):
    """For the package's own calls on GPUs."""
    if torch.cuda.device_count() == 1:
        return tokenyard.Config.parse(shared(decode), "one GPU")
    return tokenyard.Config.built_in("nvlink", deadline_ms=20_000, decode=decode)


def share_one_gpu():
    """Lets the drop-in of this process, and of those that it starts, share the machine's only GPU."""
    path = pathlib.Path(tempfile.gettempdir()) / f"tokenyard-one-gpu-{os.getpid()}.toml"
    path.write_text(shared("low_latency"))
    os.environ["TOKENYARD_CONFIG"] = str(path)


def device_of(world):
    """The GPU of a rank; where there are more ranks, some share one."""
    if not is_gpu():
        return torch.device("cpu")
    return torch.device("cuda", world.rank % torch.cuda.device_count())


def prepare(world):
    """Selects the device; without GPUs the CPU backend, and the code for GPUs over it."""
    if is_gpu():
        torch.cuda.set_device(device_of(world))
        return
    torch.set_num_threads(1)
    path = pathlib.Path(tempfile.gettempdir()) / f"tokenyard-gpu-code-{os.getpid()}.toml"
    path.write_text(CONFIG.format(arena_mib=64))
    os.environ["TOKENYARD_CONFIG"] = str(path)


def on_device(buffer):
    buffer._pool.on_device = True
    return buffer


def v1(world, **options):
    prepare(world)
    return on_device(Buffer(world, explicitly_destroy=True, **options))


def v2(world, case, **options):
    prepare(world)
    return on_device(
        ElasticBuffer(
            world, num_max_tokens_per_rank=case.max_tokens, explicitly_destroy=True, **options
        )
    )


def inputs(world, case, dtype=torch.bfloat16):
    """x, ids and weights of this rank."""
    me, device = world.rank, device_of(world)
    x, idx, weights = (torch.from_numpy(a[me]).to(device) for a in (case.x, case.idx, case.weights))
    return x.to(dtype), idx, weights


def rows_of(world, case, sources, dtype=torch.bfloat16):
    """The rows of (source rank, token) pairs."""
    return torch.from_numpy(case.rows(sources)).to(device_of(world)).to(dtype)


def flat_of(world, case):
    """Ids and weights of the flat rows."""
    ids, weights = case.flat(world.rank)
    device = device_of(world)
    return torch.from_numpy(ids).to(device).long(), torch.from_numpy(weights).to(device)


def layout_of(buffer, idx, experts):
    per_rank, per_domain, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, experts)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_domain,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": is_in,
    }


def same(found, expected):
    """Equal bit for bit."""
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if found.numel():
        found, expected = (t.contiguous().view(torch.uint8) for t in (found, expected))
    assert torch.equal(found, expected), "values differ"


def difference(found, expected):
    """DeepEP's measure."""
    found, expected = found.double() + 1, expected.double() + 1
    total = (found * found + expected * expected).sum()
    return float(1 - 2 * (found * expected).sum() / total) if found.numel() else 0.0


@contextlib.contextmanager
def output_mode(mode):
    os.environ["TOKENYARD_OUTPUT"] = mode
    try:
        yield
    finally:
        del os.environ["TOKENYARD_OUTPUT"]


def times(case, me):
    """How many ranks each token goes to: identical experts on each make the sum a multiple."""
    return np.array([len(case.ranks_of(me, token)) for token in range(case.tokens[me])])


def raised(call):
    """The error of tokenyard that a call raises."""
    try:
        call()
    except tokenyard.Error as error:
        return error
    raise AssertionError("the call was not refused")


def synchronize():
    if is_gpu():
        torch.cuda.synchronize()
