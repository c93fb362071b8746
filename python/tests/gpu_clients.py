"""Frameworks' own, unmodified code on the drop-in, on GPUs: each check is named, and prints ok or FAILED.

    python clients/fetch.py FOLDER            downloads the code, also on another machine
    python gpu_clients.py FOLDER [NAME...]    two ranks with a GPU each; on one GPU they take turns
    ... --save FILE                           writes what ran; `clients/table.py FILE` puts it into docs/deep_ep.md

It needs torch and numpy; the exit code is 1 where a check failed. Without GPUs the checks that need none run.
"""

import argparse
import datetime
import gc
import json
import os
import sys
import time
from pathlib import Path

# With deterministic algorithms cuBLAS wants to hear of its memory.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
sys.path.insert(0, str(Path(__file__).with_name("clients")))

import fetch
import graphs
import isolated
import namespaces
import overlap
import pool as pools
import visible
import with_hybrid
import with_lmdeploy
import with_megatron
import with_megatron_layer
import with_nemo
import with_sglang
import with_torchtitan
import with_vllm
from gpu_common import share_one_gpu

RANKS = 2
# Seconds for a check. The first ones compile kernels.
LIMIT_S = 120
CHECKS = [
    *(("vllm", check) for check in overlap.CHECKS),
    *((client, check) for client, checks in graphs.CHECKS.items() for check in checks),
    ("megatron-core", with_megatron.fused_calls_are_a_dense_layer),
    ("megatron-core", with_megatron.trains_as_its_own_all_to_all),
    ("megatron-core", with_megatron_layer.layer_trains_as_over_its_own_all_to_all),
    ("torchtitan", with_torchtitan.steps_are_those_of_a_dense_layer),
    ("torchtitan", with_torchtitan.checkpoints_save_the_communication),
    ("torchtitan", with_torchtitan.inference_has_the_values_of_training),
    ("vllm", with_vllm.high_throughput),
    ("vllm", with_vllm.low_latency),
    ("vllm", with_vllm.elastic),
    ("sglang", with_sglang.layers_are_dense),
    ("sglang", with_sglang.layers_over_v1_are_dense),
    ("nemo-automodel", with_nemo.flex_dispatcher_is_a_dense_layer),
    ("nemo-automodel", with_nemo.checkpoints_replay_the_dispatch),
    ("nemo-automodel", with_nemo.buffer_is_freed_before_the_group),
    ("lmdeploy", with_lmdeploy.plain_dispatcher),
    ("lmdeploy", with_lmdeploy.normal_dispatcher),
    ("lmdeploy", with_lmdeploy.low_latency_dispatcher),
    ("torchtitan", with_torchtitan.compiles_around_a_layer),
    ("torchtitan", with_torchtitan.checkpoints_save_the_communication_of_a_compiled_layer),
    ("torchtitan", with_torchtitan.makes_its_buffer_in_a_compiled_function),
    ("torchtitan", with_torchtitan.compiles_by_inductor),
    ("megatron-core", with_hybrid.hybrid_ep_trains_as_its_own_all_to_all),
    ("megatron-core", with_hybrid.hybrid_ep_keeps_to_its_budget),
    ("torchtitan", with_hybrid.hybrid_ep_is_dense),
    ("nemo-automodel", with_hybrid.hybrid_ep_is_a_dense_layer),
]
NEED_GPUS = {
    *overlap.NEED_GPUS,
    graphs.sglang_first_use_in_a_capture,
    graphs.vllm_first_use_in_a_capture,
}


def run(world, check, port, folder):
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(world.rank % torch.cuda.device_count())
    # Errors hold the frames of earlier checks, with their graphs. torch ends a capture in which it frees a graph.
    gc.collect()
    return check(world, port, RANKS, folder)


class Ranks:
    """Two processes that stay until a check fails."""

    def __init__(self):
        self.pool, self.port = pools.Pool(RANKS), pools.free_port()

    def run(self, check, folder):
        try:
            return self.pool.run(RANKS, run, check, self.port, folder)
        except BaseException:
            self.pool.close()
            self.port = pools.free_port()
            raise


def named(folder, gpus, ranks):
    """Each check: its client, its name, and a call that gives its notes."""
    for client, check in CHECKS:
        if gpus or check not in NEED_GPUS:
            of_client = fetch.folder_of(folder, client)
            name = f"{client}.{check.__name__}"
            yield client, name, lambda check=check, of_client=of_client: ranks.run(check, of_client)
    of_client = fetch.folder_of(folder, "vllm")
    for form, values in visible.forms(gpus).items():
        yield "vllm", f"visible.{form}", lambda values=values: visible.run(values, of_client)
    for form in namespaces.FORMS:
        yield "vllm", f"isolated.{form}", lambda form=form: isolated.run(form, of_client)


def passes(name, call):
    """Whether a check passes, which it prints."""
    start = time.monotonic()
    try:
        notes = call()
    except Exception as error:
        print(f"FAILED {name}: {error or repr(error)}", flush=True)
        return False
    print(f"ok     {name} ({time.monotonic() - start:.1f} s)", flush=True)
    for note in filter(None, notes[:1]):
        print(f"       {note}", flush=True)
    return True


def record(client, name, passed, place):
    """A check that ran, for `clients/table.py`."""
    return {
        "client": client,
        "version": fetch.pins()[client]["version"],
        "check": name.removeprefix(f"{client}."),
        "passed": passed,
        "date": datetime.date.today().isoformat(),
        "place": place,
    }


def main(folder, wanted, save=None):
    import torch

    gpus = torch.cuda.device_count()
    place = f"{gpus} GPUs: {torch.cuda.get_device_name(0)}" if gpus else "host memory, no GPU"
    print(f"{place}; torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    if gpus:
        pools.LIMIT_S = LIMIT_S
    if gpus == 1:
        share_one_gpu()
    records, failed, ranks = [], [], Ranks()
    for client, name, call in named(folder, gpus, ranks):
        if wanted and not any(word in name for word in wanted):
            continue
        passed = passes(name, call)
        failed += [] if passed else [name]
        records.append(record(client, name, passed, place))
        if save is not None:
            # After each one: a run that is ended has what it did.
            save.write_text(json.dumps(records, indent=1) + "\n")
    ranks.pool.close()
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all ok", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("wanted", nargs="*", metavar="NAME")
    parser.add_argument("--save", type=Path, metavar="FILE")
    sys.exit(main(**vars(parser.parse_args())))
