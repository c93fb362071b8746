"""The calls as GPUs make them, on tensors in host memory over the CPU backend: all of them but the streams.

On GPUs the same checks run by `gpu_ranks.py`.
"""

import importlib.util

import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None
NAMES = ["torch is missing"]
if HAS_TORCH:
    import gpu_ranks

    NAMES = gpu_ranks.names(on_host=True)

pytestmark = pytest.mark.skipif(
    not HAS_TORCH, reason="torch is not installed: the code for GPUs did not run"
)


@pytest.mark.parametrize("name", NAMES)
def test_the_code_for_gpus_does_what_deep_ep_does(ranks, monkeypatch, name):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for note in ranks(2, gpu_ranks.run, name):
        if isinstance(note, gpu_ranks.Skipped):
            pytest.skip(note)
