"""The package as it is installed."""

import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

import tokenyard


def run(*words):
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_stubs_say_what_the_module_is():
    assert "no issues found" in run("-m", "mypy.stubtest", "tokenyard")


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
        ("transport", "shm"),
        ("transport", "nvlink"),
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
    # A linked library stands in the dynamic section's strings, as a name of its own; one that is opened at run time is
    # the program's.
    needed = run("-c", NEEDED, str(library)).split()
    assert library.read_bytes().startswith(b"\x7fELF")
    assert needed
    assert not [name for name in needed if name.split(".")[0] not in LIBRARIES], needed


def test_the_plugins_of_the_wheel_are_found_without_a_path():
    plugins = {part["name"]: part["file"] for part in tokenyard.components() if part["file"]}
    assert set(plugins) == {"verbs", "libfabric", "efa"}
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


LIBRARIES = {
    "libc",
    "libm",
    "libdl",
    "libpthread",
    "librt",
    "libgcc_s",
    "ld-linux-x86-64",
    "ld-linux-aarch64",
}

# The DT_NEEDED entries of a 64-bit little-endian ELF file.
NEEDED = """
import struct, sys
data = open(sys.argv[1], "rb").read()
start, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
segments = [struct.unpack_from("<IIQQQQQQ", data, start + i * size) for i in range(count)]
offset = lambda address: next(s[2] + address - s[3] for s in segments if s[0] == 1 and s[3] <= address < s[3] + s[6])
dynamic = next(s for s in segments if s[0] == 2)
entries = list(struct.iter_unpack("<QQ", data[dynamic[2] : dynamic[2] + dynamic[5] // 16 * 16]))
names = offset(next(value for tag, value in entries if tag == 5))
for tag, value in entries:
    if tag == 0:
        break
    if tag == 1:
        print(data[names + value : data.index(b"\\0", names + value)].decode())
"""
