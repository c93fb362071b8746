"""Callers of DeepEP use this beside its buffers: seeds, rates of links, refusals, and who owns the name `deep_ep`."""

import base64
import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import pathlib
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from oracle import Case
from pool import free_port
from test_deep_ep_normal import buffer_of, layout_of, same

from tokenyard import errors
from tokenyard.deep_ep import ElasticBuffer, _missing
from tokenyard.deep_ep._arrays import BF16, from_numpy, to_numpy
from tokenyard.deep_ep.utils import envs, gate, math, refs

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: the drop-in did not run",
)
OURS = pathlib.Path(__file__).parents[1] / "deep_ep/deep_ep/__init__.py"


@needs_torch
def test_ranks_have_one_global_seed_and_draw_other_numbers(ranks):
    import torch_ranks

    found = ranks(2, torch_ranks.seeds, free_port())
    assert [one[:2] for one in found] == [(7, 7), (7, 8)]
    assert found[0][2:] != found[1][2:]


@needs_torch
def test_a_group_of_torch_has_domains(ranks):
    import torch_ranks

    found = ranks(4, torch_ranks.domain_sizes, free_port())
    assert found == [((2, 2), (2, 2), (1, 4))] * 4


def test_a_seed_without_a_group_is_its_own():
    envs.init_seed(9)
    assert (envs.get_global_seed(), envs.get_local_seed()) == (9, 9)


def rate(folder, path, text):
    file = folder / path
    file.parent.mkdir(parents=True)
    file.write_text(text)


def test_the_rate_of_a_nic_is_never_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "_SYSTEM", tmp_path)
    assert envs.get_rdma_gbs() == 1.0
    rate(tmp_path, "net/lo/speed", "-1\n")
    rate(tmp_path, "net/eth1/speed", "25000\n")
    assert envs.get_rdma_gbs() == 3.125
    rate(tmp_path, "infiniband/mlx5_1/ports/1/rate", "200 Gb/sec (4X HDR)\n")
    assert envs.get_rdma_gbs() == 25.0
    rate(tmp_path, "infiniband/mlx5_0/ports/1/rate", "100 Gb/sec (4X EDR)\n")
    assert (envs.get_rdma_gbs(), envs.get_rdma_gbs("mlx5_1")) == (12.5, 25.0)


LINKS = """GPU 0: NVIDIA H200 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
"""


def test_the_rate_of_nvlink_is_the_sum_of_the_links_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert envs.get_nvlink_gbs() == 0
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\nprint({LINKS!r})\n")
    tool.chmod(0o755)
    assert envs.get_nvlink_gbs() == pytest.approx(0.9 * 2 * 26.562)
    assert envs.get_nvlink_gbs(1) == pytest.approx(2 * 26.562)


@needs_torch
@pytest.mark.parametrize(
    ("gpus", "has_nccl", "backend"),
    [
        # Each process sees its own GPU alone, as 0.
        ([("a", 0), ("b", 0)], True, "cpu:gloo,cuda:nccl"),
        ([("a", 0), ("b", 1)], True, "cpu:gloo,cuda:nccl"),
        ([("a", 0), ("a", 0)], True, "gloo"),
        # Without a name that holds in all processes, they are taken to see the same ones.
        ([(None, 0), (None, 1)], True, "cpu:gloo,cuda:nccl"),
        ([(None, 0), (None, 0)], True, "gloo"),
        ([("a", 0), ("b", 1)], False, "gloo"),
        ([("a", 0), None], True, "gloo"),
        ([None], True, "gloo"),
    ],
)
def test_nccl_joins_ranks_that_have_a_gpu_each_and_gloo_others(
    monkeypatch, gpus, has_nccl, backend
):
    cuda, store = envs.torch.cuda, envs.torch.distributed.HashStore()
    monkeypatch.setattr(envs.torch.distributed, "is_nccl_available", lambda: has_nccl)
    for rank in reversed(range(len(gpus))):
        uuid, index = gpus[rank] or ("", 0)
        found = types.SimpleNamespace(**{"uuid": uuid} if uuid else {})
        monkeypatch.setattr(cuda, "is_available", lambda rank=rank: gpus[rank] is not None)
        monkeypatch.setattr(cuda, "current_device", lambda index=index: index)
        monkeypatch.setattr(cuda, "get_device_properties", lambda _, found=found: found)
        store.set(f"tokenyard/gpu/{rank}", envs._own_gpu())
    assert envs.backend_of(store, 0, len(gpus)) == backend


