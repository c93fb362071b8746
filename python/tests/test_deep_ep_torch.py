"""The drop-in on torch's CPU tensors. Skipped, one by one, where torch is not installed."""

import importlib.util
import pathlib
import types

import numpy as np
import pytest
import test_package
from pool import Pool, free_port

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: the drop-in did not run",
)


def run(ranks, name, *arguments):
    """Calls a function of `torch_ranks` on two ranks. To import it takes torch."""
    import torch_ranks

    ranks(2, getattr(torch_ranks, name), *arguments, torch_ranks.CASE)


def test_tensors_of_torch_go_in_and_come_out(ranks):
    run(ranks, "normal")


@pytest.mark.parametrize("with_checkpoint", [False, True], ids=["plain", "checkpoint"])
def test_gradients_go_back_through_saved_tensors(ranks, with_checkpoint):
    run(ranks, "gradients", with_checkpoint)


def test_low_latency_calls_take_and_give_torch_tensors(ranks):
    run(ranks, "low_latency")


def test_arrays_that_torch_cannot_share_are_copied_and_nothing_behind_the_rows_is_undefined(ranks):
    run(ranks, "arrays_of_any_kind")


def test_a_hook_may_be_called_in_another_mode_and_its_combine_needs_no_counts_of_the_caller(ranks):
    run(ranks, "halves_apart")


def test_v2_takes_and_gives_torch_tensors(ranks):
    run(ranks, "elastic")


def test_torch_frees_an_owner_inside_of_a_call_although_it_has_released_the_gil(ranks):
    run(ranks, "freed_inside_of_a_call")


def test_a_process_group_of_torch_is_the_world(ranks):
    run(ranks, "in_group", free_port())


def test_wrong_settings_of_a_rank_are_named_where_a_group_becomes_the_world(ranks):
    run(ranks, "wrong_settings", free_port())


@pytest.mark.parametrize("shape", ["halves", "strided_pairs", "three_of_four", "one_each"])
def test_a_group_of_some_ranks_is_a_world_of_its_own(ranks, monkeypatch, shape):
    import gpu_groups

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ranks(gpu_groups.RANKS, gpu_groups.groups, free_port(), shape)


def test_a_rank_that_does_not_come_to_the_gather_of_torch_is_waited_for_no_longer_than_late(ranks):
    run(ranks, "late_to_gather", free_port())


def test_scripts_compare_with_references_over_the_default_group(ranks):
    run(ranks, "references", free_port())


def test_the_example_has_the_gradients_of_a_dense_layer_and_trains(monkeypatch):
    folder = pathlib.Path(__file__).parents[1]
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += ["--master-port", str(free_port()), str(folder / "examples/moe_layer.py")]
    # Ranks share the cores.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = test_package.run(*words)
    losses = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]


def test_a_dispatch_is_read_at_once_only_where_all_tensors_are_as_it_takes_them():
    import torch

    from tokenyard._native import _routing

    tokens, hidden, topk, experts, ranks = 5, 16, 3, 8, 4
    good = {
        "x": torch.ones(tokens, hidden, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(tokens, topk, dtype=torch.int64),
        "topk_weights": torch.ones(tokens, topk),
        "is_token_in_rank": torch.ones(tokens, ranks, dtype=torch.bool),
        "num_tokens_per_expert": torch.ones(experts, dtype=torch.int32),
    }

    def read(call, ranks=ranks):
        return _routing(types.SimpleNamespace(**call), ranks)

    found = read(good)
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        # Such a torch describes its tensors in calls of Python alone.
        assert found is None
        return
    assert found == (tokens, hidden, topk, experts)
    counts = good["num_tokens_per_expert"]
    empty = {name: one[:0] for name, one in good.items()} | {"num_tokens_per_expert": counts}
    assert read(empty) == (0, hidden, topk, experts)
    wrong = {
        "x": [
            good["x"].double(),
            good["x"][0],
            good["x"].t().contiguous().t(),
            good["x"].clone().requires_grad_(),
            torch.nn.Parameter(good["x"]),
            np.ones((tokens, hidden), np.float32),
            (good["x"], good["topk_weights"]),
            None,
        ],
        "topk_idx": [good["topk_idx"].int(), good["topk_idx"][:4], good["topk_idx"][None], None],
        "topk_weights": [
            good["topk_weights"].half(),
            good["topk_weights"][:, :2],
            torch._neg_view(good["topk_weights"]),
            None,
        ],
        "is_token_in_rank": [
            good["is_token_in_rank"].to(torch.uint8),
            good["is_token_in_rank"][:, :3],
            None,
        ],
        "num_tokens_per_expert": [counts.long(), counts[:6], counts[:0], counts[None]],
    }
    for name, values in wrong.items():
        for value in values:
            assert read(good | {name: value}) is None, (name, value)
    assert _routing(object(), ranks) is None
    assert read(good, 0) is None


def test_what_a_dispatch_gives_needs_room_for_its_handle(ranks):
    run(ranks, "without_room")


def test_tensors_of_a_subclass_give_plain_tensors_and_negated_ones_their_values(ranks):
    run(ranks, "subclass")


def test_a_buffer_that_is_made_in_a_capture_is_refused_before_anything_is_called(monkeypatch):
    import torch

    from tokenyard import errors
    from tokenyard.deep_ep._pool import Pool

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    # Both kinds of buffers make a pool first. No call could ask this group for anything.
    with pytest.raises(errors.InvalidInputError, match="before the capture") as raised:
        Pool(object())
    assert "make the buffer" in raised.value.fix


def test_calls_in_compiled_functions_give_what_they_give_outside_and_are_not_traced(reports):
    # In processes of their own: where a test has registered handles as an opaque type, torch refuses their fields.
    pool = Pool(2)
    try:
        run(pool.run, "compiled")
    finally:
        pool.close()


@pytest.mark.parametrize("first", ["tokenyard.deep_ep", "torch"])
def test_an_operator_takes_a_handle_in_a_graph_whichever_was_imported_first(first):
    # In a process of its own, which has imported neither. The package imports torch before it makes the type.
    script = (
        "import importlib, sys\n"
        "importlib.import_module(sys.argv[1])\n"
        "import gpu_compile, tokenyard\n"
        "with tokenyard.World(0, 1, exchange=lambda mine: [mine]) as world:\n"
        "    print(gpu_compile.handle_in_a_graph(world))\n"
    )
    folder = str(pathlib.Path(__file__).parent)
    result = test_package.run("-c", script, first, PYTHONPATH=folder).splitlines()[-1]
    if result != "None":
        pytest.skip(result)
