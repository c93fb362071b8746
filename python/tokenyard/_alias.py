"""The name `deep_ep`, for programs that import it."""

import importlib
import os
import pkgutil
import sys
import warnings

OURS = "tokenyard.deep_ep"
# The index of a process on its host, as launchers state it. Slurm's is last: it may be that of another launcher.
LOCAL_RANKS = (
    "TOKENYARD_LOCAL_RANK",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)


def alias_deep_ep() -> None:
    """Makes `import deep_ep` and `import deep_ep_cpp` mean `tokenyard.deep_ep` in this process.

    Call it before anything imports them. The distribution tokenyard-deep-ep does it for every process. Raises
    ImportError where another deep_ep was imported already, and where numpy or ml_dtypes is missing.
    """
    found = sys.modules.get("deep_ep")
    if found is not None and not getattr(found, "_is_tokenyard", False):
        raise ImportError(
            f"deep_ep: found {getattr(found, '__file__', 'a module')}, imported already; expected none: call "
            "tokenyard.alias_deep_ep() first",
            name="deep_ep",
        )
    package = importlib.import_module(OURS)
    # Every module by both names, or a second copy of it would be imported, with classes of its own.
    for module in pkgutil.walk_packages(package.__path__, f"{OURS}."):
        importlib.import_module(module.name)
    for name in [name for name in sys.modules if name == OURS or name.startswith(f"{OURS}.")]:
        sys.modules["deep_ep" + name.removeprefix(OURS)] = sys.modules[name]
    sys.modules["deep_ep_cpp"] = sys.modules[f"{OURS}._C"]


def warn_of_strangers(folder: str) -> None:
    """Warns of files beside `deep_ep/__init__.py` of tokenyard-deep-ep: another distribution of that name left them.

    No world is there yet that could show the text once. The files are those of a host, so its first rank shows it.
    """
    strangers = sorted(set(os.listdir(folder)) - {"__init__.py", "__pycache__"})
    place = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0")
    if strangers and place == "0":
        warnings.warn(
            f"deep_ep: found {', '.join(strangers)} in {folder}, of another distribution; tokenyard's modules are "
            "used: see python -m tokenyard",
            RuntimeWarning,
            stacklevel=3,
        )