def test_a_check_of_nvlink_needs_neither_a_gpu_nor_a_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert envs.check_nvlink_connections(None) is None


def test_a_keyword_that_is_missing_is_a_type_error_with_its_name():
    for kind in (TypeError, NotImplementedError, errors.UnsupportedError):
        with pytest.raises(kind, match="low_latency_dispatch: found use_nvfp4"):
            _missing.refuse_missing("low_latency_dispatch", {"use_nvfp4": True}, ())


# All keywords that the constructors of frameworks and of UCCL are called with.
CONSTRUCTOR = {
    "num_nvl_bytes": 1 << 20,
    "num_rdma_bytes": 0,
    "low_latency_mode": True,
    "num_qps_per_rank": 12,
    "allow_nvlink_for_low_latency_mode": True,
    "allow_mnnvl": False,
    "enable_shrink": True,
    "use_fabric": True,
    "allow_nvlink_for_normal_mode": True,
    "is_intranode": None,
    "use_nvfp4": False,
}
ELASTIC = {
    "num_bytes": 2 << 20,
    "num_max_tokens_per_rank": 12,
    "hidden": 64,
    "num_topk": 3,
    "use_fp8_dispatch": False,
    "deterministic": True,
    "allow_hybrid_mode": False,
    "allow_multiple_reduction": True,
    "prefer_overlap_with_compute": False,
    "sl_idx": 0,
    "num_allocated_qps": 0,
    "num_cpu_timeout_secs": 300,
    "num_gpu_timeout_secs": 100,
    "lb_allocation_plan_or_num_bytes": 0,
}


def keywords_of_callers(world, case):
    me, off = world.rank, {"borrow_recv": False, "defer_epilogue": False, "non_blocking": False}
    buffer = buffer_of(world, **CONSTRUCTOR)
    options = {"topk_idx": case.idx[me], "topk_weights": case.weights[me], **off}
    recv_x, *_, handle, _ = buffer.dispatch(case.x[me], **layout_of(buffer, case), **options)
    combined, *_ = buffer.combine(recv_x, handle, **off)
    elastic = ElasticBuffer(world, explicitly_destroy=True, **ELASTIC)
    recv_x, _, _, handle, _ = elastic.dispatch(case.x[me], num_experts=case.experts, **options)
    same(elastic.combine(recv_x, handle, **off)[0], combined)
    for name in off:
        says = f"ElasticBuffer.dispatch: found {name}; expected a call without it"
        with pytest.raises(TypeError, match=says):
            elastic.dispatch(case.x[me], num_experts=case.experts, **options | {name: True})
    elastic.destroy()
    buffer.destroy()


def test_keywords_of_callers_that_change_nothing_are_taken_and_others_are_named(ranks):
    ranks(2, keywords_of_callers, Case(2, seed=2))


