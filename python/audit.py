"""Looks into release wheels before anything installs them, for whatever machine they are.

    python python/audit.py FILE...        wheels, or libraries of an installed package

Each library needs only those of the C library, and symbols no younger than the tag of its wheel says. A wheel runs on
every Python from 3.10 on, and has the plugins as files. It takes pyelftools. Exit code 1: something else was found.
"""

import io
import pathlib
import re
import sys
import zipfile

from elftools.elf.elffile import ELFFile

# A fabric's library, or CUDA's, is opened at run time.
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
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
MODULE = "tokenyard/_native.abi3.so"
FABRICS = ("gin", "ibgda", "libfabric", "verbs")
PLUGINS = [f"tokenyard/plugins/libtokenyard_plugin_{name}.so" for name in FABRICS]
TAG = re.compile(r"-cp310-abi3-manylinux_2_(?P<minor>\d+)_(?P<machine>\w+)\.whl$")


def library(data: bytes, machine: str | None, most_minor: int | None) -> list[str]:
    """The faults of a library. `most_minor`: of glibc 2."""
    elf = ELFFile(io.BytesIO(data))
    needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
    print(f"  {len(data) / 1e6:.1f} MB, {elf['e_machine']}, needs {', '.join(needed)}")
    wrong = [f"needs {name}" for name in needed if name.split(".")[0] not in LIBRARIES]
    if machine is not None and elf["e_machine"] != MACHINES.get(machine):
        wrong.append(f"is for {elf['e_machine']}, not for {machine}")
    for _, versions in elf.get_section_by_name(".gnu.version_r").iter_versions():
        for version in versions:
            minor = re.fullmatch(r"GLIBC_2\.(\d+)[.\d]*", version.name)
            if minor and most_minor is not None and int(minor[1]) > most_minor:
                wrong.append(f"needs {version.name}")
    return wrong


def wheel(path: pathlib.Path) -> list[str]:
    """The faults of a wheel that has a native module."""
    tag = TAG.search(path.name)
    if tag is None:
        return ["expected a tag like cp310-abi3-manylinux_2_28_x86_64"]
    with zipfile.ZipFile(path) as files:
        found = [name for name in files.namelist() if ".so" in pathlib.PurePath(name).suffixes]
        wrong = [f"{name} is missing" for name in (MODULE, *PLUGINS) if name not in found]
        for name in found:
            print(f" {name}")
            data = files.read(name)
            wrong += [f"{name} {why}" for why in library(data, tag["machine"], int(tag["minor"]))]
    return wrong


def main(words: list[str]) -> int:
    wrong = []
    for path in map(pathlib.Path, words):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
        is_wheel = path.suffix == ".whl"
        found = wheel(path) if is_wheel else library(path.read_bytes(), None, None)
        wrong += [f"{path.name}: {why}" for why in found]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong or not words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
