"""Scripts of UCCL-EP's benchmarks on two ranks, through `python -m tokenyard.uccl`.

    python gpu_uccl.py [SCRIPT [ARGS...]]      without one, uccl_script.py

On two GPUs each rank has one, on one they share it; without GPUs in host memory. The exit code is 1 where a rank's is
not 0.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import gpu_common
import torch
from pool import CONFIG, LIMIT_S, free_port

RANKS = 2
OWN = pathlib.Path(__file__).with_name("uccl_script.py")


def environment(rank, port, config):
    """The variables that torchrun sets. Ranks that share a GPU have the same index in the host."""
    local = rank if torch.cuda.device_count() != 1 else 0
    numbers = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": RANKS}
    variables = {name: str(number) for name, number in numbers.items()}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return os.environ | variables | ({"TOKENYARD_CONFIG": config} if config else {})


def config_of(folder):
    """The path of the config of ranks that share a GPU, or have none; with a GPU for each rank, that of the drop-in."""
    gpus = torch.cuda.device_count()
    if gpus > 1:
        return None
    path = pathlib.Path(folder) / "config.toml"
    path.write_text(gpu_common.shared("low_latency") if gpus else CONFIG.format(arena_mib=64))
    return str(path)


def run(script, *arguments):
    """The exit codes and outputs of the ranks."""
    port = free_port()
    command = [sys.executable, "-m", "tokenyard.uccl", str(script), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(folder)
        ranks = [
            subprocess.Popen(
                command,
                env=environment(rank, port, config),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            outputs = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        return [process.returncode for process in ranks], outputs


def main(words):
    codes, outputs = run(*(words or [OWN]))
    for output in outputs:
        print(output)
    print(f"exit codes: {codes}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
