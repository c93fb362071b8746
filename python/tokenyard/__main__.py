"""`python -m tokenyard` says which version this is, which components a config can name, and whose `deep_ep` is
imported."""

import tokenyard
from tokenyard import _names


def main() -> None:
    print(f"tokenyard {tokenyard.__version__}\n")
    components = tokenyard.components()
    columns = ("kind", "name", "version", "about")
    widths = {column: max(len(part[column]) for part in components) for column in columns[:-1]}
    for part in components:
        cells = [part[column].ljust(width) for column, width in widths.items()]
        print("  ".join([*cells, part["about"]]))
    for file in sorted({part["file"] for part in components if part["file"]}):
        print(f"plugin: {file}")
    print()
    print("\n".join(_names.report()))


if __name__ == "__main__":
    main()