@needs_torch
@pytest.mark.parametrize("shape", [(5, 256), (3, 130), (0, 128)], ids=str)
def test_arrays_of_numpy_give_the_numbers_of_tensors(shape):
    import torch

    array = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    array[: len(array) // 2] *= 1000
    tensor = torch.from_numpy(array)
    (cast, scales), (as_array, array_scales) = map(math.per_token_cast_to_fp8, (tensor, array))
    assert np.array_equal(cast.view(torch.uint8).numpy(), as_array.view(np.uint8))
    assert np.array_equal(scales.numpy(), array_scales)
    back = math.per_token_cast_back(cast, scales)
    expected = math.per_token_cast_back(as_array, array_scales)
    assert np.array_equal(back.view(torch.uint8).numpy(), expected.view(np.uint8))
    packed = np.full((len(array), 1), 0x7F7F7F7F, np.int32)
    back = math.per_token_cast_back(cast, torch.from_numpy(packed))
    expected = math.per_token_cast_back(as_array, packed)
    assert np.array_equal(back.view(torch.uint8).numpy(), expected.view(np.uint8))
    assert math.hash_tensor(tensor) == math.hash_tensor(array)
    assert math.hash_tensor(cast) == math.hash_tensor(as_array)
    assert math.count_bytes(tensor, (cast,)) == math.count_bytes(array, (as_array,))
    if len(array):
        other = array + np.float32(0.01)
        found = math.calc_diff(tensor, torch.from_numpy(other))
        assert found == pytest.approx(math.calc_diff(array, other), abs=1e-12)


@needs_torch
def test_torch_takes_packed_scales_with_a_column_for_each_group():
    """DeepEP's low latency test views them so, with a quarter of the rows."""
    import torch

    rows, _ = math.per_token_cast_to_fp8(torch.arange(8.0 * 512).reshape(8, 512))
    packed = torch.arange(0x7A7B7C7D, 0x7A7B7C7D + 8, dtype=torch.int32)
    found = math.per_token_cast_back(rows, packed.reshape(2, 4))
    assert torch.equal(found, math.per_token_cast_back(rows, packed.reshape(8, 1)))


@needs_torch
@pytest.mark.parametrize("slice_of", [slice(1, 9), slice(2, 10), slice(3, 8), slice(1, 1)], ids=str)
def test_a_slice_of_torch_that_begins_inside_of_a_word_has_the_hash_of_its_copy(slice_of):
    array = np.arange(200, 212, dtype=np.uint8)
    found = math.hash_tensor(as_torch(array)[0][slice_of])
    assert found == math.hash_tensor(array[slice_of]) == math.hash_tensor(array[slice_of].copy())


def as_torch(*arrays):
    return [from_numpy(array) for array in arrays]


def bits(tensor):
    """The bytes of a tensor of torch or numpy: negative zeros, and numbers that are none, differ in them."""
    array = to_numpy("tensor", tensor)
    return array.dtype, array.shape, array.tobytes()


@needs_torch
def test_arrays_of_numpy_give_the_sums_of_tensors():
    random = np.random.default_rng(3)
    tokens, topk, hidden, experts = 40, 5, 24, 16
    y = random.normal(size=(tokens, topk, hidden)).astype(BF16)
    y[::3] = -0.0
    ids = random.integers(-1, experts, (tokens, topk))
    bias = [random.normal(size=(tokens, hidden)).astype(BF16) for _ in range(2)]
    numbers = as_torch(y, ids, *bias)
    for local, domain in ((False, False), (True, False), (False, True), (True, True)):
        found = refs.combine(*numbers[:2], 2, 4, experts, tuple(numbers[2:]), local, domain)
        expected = refs.combine(y, ids, 2, 4, experts, tuple(bias), local, domain)
        assert bits(found) == bits(expected)
    found, expected = (
        refs.ordered_accumulate(one[0], one[2]) for one in (numbers, (y, ids, *bias))
    )
    assert bits(found) == bits(expected)
    token = random.integers(0, 1 << 20, 30)
    found = refs.generate_pre_combine_data(*as_torch(token), 12, topk, hidden)
    assert bits(found) == bits(refs.generate_pre_combine_data(token, 12, topk, hidden))


@needs_torch
def test_arrays_of_numpy_give_the_arrivals_of_tensors():
    case = Case(4, seed=6, tokens=(5, 0, 12, 1))
    inputs = [
        [*math.per_token_cast_to_fp8(case.x[r]), case.idx[r], case.weights[r]] for r in range(4)
    ]
    for me in range(4):
        expected = refs.arrivals(inputs, me, case.max_tokens, case.experts)
        found = refs.arrivals([as_torch(*one) for one in inputs], me, case.max_tokens, case.experts)
        assert [*map(bits, found)] == [*map(bits, expected)]


@needs_torch
def test_arrays_of_numpy_give_the_groups_of_tensors():
    random = np.random.default_rng(5)
    ids, scores = random.integers(-1, 6, (30, 5)), random.random((30, 12), np.float32)
    groups = random.integers(0, 4, (30, 2))
    ids_of_torch, scores_of_torch, groups_of_torch = as_torch(ids.copy(), scores, groups)
    found = math.create_grouped_scores(scores_of_torch, groups_of_torch, 4)
    assert bits(found) == bits(math.create_grouped_scores(scores, groups, 4))
    for one in (ids, ids_of_torch):
        math.inplace_unique(one, 6)
    assert bits(ids_of_torch) == bits(ids)


@needs_torch
def test_no_function_of_utils_takes_a_tensor_of_torch_to_the_host(monkeypatch):
    import gpu_utils
    import torch.distributed as dist

    calls = gpu_utils.calls_of_utils("cpu")
    functions = [one for module in (math, refs, gate) for one in vars(module).values()]
    public = {
        one
        for one in functions
        if inspect.isfunction(one) and one.__module__.startswith(math.__package__ + ".")
        if not one.__name__.startswith("_")
    }
    assert public == set(calls)
    gpu_utils.refuse_the_host(monkeypatch.setattr)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for function, of_each in calls.items():
            for arguments in of_each:
                found = function(*arguments)
                parts = found if isinstance(found, tuple) else (found,)
                assert not any(isinstance(part, np.ndarray) for part in parts), function
    finally:
        dist.destroy_process_group()


def install(site, name, files):
    """A distribution in a folder of packages, as pip leaves it: its files overwrite those that are there."""
    lines = []
    for path, text in files.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        digest = hashlib.sha256(text.encode()).digest()
        hashed = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        lines.append(f"{path},sha256={hashed},{len(text)}\n")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(lines))


