"""Fetches the clients: `fetch.py FOLDER` downloads each package by pip and keeps the files that `clients.toml` names.

The files lie in a folder of FOLDER, where a later run finds them. A wheel holds binaries for one Python each: the
files are source, so any of them serves. A package that does not come leaves its reason there. It fails the run where
it is `required`.
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


def reason_file(folder, name):
    """Where the reason lies for which a package did not come."""
    return Path(f"{folder_of(folder, name)}.reason")


def excused(folder):
    """The reasons of the clients that are not there and may be missing, by client."""
    reasons = {}
    for name, pin in pins().items():
        if not pin["required"] and not folder_of(folder, name).exists():
            file = reason_file(folder, name)
            reasons[name] = file.read_text() if file.exists() else "it was not fetched"
    return reasons


def download(words):
    """Runs pip. Its last line says why a package did not come."""
    ended = subprocess.run(words, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"pip ended with {ended.returncode}"]
        raise OSError(lines[-1])


def fetch(folder, name, pin):
    """Downloads one package; its files appear at once, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        download([*DOWNLOAD, "--dest", scratch, f"{name}=={pin['version']}"])
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
    is_short = False
    for name, pin in pins().items():
        if folder_of(folder, name).exists():
            continue
        try:
            fetch(folder, name, pin)
        except (OSError, zipfile.BadZipFile) as error:
            print(f"{name} {pin['version']}: not fetched: {error}", file=sys.stderr)
            reason_file(folder, name).write_text(str(error))
            is_short |= pin["required"]
        else:
            reason_file(folder, name).unlink(missing_ok=True)
    return int(is_short)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
