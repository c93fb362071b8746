"""Distributions that install the top-level name `deep_ep`. pip lets a later one overwrite files of an earlier one."""

import base64
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

OURS = "tokenyard-deep-ep"
NAME = "deep_ep"


@dataclass(frozen=True)
class Claimant:
    """A distribution with files of that name, and those of them that are not as it installed them."""

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
    """All distributions of this environment that have files of the package `deep_ep`."""
    found = []
    for distribution in importlib.metadata.distributions():
        files = [
            file
            for file in distribution.files or []
            if file.parts[0] == NAME and "__pycache__" not in file.parts
        ]
        if files:
            changed = tuple(str(file) for file in files if _is_changed(file))
            name, version = distribution.metadata["Name"], distribution.version
            folder = Path(str(distribution.locate_file("")))
            found.append(Claimant(name, version, folder, tuple(map(str, files)), changed))
    return sorted(found, key=lambda one: one.name)


def report() -> list[str]:
    """Lines about `import deep_ep`: which file it takes, and whose files others have overwritten."""
    spec = importlib.util.find_spec(NAME)
    if spec is None:
        return [f"{NAME}: not installed"]
    claims = claimants()
    file = str(spec.origin)
    owners = [one.name for one in claims if one.owns(Path(file))]
    lines = [f"{NAME}: {file}, of {' and '.join(owners) or 'no distribution'}"]
    for one in claims:
        lines.append(f"  {one.name} {one.version}: {len(one.files)} files")
        if one.changed:
            lines[-1] += f", overwritten or gone: {', '.join(one.changed)}"
    if len(claims) > 1:
        lines.append(
            f"  fix: uninstall all of these, then install the one you mean ({OURS} is ours)"
        )
    return lines
