"""The drop-in on torch's CPU tensors. Skipped, one by one, where torch is not installed."""

import importlib.util
import socket

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: the drop-in ran on numpy alone",
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


def test_v2_takes_and_gives_torch_tensors(ranks):
    run(ranks, "elastic")


def test_a_process_group_of_torch_is_the_world(ranks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run(ranks, "in_group", port)
