"""Scripts of UCCL-EP's benchmarks run on the drop-in, by their own imports."""

import subprocess
import sys
from unittest import mock

import gpu_uccl
import pytest
import torch

from tokenyard import deep_ep, errors
from tokenyard.uccl import ep, utils
from tokenyard.uccl.buffer import Buffer

TOKENYARD = [sys.executable, "-m", "tokenyard.uccl"]


class Group:
    """The numbers of a process group."""

    def rank(self):
        return 1

    def size(self):
        return 2


def ran(*words):
    return subprocess.run(
        [*TOKENYARD, *map(str, words)], capture_output=True, text=True, timeout=gpu_uccl.LIMIT_S
    )


def test_a_script_runs_on_two_ranks_by_the_modules_that_it_imports(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    codes, outputs = gpu_uccl.run(gpu_uccl.OWN, "--num-tokens", "24")
    assert codes == [0, 0], "\n".join(outputs)
    for rank, output in enumerate(outputs):
        assert f"[rank {rank}] all right" in output


def test_a_script_finds_its_neighbours_but_not_uccls_modules_beside_it(tmp_path):
    for name in ("buffer.py", "utils.py"):
        (tmp_path / name).write_text("raise AssertionError('a file of UCCL')")
    (tmp_path / "neighbour.py").write_text("from buffer import Buffer\nNUMBER = 7")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, neighbour, utils\nfrom uccl.ep import Config\n"
        "assert __name__ == '__main__'\nprint(neighbour.NUMBER, neighbour.Buffer.__module__, *sys.argv[1:])"
    )
    ended = ran(script, "--flag", "-h", "--", "words")
    assert ended.stdout == "7 tokenyard.uccl.buffer --flag -h -- words\n", ended.stderr
    assert ended.returncode == 0
    ended = ran(script, "--", "--flag", "--")
    assert ended.stdout == "7 tokenyard.uccl.buffer -- --flag --\n", ended.stderr
    ended = ran("--", script, "--", "words")
    assert ended.stdout == "7 tokenyard.uccl.buffer -- words\n", ended.stderr


@pytest.mark.parametrize(
    ("text", "code"), [("pass", 0), ("raise ValueError('mine')", 1), ("raise SystemExit(7)", 7)]
)
def test_the_exit_code_is_that_of_the_script(tmp_path, text, code):
    script = tmp_path / "script.py"
    script.write_text(text)
    ended = ran(script)
    assert ended.returncode == code
    assert ("ValueError: mine" in ended.stderr) == (code == 1)


@pytest.mark.parametrize("words", [[], ["no/such/script.py"], ["--no-such-option", "script.py"]])
def test_a_wrong_command_line_is_an_error_of_its_own(words):
    ended = ran(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "usage: python -m tokenyard.uccl" in ended.stderr


def test_the_help_has_an_example_and_the_exit_codes():
    printed = ran("--help").stdout
    assert "torchrun --nproc-per-node 2 -m tokenyard.uccl" in printed
    assert "exit codes:" in printed


def test_what_is_started_is_stopped_and_belongs_to_a_rank_of_the_group():
    proxies, workers = utils.initialize_uccl(0, 0, 1, 2, Group(), num_experts=8, is_intranode=True)
    assert workers is None
    assert [proxy.is_running for proxy in proxies] == [True]
    for _ in range(2):
        utils.destroy_uccl(proxies, workers)
        assert [proxy.is_running for proxy in proxies] == [False]
    with pytest.raises(errors.InvalidInputError, match="found 0, 2; expected 1, 2, those of the"):
        utils.initialize_uccl(0, 0, 0, 2, Group())


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["irdma1", "mlx5_2", "mlx5_0"], "mlx5_0"),
        (["irdma1"], "irdma1"),
        (["efa0"], None),
        ([], None),
    ],
)
def test_the_first_rdma_device_of_two_makers_is_named(tmp_path, monkeypatch, names, found):
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(utils, "_RDMA_DEVICES", tmp_path)
    assert utils.detect_ib_hca() == found


def test_functions_on_raw_addresses_are_named_as_missing():
    with pytest.raises(AttributeError, match=r"uccl\.ep: found no Proxy; expected Config"):
        _ = ep.Proxy


def constructed(*arguments, **options):
    """The arguments that the constructor gives to that of `deep_ep.Buffer`."""
    found = {}

    def construct(self, group, **given):
        found.update(given)
        self.num_rdma_bytes, self.rank, self.group_size = 0, 1, 2

    with mock.patch.object(deep_ep.Buffer, "__init__", construct):
        Buffer(Group(), *arguments, **options)
    return found


SIZES = {"num_nvl_bytes": 5, "num_rdma_bytes": 6}


@pytest.mark.parametrize(
    ("arguments", "options", "given"),
    [
        ((), {}, {}),
        ((5,), {}, {"num_nvl_bytes": 5}),
        ((5, 6, True), {}, {**SIZES, "low_latency_mode": True}),
        ((5,), {"num_rdma_bytes": 6}, SIZES),
        (("address",), SIZES, SIZES),
        (("address", 5), {"num_rdma_bytes": 6}, SIZES),
        (("address", 5, 6), {"allow_mnnvl": True}, {**SIZES, "allow_mnnvl": True}),
        ((), {"rdma_buffer_ptr": "address", **SIZES}, SIZES),
        ((5, 6), {"rdma_buffer_ptr": "address"}, SIZES),
    ],
)
def test_a_buffer_takes_its_arguments_as_that_of_uccl(arguments, options, given):
    assert constructed(*arguments, **options) == given


@pytest.mark.parametrize("address", [(), ("address",)], ids=["alone", "behind an address"])
def test_all_arguments_of_uccls_buffer_may_come_by_position(address):
    given = constructed(*address, 5, 6, False, 12, True, False, True, None)
    assert given == {
        **SIZES,
        "low_latency_mode": False,
        "num_qps_per_rank": 12,
        "allow_nvlink_for_low_latency_mode": True,
        "allow_mnnvl": False,
        "explicitly_destroy": True,
        "is_intranode": None,
    }
    with pytest.raises(TypeError, match="found 9 arguments behind the group; expected at most 8"):
        constructed(*address, 5, 6, False, 12, True, False, True, None, 1)


def test_both_modules_have_one_handle_of_events():
    assert utils.EventHandle is ep.EventHandle


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, where an address is read")
def test_events_take_addresses_of_streams_which_are_nothing_on_the_cpu():
    event = ep.EventHandle(0)
    assert isinstance(event, utils.EventHandle)
    assert event._event is None
    event.current_stream_wait(0)
    event.current_stream_wait()
    utils.EventOverlap(event).current_stream_wait()
