"""CUDA's run-time compiler, found in the packages of pip. The libraries here are files of no content."""

import pytest

from tokenyard import _nvrtc, errors


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """The files that are opened; the loader itself finds none."""
    opened = []

    def load(path, mode=0):
        if not path.startswith("/"):
            raise OSError("not found")
        opened.append(path.removeprefix(f"{tmp_path}/"))

    monkeypatch.setattr(_nvrtc.ctypes, "CDLL", load)
    folders = [tmp_path / name / "lib" for name in ("cu13", "cuda_nvrtc")]
    for folder in folders:
        folder.mkdir(parents=True)
    monkeypatch.setattr(_nvrtc, "folders", lambda: iter(folders))
    return opened


def test_the_compiler_of_cuda_13_is_opened_behind_what_it_needs(opened, tmp_path):
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (tmp_path / "cu13/lib" / name).touch()
    (tmp_path / "cuda_nvrtc/lib/libnvrtc.so.12").touch()
    _nvrtc.preload()
    assert opened == ["cu13/lib/libnvrtc-builtins.so.13.0", "cu13/lib/libnvrtc.so.13"]


def test_a_compiler_of_cuda_12_alone_is_refused_with_the_line_that_helps(opened, tmp_path):
    (tmp_path / "cuda_nvrtc/lib/libnvrtc.so.12").touch()
    with pytest.raises(
        errors.UnavailableError, match=r"found .*libnvrtc.so.12; expected"
    ) as caught:
        _nvrtc.preload()
    assert "nvidia-cuda-nvrtc==13" in caught.value.fix
    assert opened == []


def test_where_there_is_none_the_kernel_set_has_the_word(opened):
    _nvrtc.preload()
    assert opened == []
