"""CUDA's run-time compiler, where pip puts it: in `site-packages/nvidia/cu13/lib`, which the loader does not search."""

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from tokenyard import errors

# The compiler opens the second by its name alone.
LIBRARY, BUILTINS = "libnvrtc.so.13", "libnvrtc-builtins.so.13.*"


def folders() -> Iterator[Path]:
    """The folders of CUDA's libraries in the packages of `nvidia`."""
    found = importlib.util.find_spec("nvidia")
    for place in found.submodule_search_locations or () if found else ():
        yield from (Path(place) / name / "lib" for name in ("cu13", "cuda_nvrtc"))


def is_open(name: str) -> bool:
    """Whether the loader has a library, or finds it."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def preload() -> None:
    """Opens the compiler of CUDA 13, so that the kernel set finds it.

    Raises UnavailableError where pip has installed that of CUDA 12 alone. Where there is none at all, the kernel set
    says so itself.
    """
    if is_open(LIBRARY):
        return
    older: list[Path] = []
    for folder in folders():
        library = folder / LIBRARY
        if library.exists():
            for path in (*sorted(folder.glob(BUILTINS)), library):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return
        older += sorted(folder.glob("libnvrtc.so.1[0-2]*"))
    if older and not is_open("libnvrtc.so"):
        raise errors.UnavailableError(
            f"load compiler: found {older[0]}; expected the run-time compiler of CUDA 13, {LIBRARY}. Fix: pip install "
            '"nvidia-cuda-nvrtc==13.*"; both may be installed at once',
            kind="unavailable",
            operation="load compiler",
            fix='pip install "nvidia-cuda-nvrtc==13.*"; both may be installed at once',
        )
