"""Ranks of one host that do not share its namespaces, as in containers: vLLM's layers, by processes behind `unshare`.

Networks are shared: ranks of one host meet at its loopback address (`test_isolated.py` has what they say without).
"""

import subprocess
import sys
import types
from pathlib import Path

# Where this file is the program of a rank.
sys.path.insert(0, str(Path(__file__).parents[1]))

import namespaces
import pool as pools

RANKS = 2


def run(form, folder):
    """A normal layer and one of low latency, in processes of their own."""
    kinds, port = namespaces.FORMS[form], pools.free_port()
    namespaces.check_permitted(kinds)
    program = [sys.executable, __file__, str(port), str(folder)]
    pipe, ranks = subprocess.PIPE, []
    try:
        for rank in range(RANKS):
            words = namespaces.behind(kinds, rank, [*program, str(rank)])
            ranks.append(subprocess.Popen(words, stdout=pipe, stderr=subprocess.STDOUT, text=True))
        outputs = [process.communicate(timeout=pools.LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    failures = [
        f"rank {rank}, exit code {process.returncode}:\n{text}"
        for rank, (process, text) in enumerate(zip(ranks, outputs, strict=True))
        if process.returncode != 0
    ]
    assert not failures, "\n".join(failures)
    return [None] * RANKS


def main(port, folder, rank):
    # Here, because an import of torch costs seconds and `run` needs none.
    import torch
    import with_vllm

    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    world = types.SimpleNamespace(rank=rank, ranks=RANKS)
    with_vllm.high_throughput(world, port, RANKS, folder)
    with_vllm.low_latency(world, port, RANKS, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
