"""Distributions that install the top-level names `deep_ep` and `deep_ep_cpp`. pip lets a later one overwrite files of
an earlier one."""

import base64
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

OURS = "tokenyard-deep-ep"
# The package, and DeepEP's native module. A binary `deep_ep_cpp.*.so` beside `deep_ep_cpp.py` wins its import.
NAMES = ("deep_ep", "deep_ep_cpp")


@dataclass(frozen=True)
class Claimant:
    """A distribution with files of these names, and those of them that are not as it installed them."""

    name: str
    version: str
    folder: Path
    files: tuple[str, ...]
    changed: tuple[str, ...]

    def owns(self, file: Path) -> bool:
        """Whether it has installed this file, and the file is as it was."""
        return any(self.folder / name == file for name in set(self.files) - set(self.changed))


def _is_changed(file: importlib.metadata.PackagePath) -> bool:
    path = Path(str(file.locate()))
    if file.hash is None:
        return False
    if not path.is_file():
        return True
    digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value


def claimants() -> list[Claimant]:
    """All distributions of this environment that have files of these names."""
    found = []
    for distribution in importlib.metadata.distributions():
        files = [
            file
            for file in distribution.files or []
            if file.parts[0].partition(".")[0] in NAMES and "__pycache__" not in file.parts
        ]
        if files:
            changed = tuple(str(file) for file in files if _is_changed(file))
            name, version = distribution.metadata["Name"], distribution.version
            folder = Path(str(distribution.locate_file("")))
            found.append(Claimant(name, version, folder, tuple(map(str, files)), changed))
    return sorted(found, key=lambda one: one.name)


def _imported(name: str, claims: list[Claimant]) -> str:
    """The file that `import name` takes, and whose it is."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return f"{name}: not installed"
    owners = [one.name for one in claims if one.owns(Path(str(spec.origin)))]
    return f"{name}: {spec.origin}, of {' and '.join(owners) or 'no distribution'}"


def report() -> list[str]:
    """Lines about `import deep_ep` and `import deep_ep_cpp`: which files they take, and whose files others have
    overwritten."""
    claims = claimants()
    lines = [_imported(name, claims) for name in NAMES]
    for one in claims:
        lines.append(f"  {one.name} {one.version}: {len(one.files)} files")
        if one.changed:
            lines[-1] += f", overwritten or gone: {', '.join(one.changed)}"
    if len(claims) > 1:
        lines.append(
            f"  fix: uninstall all of these, then install the one you mean ({OURS} is ours)"
        )
    return lines
