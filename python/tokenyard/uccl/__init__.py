"""UCCL-EP's names, on tokenyard: `python -m tokenyard.uccl SCRIPT` runs a script of UCCL's benchmarks as it is.

See docs/uccl.md of the repository. It needs what the drop-in for DeepEP needs.
"""

import importlib
import sys

# UCCL's modules, which its scripts import, and ours.
MODULES = {
    "uccl": "tokenyard.uccl",
    "uccl.ep": "tokenyard.uccl.ep",
    "utils": "tokenyard.uccl.utils",
    "buffer": "tokenyard.uccl.buffer",
}


def fill_modules() -> None:
    """Makes `import uccl`, `uccl.ep`, `utils` and `buffer` mean tokenyard's in this process.

    The last two are files beside UCCL's scripts, which Python would find first.
    """
    for name, ours in MODULES.items():
        sys.modules[name] = importlib.import_module(ours)
