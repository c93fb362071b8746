"""Fetches the clients: `fetch.py FOLDER` downloads each package by pip and keeps the files that `clients.toml` names.

The files lie in a folder of FOLDER, where a later run finds them. A wheel holds binaries for one Python each: the
files are source, so any of them serves.
"""

import fnmatch
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

import tomllib

PINS = Path(__file__).with_name("clients.toml")
DOWNLOAD = ["pip3", "download", "--quiet", "--no-deps"]
DOWNLOAD += ["--only-binary", ":all:", "--python-version", "3.12"]
DOWNLOAD += ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_34_x86_64"]


def pins():
    return tomllib.loads(PINS.read_text())


def folder_of(folder, name):
    """Its name changes with the version, and with the files that are kept of it."""
    pin = pins()[name]
    files = zlib.crc32("\n".join(pin["files"]).encode())
    return Path(folder) / f"{name}-{pin['version']}-{files:08x}"


def fetch(folder, name, pin):
    """Downloads one package; its files appear at once, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        words = [*DOWNLOAD, "--dest", scratch, f"{name}=={pin['version']}"]
        subprocess.run(words, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            for pattern in pin["files"]:
                found = fnmatch.filter(archive.namelist(), pattern)
                if not found:
                    raise FileNotFoundError(f"{wheel.name}: found no {pattern}")
                archive.extractall(unpacked, found)
        unpacked.rename(folder_of(folder, name))


def main(folder):
    missing = []
    for name, pin in pins().items():
        if folder_of(folder, name).exists():
            continue
        try:
            fetch(folder, name, pin)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            print(f"{name} {pin['version']}: not fetched: {error}", file=sys.stderr)
            missing.append(name)
    return any(pins()[name]["required"] for name in missing)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
