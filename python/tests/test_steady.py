"""A loop of calls needs no more memory after 10,000 steps than after the first ones; nor does one of buffers."""

import ctypes
import gc
import os
import pathlib
import subprocess
import time

import numpy as np
import pytest
from pool import CONFIG, Pool, config
from test_deep_ep_normal import buffer_of

import tokenyard
from tokenyard.deep_ep import ElasticBuffer

STEPS = 10_000
# Less than a byte a step: the least that malloc gives is 24. Its own caches come to some hundreds.
MOST = 4096


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc: what all allocations of a process come to."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            [
                "arena",
                "ordblks",
                "smblks",
                "hblks",
                "hblkhd",
                "usmblks",
                "fsmblks",
                "uordblks",
                "fordblks",
                "keepcost",
            ]
        )
    ]


def allocated():
    """Bytes that are allocated, by Python, numpy and the package, and what the kernel says of the process."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return found.uordblks + found.hblkhd, pages * 4096


def loop(world):
    ids = np.array([[0, 1], [1, -1]], np.int64)
    weights = np.ones((2, 2), np.float32)
    x = np.arange(2 * 8, dtype=np.float32).reshape(2, 8)
    # Its own memory: to note a figure takes none.
    found = np.zeros((3, 2), np.int64)
    with tokenyard.Communicator(world, config(), experts=2, topk=2, hidden=8, max_tokens=2) as comm:
        for step in range(STEPS):
            if step in (0, STEPS // 2):
                found[step * 2 // STEPS] = allocated()
            received, handle = comm.dispatch(x, ids, weights)
            pending = comm.combine_send(handle, received.x)
            del handle
            out, _ = pending.recv()
        assert out.shape == (2, 8)
        found[2] = allocated()
    return found.tolist()


# As `get_dispatch_layout` returns them.
LAYOUT = (
    "num_tokens_per_rank",
    "num_tokens_per_rdma_rank",
    "num_tokens_per_expert",
    "is_token_in_rank",
)
IDS = np.array([[0, 1], [1, -1]], np.int64)
WEIGHTS = np.ones((2, 2), np.float32)
X = np.arange(2 * 128, dtype=np.float32).reshape(2, 128)


def layout_of(buffer):
    return dict(zip(LAYOUT, buffer.get_dispatch_layout(IDS, 2), strict=False))


def normal_step(buffer, layout):
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(
        X, topk_idx=IDS, topk_weights=WEIGHTS, **layout
    )
    buffer.combine(recv_x, handle, recv_weights)


def low_latency_step(buffer):
    packed, _, handle, _, hook = buffer.low_latency_dispatch(
        X, IDS, 2, 2, use_fp8=False, return_recv_hook=True
    )
    hook()
    buffer.low_latency_combine(packed, IDS, WEIGHTS, handle)


def deep_ep_loop(world):
    found = np.zeros((3, 2), np.int64)
    buffer = buffer_of(world)
    layout = layout_of(buffer)
    for step in range(STEPS):
        if step in (0, STEPS // 2):
            found[step * 2 // STEPS] = allocated()
        normal_step(buffer, layout)
        low_latency_step(buffer)
    found[2] = allocated()
    buffer.destroy()
    return found.tolist()


@pytest.mark.parametrize("loop", [loop, deep_ep_loop], ids=["tokenyard", "deep_ep"])
def test_five_thousand_more_steps_take_no_more_memory(ranks, loop):
    for rank, (_, half, all_steps) in enumerate(ranks(2, loop)):
        assert all_steps[0] - half[0] < MOST, f"rank {rank}: {half} bytes, then {all_steps}"
        # The kernel counts pages of the arena, too, when they are first used.
        assert all_steps[1] - half[1] < 8 << 20, f"rank {rank}: {half} bytes, then {all_steps}"


def openings(world, plugin):
    found, its = [], config()
    if plugin:
        text = CONFIG.format(arena_mib=4).replace('use = "shm"', 'use = "example_c"')
        text += f'[plugins]\npaths = ["{plugin}"]\n'
        its = tokenyard.Config.parse(text, "plugin.toml")
    for number in range(50):
        if number in (10, 49):
            found.append((allocated()[0], len(os.listdir("/proc/self/fd"))))
        tokenyard.Communicator(world, its, experts=2, topk=2, hidden=8, max_tokens=2).close()
    return found


def plugin_of(folder):
    """A transport in C, which is loaded from its file."""
    root = pathlib.Path(__file__).parents[2]
    library = folder / "libtokenyard_example_c.so"
    source, include = root / "plugins/example-c/shm.c", root / "abi/include"
    command = ["cc", "-std=c11", "-O2", "-fPIC", "-shared", "-I", include, source, "-o", library]
    subprocess.run(command, check=True)
    return str(library)


@pytest.fixture
def bare_ranks(monkeypatch):
    """As `ranks`, two whose threads store nothing of what they free. glibc counts that as in use, and on a busy
    machine, where threads end later, it is more."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    pool = Pool(2)
    yield pool.run
    pool.close()


