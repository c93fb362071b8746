"""The native module's part in tensors of the drop-in: several arrays at once, records of memory, checks."""

import gc
import importlib.util
import weakref

import numpy as np
import pytest
from test_exchange import same
from test_tensors import alone

import tokenyard
from tokenyard._native import _Anchor, _fits, _Reader, _record_at


class Record:
    """An object with weak references."""


class Capsule:
    """An array of the host by its capsule, which is taken once."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return 1, 0


def taken(capsule):
    return np.from_dlpack(Capsule(capsule))


READER = _Reader(object, taken, False)


def test_arrays_of_an_output_come_at_once_and_those_that_are_not_there_are_none():
    case, comm = alone()
    received, _ = comm.dispatch(case.x[0], case.idx[0], layout="packed")
    names = ("x", "scales", "source", "expert_counts", "ranges")
    x, scales, *others = READER.output(received, names)
    assert scales is None
    same(x, received.x)
    for name, found in zip(names[2:], others, strict=True):
        same(found, getattr(received, name))
    with pytest.raises(ValueError, match="found rows"):
        READER.output(received, ("rows",))
    comm.close()


def test_a_record_is_found_by_the_last_array_until_its_memory_is_not_used_any_more():
    case, comm = alone()
    received, _ = comm.dispatch(case.x[0], case.idx[0], layout="packed")
    record = Record()
    lives = weakref.ref(record)
    x, ranges = READER.output(received, ("x", "ranges"), False, record)
    addresses = [array.__array_interface__["data"][0] for array in (x, ranges)]
    del record, x
    gc.collect()
    assert [_record_at(address) for address in addresses] == [None, lives()]
    assert lives() is not None
    del ranges
    gc.collect()
    assert _record_at(addresses[1]) is None
    assert lives() is None
    comm.close()


def test_the_newest_record_of_an_address_is_found_and_an_older_one_takes_none_away():
    # Where nothing lies.
    address = 8
    older, newer = _Anchor(address, "older"), _Anchor(address, "newer")
    assert _record_at(address) == "newer"
    del older
    assert _record_at(address) == "newer"
    del newer
    assert _record_at(address) is None


@pytest.mark.parametrize(
    ("dtypes", "shape", "fits"),
    [
        ((np.float32,), (2, 300), True),
        ((np.int32, np.float32), (None, 300), True),
        ((np.float32,), (None, None), True),
        ((np.int32,), (2, 300), False),
        ((np.float32,), (2, 301), False),
        ((np.float32,), (None,), False),
        ((np.float32,), (2, 300, None), False),
        ((), (2, 300), False),
    ],
)
def test_a_tensor_fits_by_one_of_the_types_and_by_each_length_that_is_named(dtypes, shape, fits):
    tensor = np.zeros((2, 300), np.float32)
    assert _fits(tensor, tuple(np.dtype(dtype) for dtype in dtypes), shape) is fits


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: no tensor of it went in or came out",
)


def described(tensors):
    return [(t.dtype, t.shape, t.stride(), t.data_ptr(), t.device) for t in tensors]


@needs_torch
def test_torch_makes_the_same_tensors_by_its_functions_and_of_capsules():
    import torch

    case, comm = alone(hidden=256)
    received, handle = comm.dispatch(
        case.x[0], case.idx[0], layout="packed", cast="fp8", scale_layout="column_major"
    )
    names = ("x", "scales", "source", "expert_counts", "ranges")
    # Types without functions of DLPack have capsules read.
    readers = [_Reader(kind, torch._C._from_dlpack, True) for kind in (torch.Tensor, object)]
    outputs = [reader.output(received, names, True) for reader in readers]
    assert described(outputs[0]) == described(outputs[1])
    assert outputs[0][0].dtype == torch.float8_e4m3fn
    as_bytes = [reader.output(received, names)[0] for reader in readers]
    assert described(as_bytes[:1]) == described(as_bytes[1:])
    assert as_bytes[0].dtype == torch.uint8
    assert torch.equal(as_bytes[0], outputs[1][0].view(torch.uint8))
    assert comm.held_bytes > 0
    del received, handle, outputs, as_bytes
    assert comm.held_bytes == 0
    comm.close()


@needs_torch
def test_a_tensor_of_torch_is_described_with_its_strides_and_its_type():
    import torch

    case, comm = alone()
    x, idx = torch.from_numpy(case.x[0]), torch.from_numpy(case.idx[0])
    for given in (x, torch.nn.Parameter(x)):
        same(comm.dispatch(given, idx)[0].x, case.rows(case.sources(0)))
    scales = torch.arange(2.0 * len(x)).view(2, -1).T
    received, _ = comm.dispatch(x.to(torch.float8_e4m3fn), idx, scales=scales)
    same(received.scales, scales[[token for _, token in case.sources(0)]].numpy())
    received, _ = comm.dispatch(torch.empty(0, case.hidden), idx[:0])
    assert received.tokens == 0
    for wrong in (torch.float64, torch.bool):
        with pytest.raises(tokenyard.errors.InvalidInputError, match=f"found type {wrong}"):
            comm.dispatch(x.to(wrong), idx)
    with pytest.raises(tokenyard.errors.InvalidInputError, match="found device meta"):
        comm.dispatch(x.to("meta"), idx)
    comm.close()
