"""The package as it is installed."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import pytest
from pool import LIMIT_S

import tokenyard
from tokenyard import errors

AUDIT = str(pathlib.Path(__file__).parents[1] / "audit.py")


def run(*words, **variables):
    command = [sys.executable, *words]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **variables}
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_stubs_say_what_the_module_is(tmp_path):
    # torch gives handles a metaclass of its own, where it is installed: compiled functions may pass them on then.
    allowed = tmp_path / "allowed"
    allowed.write_text("tokenyard\\.deep_ep\\.buffers\\.handle\\.EPHandle\n")
    options = ("--allowlist", str(allowed), "--ignore-unused-allowlist")
    assert "no issues found" in run("-m", "mypy.stubtest", *options, "tokenyard")


def test_to_import_it_takes_python_alone():
    text = run(
        "-c",
        "import sys, tokenyard; print(*sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))",
    )
    others = {name for name in text.split() if not name.startswith("_")}
    assert others - {"sitecustomize", "usercustomize"} == {"tokenyard"}


def test_the_components_are_built_in():
    names = {(part["kind"], part["name"]) for part in tokenyard.components()}
    assert {
        ("kernel set", "cpu"),
        ("kernel set", "cuda"),
        ("kernel set", "rocm"),
        ("transport", "shm"),
        ("transport", "nvlink"),
        ("transport", "xgmi"),
        ("topology", "auto"),
    } <= names


def test_it_is_typed_and_every_public_thing_is_documented():
    folder = pathlib.Path(tokenyard.__file__).parent
    assert (folder / "py.typed").is_file()
    assert importlib.metadata.version("tokenyard") == tokenyard.__version__
    bare = []
    for name in tokenyard.__all__:
        thing = getattr(tokenyard, name)
        if not isinstance(thing, str) and not thing.__doc__:
            bare.append(name)
        for member in vars(thing) if isinstance(thing, type) else ():
            if not member.startswith("_") and not getattr(thing, member).__doc__:
                bare.append(f"{name}.{member}")
    assert not bare


def libraries():
    """Everything in the wheel that a linker made."""
    return sorted(pathlib.Path(tokenyard.__file__).parent.rglob("*.so"))


@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.name)
def test_nothing_of_cuda_or_of_a_fabric_is_linked(library):
    assert ", needs lib" in run(AUDIT, str(library))


def test_a_linked_library_of_another_kind_fails_the_audit(tmp_path):
    # The name is as long as the one whose place it takes among the dynamic section's strings.
    data = libraries()[0].read_bytes()
    changed = tmp_path / "changed.so"
    changed.write_bytes(data.replace(b"\0libc.so.6\0", b"\0liba.so.6\0"))
    ended = subprocess.run([sys.executable, AUDIT, str(changed)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "changed.so: needs liba.so.6\n")


def test_the_readme_shows_the_components_that_are_built_in():
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    shown = readme.split("\ntokenyard 0.1.0\n\n")[1].split("\n```")[0].splitlines()
    of_plugins = {part["name"] for part in tokenyard.components() if part["file"]}
    of_components = run("-m", "tokenyard").split("\n\n")[1]
    printed = [line for line in of_components.splitlines() if "plugin: " not in line]
    # Columns are as wide as their longest word, which may be a plugin's.
    lines = [line.replace("kernel set", "kernels").split() for line in printed]
    built_in = [line for line in lines if line[1] not in of_plugins]
    assert built_in == [line.replace("kernel set", "kernels").split() for line in shown]


def test_the_demo_checks_an_exchange_and_needs_no_other_program():
    printed = run("-m", "tokenyard", "demo", PATH="").splitlines()
    assert printed[-1] == "check: passed"
    assert sum("all sums are right" in line for line in printed) == 2


def test_each_config_of_the_source_tree_is_found_by_its_name():
    files = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.toml"))
    for file in files:
        config = tokenyard.Config.built_in(file.stem, deadline_ms=7_000)
        assert config.name == f"the built-in config {file.stem}"
        assert config.on_failure == tokenyard.Config.load(file).on_failure
    with pytest.raises(errors.ConfigError) as raised:
        tokenyard.Config.built_in("nvlnk")
    names = ", ".join(sorted(file.stem for file in files))
    assert f"expected one of {names}" in str(raised.value)


def test_each_component_of_a_config_that_is_found_by_name_is_in_the_wheel():
    there = {part["name"] for part in tokenyard.components()} | {"none"}
    files = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.toml"))
    named = {
        file.stem: set(re.findall(r'^use = "([^"]+)"', file.read_text(), re.M)) for file in files
    }
    assert {"verbs", "libfabric", "efa", "gin", "ibgda"} <= set().union(*named.values())
    assert {name: used - there for name, used in named.items() if used - there} == {}


def test_a_deadline_beyond_what_toml_holds_is_refused():
    with pytest.raises(errors.ConfigError, match=r"below 2\^63"):
        tokenyard.Config.built_in("cpu", late_ms=2**63)
    assert tokenyard.Config.built_in("nvlink", sms=24).name == "the built-in config nvlink"


def test_the_plugins_of_the_wheel_are_found_without_a_path():
    plugins = {part["name"]: part["file"] for part in tokenyard.components() if part["file"]}
    assert set(plugins) == {"verbs", "libfabric", "efa", "gin", "ibgda"}
    folder = pathlib.Path(tokenyard.__file__).resolve().parent / "plugins"
    assert {pathlib.Path(file).parent for file in plugins.values()} == {folder}
    assert "plugin: " in run("-m", "tokenyard")
    config = tokenyard.Config.parse(
        "[kernels]\nuse = 'cpu'\n[transport.scale_up]\nuse = 'none'\n"
        "[transport.scale_out]\nuse = 'efa'\n[world]\ndeadline_ms = 20000\n"
    )
    with (
        tokenyard.World(0, 1, exchange=lambda mine: [mine], config=config) as world,
        pytest.raises(tokenyard.Error) as raised,
    ):
        tokenyard.Communicator(world, config, experts=1, topk=1, hidden=8, max_tokens=1)
    # It was asked what it needs, which is not here. A name that no component has is another error.
    assert "was looked for in" not in str(raised.value), str(raised.value)