@pytest.mark.parametrize("has_plugin", [False, True], ids=["built in", "with a plugin"])
def test_forty_more_openings_take_no_more_memory_and_open_files(bare_ranks, tmp_path, has_plugin):
    plugin = plugin_of(tmp_path) if has_plugin else None
    for rank, (early, late) in enumerate(bare_ranks(2, openings, plugin)):
        assert late[0] - early[0] < 4 * MOST, f"rank {rank}: {early[0]} bytes, then {late[0]}"
        assert late[1] == early[1], f"rank {rank}: {early[1]} open files, then {late[1]}"


def held():
    """Bytes that are allocated, resident bytes, and counts of open files, threads and mappings. Names in `/dev/shm` are
    for `killed_jobs.py`, which has one of its own: other programs make names in this one."""
    with open("/proc/self/maps") as file:
        mappings = len(file.readlines())
    files, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return *allocated(), files, threads, mappings


def buffers(world):
    """V1 normal, V1 low latency and V2 in turn. Each opens a communicator. Returns what is held early and late, and
    seconds of the CPU for each buffer."""
    found, seconds = [], np.zeros(200)
    for number in range(200):
        start = time.process_time()
        if number % 3 == 2:
            buffer = ElasticBuffer(world, num_max_tokens_per_rank=2, explicitly_destroy=True)
            rows, _, _, handle, _ = buffer.dispatch(X, topk_idx=IDS, num_experts=2)
            buffer.combine(rows, handle)
            del rows, handle
        else:
            buffer = buffer_of(world, low_latency_mode=number % 3 == 1)
            if buffer.low_latency_mode:
                low_latency_step(buffer)
            else:
                normal_step(buffer, layout_of(buffer))
        buffer.destroy()
        del buffer
        seconds[number] = time.process_time() - start
        if number in (19, 199):
            world.barrier(f"{number} buffers are destroyed")
            found.append(held())
    return *found, seconds.tolist()


def least(seconds):
    """The least of each kind, together. A busy machine makes the others longer, because ranks look for each other."""
    return sum(min(seconds[kind::3]) for kind in range(3))


@pytest.mark.usefixtures("reports")
def test_180_more_buffers_take_no_more_memory_files_threads_and_time(bare_ranks):
    for rank, (early, late, seconds) in enumerate(bare_ranks(2, buffers)):
        text = f"rank {rank}: {early}, then {late}"
        first, last = least(seconds[:60]), least(seconds[-60:])
        assert last < 2 * first, f"rank {rank}: {first:.4f} s of the CPU, then {last:.4f} s"
        # Some 10 KiB come once; of a leak, each buffer would leave its part.
        assert late[0] - early[0] < 8 * MOST, text
        assert late[1] - early[1] < 16 << 20, text
        # Mappings of malloc's own come and go. One that stayed of each buffer would be 180.
        assert late[4] - early[4] < 32, text
        assert late[2] <= early[2], text
        assert late[3] <= early[3], text
