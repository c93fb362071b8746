"""`python -m tokenyard` says which version this is, which components a config can name, and whose `deep_ep` is
imported. `python -m tokenyard demo` runs an exchange and checks it."""

import sys

import tokenyard
from tokenyard import _demo, _names


def _report() -> None:
    print(f"tokenyard {tokenyard.__version__}\n")
    components = tokenyard.components()
    columns = ("kind", "name", "version", "about")
    widths = {column: max(len(part[column]) for part in components) for column in columns[:-1]}
    for part in components:
        cells = [part[column].ljust(width) for column, width in widths.items()]
        print("  ".join([*cells, part["about"]]))
    for file in sorted({part["file"] for part in components if part["file"]}):
        print(f"plugin: {file}")
    print("\n`python -m tokenyard demo` runs an exchange between two processes and checks it\n")
    print("\n".join(_names.report()))


def main() -> int:
    words = sys.argv[1:]
    if words == ["demo"]:
        return _demo.main()
    if words:
        print(f"error: found {' '.join(words)!r}; expected nothing, or demo", file=sys.stderr)
        return 2
    _report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
