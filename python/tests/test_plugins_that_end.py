"""Plugins that end their process while it loads them."""

import pathlib
import subprocess
import sys

import pytest
from pool import CONFIG, LIMIT_S

ENDS_EARLY = """
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void early(void) {
    ENDS;
}
"""


def early_plugin(folder, ends):
    source, plugin = folder / "early.c", folder / "libearly.so"
    source.write_text(ENDS_EARLY.replace("ENDS", ends))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", plugin, source], check=True)
    return plugin


LOADS = """
import os, tokenyard
plugins = os.environ.get("PLUGINS_OF_RANK_" + os.environ["TOKENYARD_RANK"], "")
config = tokenyard.Config.parse({config!r} + plugins, "test.toml")
world = tokenyard.World.from_env(config)
try:
    tokenyard.Communicator(world, config, 4, 2, 64, 8)
except tokenyard.errors.PeerLostError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("victim", "ends"),
    [(1, "_exit(0)"), (1, "abort()"), (1, "*(volatile int *)8 = 1"), (0, "_exit(0)")],
)
def test_a_plugin_that_ends_its_process_while_it_loads_is_named_on_the_others(
    programs, tmp_path, monkeypatch, victim, ends
):
    plugin = early_plugin(tmp_path, ends)
    monkeypatch.setenv(f"PLUGINS_OF_RANK_{victim}", f'[plugins]\npaths = ["{plugin}"]\n')
    ended = programs("", "", head=LOADS)
    (words, error, _), says = ended[1 - victim], f"announced is `dlopen` of plugin `{plugin}`"
    assert f"rank {victim}" in " ".join(words), (words, error)
    assert says in " ".join(words), (words, error)


@pytest.mark.parametrize("ends", ["_exit(0)", "abort()"])
def test_the_documented_command_names_the_plugin_that_ends_a_lone_process(tmp_path, ends):
    plugin, program = early_plugin(tmp_path, ends), tmp_path / "train.py"
    program.write_text(
        "import tokenyard\n"
        f"config = tokenyard.Config.parse({CONFIG.format(arena_mib=4)!r} + "
        f"'[plugins]\\npaths = [\"{plugin}\"]', 'test.toml')\n"
        "world = tokenyard.World(0, 1, exchange=lambda mine: [mine], config=config)\n"
        "tokenyard.Communicator(world, config, 4, 2, 64, 8)\n"
    )
    page = (pathlib.Path(__file__).parents[2] / "docs/failures.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith("LD_DEBUG="))
    command = command.replace("python train.py", f"{sys.executable} {program}")
    out = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=LIMIT_S
    ).stdout
    assert out.strip().endswith(f"calling init: {plugin}"), out
