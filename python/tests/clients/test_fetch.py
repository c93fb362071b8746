"""Fetches of clients without a network: a stand-in of pip writes wheels, or gives none."""

import zipfile
from pathlib import Path

import fetch
import pytest

REASON = "ERROR: No matching distribution found"


@pytest.fixture
def missing(monkeypatch):
    """The packages that the stand-in does not give."""
    names = set()

    def download(words):
        name = words[-1].partition("==")[0]
        if name in names:
            raise OSError(f"{REASON} for {name}")
        with zipfile.ZipFile(Path(words[words.index("--dest") + 1]) / "one.whl", "w") as wheel:
            for pattern in fetch.pins()[name]["files"]:
                wheel.writestr(pattern.replace("*", "any"), "")

    monkeypatch.setattr(fetch, "download", download)
    return names


@pytest.mark.parametrize("name", fetch.pins())
def test_only_a_client_that_is_required_fails_the_fetch(name, missing, tmp_path, capsys):
    missing.add(name)
    is_required = fetch.pins()[name]["required"]
    assert fetch.main(tmp_path) == (1 if is_required else 0)
    reason = f"{REASON} for {name}"
    assert f"not fetched: {reason}" in capsys.readouterr().err
    assert fetch.excused(tmp_path) == ({} if is_required else {name: reason})
    assert not fetch.folder_of(tmp_path, name).exists()


def test_a_client_that_comes_later_is_excused_no_more(missing, tmp_path):
    missing.update(("lmdeploy", "sglang"))
    assert fetch.main(tmp_path) == 0
    assert sorted(fetch.excused(tmp_path)) == ["lmdeploy", "sglang"]
    missing.clear()
    assert fetch.main(tmp_path) == 0
    assert fetch.excused(tmp_path) == {}
    assert not list(tmp_path.glob("*.reason"))


def test_the_clients_that_are_required_cannot_be_excused(tmp_path):
    required = {name for name, pin in fetch.pins().items() if pin["required"]}
    assert required == {"megatron-core", "torchtitan", "vllm"}
    assert required.isdisjoint(fetch.excused(tmp_path))


def test_the_reason_is_the_last_line_of_pip():
    with pytest.raises(OSError, match=r"^ERROR: why$"):
        fetch.download(["sh", "-c", "echo first >&2; echo ERROR: why >&2; exit 1"])
    with pytest.raises(OSError, match=r"^pip ended with 3$"):
        fetch.download(["sh", "-c", "exit 3"])