def run(site, *words, **environment):
    path = {**os.environ, "PYTHONPATH": str(site), **environment}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=path)


def test_it_says_whose_deep_ep_is_imported_and_what_was_overwritten(tmp_path):
    theirs = {"deep_ep/__init__.py": "x = 1\n", "deep_ep/buffer.py": "y = 2\n"}
    install(tmp_path, "tokenyard_deep_ep", {"deep_ep/__init__.py": OURS.read_text()})
    install(tmp_path, "sgl_deep_ep", theirs)
    ended = run(tmp_path, "-m", "tokenyard")
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout.split("\n\n")[-1]
    assert f"deep_ep: {tmp_path}/deep_ep/__init__.py, of sgl_deep_ep\n" in text
    assert "sgl_deep_ep 1.0: 2 files\n" in text
    assert "tokenyard_deep_ep 1.0: 1 files, overwritten or gone: deep_ep/__init__.py\n" in text
    assert "fix: uninstall all of these" in text


def test_it_says_so_too_where_ours_came_second(tmp_path):
    theirs = {"deep_ep/__init__.py": "x = 1\n", "deep_ep/buffer.py": "y = 2\n"}
    install(tmp_path, "sgl_deep_ep", theirs)
    install(tmp_path, "tokenyard_deep_ep", {"deep_ep/__init__.py": OURS.read_text()})
    ended = run(tmp_path, "-m", "tokenyard")
    assert ended.returncode == 0, ended.stderr
    assert "RuntimeWarning" not in ended.stderr, "nothing is imported here"
    text = ended.stdout.split("\n\n")[-1]
    assert f"deep_ep: {tmp_path}/deep_ep/__init__.py, of tokenyard_deep_ep\n" in text
    assert "sgl_deep_ep 1.0: 2 files, overwritten or gone: deep_ep/__init__.py\n" in text
    assert "tokenyard_deep_ep 1.0: 1 files\n" in text
    assert "fix: uninstall all of these" in text


def test_it_says_whose_native_module_an_import_takes(tmp_path):
    """A binary beside `deep_ep_cpp.py` wins an import of that name that comes before one of `deep_ep`."""
    binary = f"deep_ep_cpp{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    install(tmp_path, "tokenyard_deep_ep", {"deep_ep_cpp.py": "x = 1\n"})
    ended = run(tmp_path, "-m", "tokenyard")
    text = ended.stdout.split("\n\n")[-1]
    assert f"deep_ep_cpp: {tmp_path}/deep_ep_cpp.py, of tokenyard_deep_ep\n" in text
    install(tmp_path, "deep_ep", {binary: "no library"})
    text = run(tmp_path, "-m", "tokenyard").stdout.split("\n\n")[-1]
    assert f"deep_ep_cpp: {tmp_path}/{binary}, of deep_ep\n" in text
    assert "  deep_ep 1.0: 1 files\n" in text
    assert "fix: uninstall all of these" in text


def test_ours_warns_of_files_that_another_distribution_left_beside_it(tmp_path):
    install(tmp_path, "sgl_deep_ep", {"deep_ep/buffer.py": "y = 2\n"})
    shutil.copy(OURS, tmp_path / "deep_ep")
    ended = run(tmp_path, "-c", "import deep_ep; print(deep_ep.Buffer.__module__)")
    assert "RuntimeWarning: deep_ep: found buffer.py in" in ended.stderr
    assert ended.stdout.startswith("tokenyard.deep_ep")
    # The first rank of a host has shown it.
    assert not run(tmp_path, "-W", "error", "-c", "import deep_ep", LOCAL_RANK="1").stderr
    (tmp_path / "deep_ep/buffer.py").unlink()
    assert not run(tmp_path, "-W", "error", "-c", "import deep_ep").stderr
