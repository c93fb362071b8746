"""Frameworks' own, unmodified code on the drop-in, on the CPU backend: groups of two and of four ranks.

`fetch.py` fetches the code. Two groups of two run at the same time, in a world of four. All checks share four
processes, because an import of torch costs seconds.
"""

import gpu_clients
import pytest
import with_hybrid
import with_lmdeploy
import with_megatron
import with_megatron_layer
import with_nemo
import with_sglang
import with_torchtitan
import with_vllm

SIZES = pytest.mark.parametrize("size", [2, 4], ids=["2 ranks", "4 ranks"])


@SIZES
@pytest.mark.parametrize(
    "function",
    [
        with_megatron.fused_calls_are_a_dense_layer,
        with_megatron.trains_as_its_own_all_to_all,
        with_megatron_layer.layer_trains_as_over_its_own_all_to_all,
        with_hybrid.hybrid_ep_trains_as_its_own_all_to_all,
        with_hybrid.hybrid_ep_keeps_to_its_budget,
    ],
    ids=lambda f: f.__name__,
)
def test_megatron_core(check, function, size):
    check(function, "megatron-core", size)


@SIZES
@pytest.mark.parametrize(
    "function",
    [
        with_torchtitan.steps_are_those_of_a_dense_layer,
        with_torchtitan.checkpoints_save_the_communication,
        with_torchtitan.compiles_around_a_layer,
        with_torchtitan.inference_has_the_values_of_training,
        with_hybrid.hybrid_ep_is_dense,
    ],
    ids=lambda f: f.__name__,
)
def test_torchtitan(check, function, size):
    check(function, "torchtitan", size)


@pytest.mark.parametrize(
    "function",
    [
        with_torchtitan.checkpoints_save_the_communication_of_a_compiled_layer,
        with_torchtitan.makes_its_buffer_in_a_compiled_function,
    ],
    ids=lambda f: f.__name__,
)
def test_torchtitan_in_groups_of_two(check, function):
    """To compile takes a second on each rank."""
    check(function, "torchtitan", 2)


@SIZES
@pytest.mark.parametrize(
    "function",
    [
        with_vllm.high_throughput,
        with_vllm.low_latency,
        with_vllm.elastic,
    ],
    ids=lambda f: f.__name__,
)
def test_vllm(check, function, size):
    check(function, "vllm", size)


@SIZES
@pytest.mark.parametrize(
    "function",
    [
        with_nemo.flex_dispatcher_is_a_dense_layer,
        with_nemo.checkpoints_replay_the_dispatch,
        with_nemo.buffer_is_freed_before_the_group,
        with_hybrid.hybrid_ep_is_a_dense_layer,
    ],
    ids=lambda f: f.__name__,
)
def test_nemo_automodel(check, function, size):
    check(function, "nemo-automodel", size)


@SIZES
@pytest.mark.parametrize(
    "function",
    [
        with_lmdeploy.plain_dispatcher,
        with_lmdeploy.normal_dispatcher,
        with_lmdeploy.low_latency_dispatcher,
    ],
    ids=lambda f: f.__name__,
)
def test_lmdeploy(check, function, size):
    check(function, "lmdeploy", size)


@SIZES
@pytest.mark.parametrize(
    "function",
    [
        with_sglang.layers_are_dense,
        with_sglang.layers_over_v1_are_dense,
    ],
    ids=lambda f: f.__name__,
)
def test_sglang(check, function, size):
    check(function, "sglang", size)


# Those that no test above has.
OF_GPUS = [
    (client, function)
    for client, function in gpu_clients.CHECKS
    if function not in gpu_clients.NEED_GPUS and function.__module__ in ("graphs", "overlap")
]


@pytest.mark.parametrize(
    ("client", "function"), OF_GPUS, ids=lambda value: getattr(value, "__name__", value)
)
def test_checks_of_graphs_and_overlap_pass_without_a_graph(check, client, function):
    """In host memory a graph is its step. The table leaves them out: what they are for did not run."""
    check(function, client, 2, listed=False)
