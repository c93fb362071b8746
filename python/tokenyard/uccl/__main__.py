"""`python -m tokenyard.uccl SCRIPT ARGS` runs a script of UCCL-EP's benchmarks on tokenyard."""

import argparse
import runpy
import sys
from pathlib import Path

from tokenyard.uccl import fill_modules

_EPILOG = """example, for each of two GPUs a process:

  torchrun --nproc-per-node 2 -m tokenyard.uccl uccl/ep/bench/test_low_latency.py --num-tokens 128 --num-experts 288

exit codes:
  0  the script ended
  1  the script raised an exception, whose traceback is on the standard error
  2  the words of the command are wrong, or there is no such script
  N  the script ended by sys.exit(N)
"""


def main(words: list[str]) -> int:
    """Runs the script of the command line. Its `sys.exit` and its exceptions go on."""
    parser = argparse.ArgumentParser(
        prog="python -m tokenyard.uccl",
        description="Runs a script of UCCL-EP's benchmarks, unmodified: its modules buffer, utils, uccl and uccl.ep "
        "are tokenyard's. The config is that of the drop-in for DeepEP: TOKENYARD_CONFIG, or one for this host.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "script", type=Path, help="the file, such as uccl/ep/bench/test_intranode.py"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="go to the script as they are")
    # The words behind the script are its own, also a `--` in front, which argparse would drop.
    count = next((n for n, word in enumerate(words, 1) if not word.startswith("-")), len(words))
    found = parser.parse_args(words[:count])
    if not found.script.is_file():
        parser.error(f"SCRIPT: found {str(found.script)!r}; expected a file")
    fill_modules()
    # As Python does for a script: its folder is where it finds its neighbours.
    sys.path.insert(0, str(found.script.resolve().parent))
    sys.argv = [str(found.script), *words[count:]]
    runpy.run_path(str(found.script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
