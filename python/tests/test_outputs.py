"""The native module's part in tensors of the drop-in: several arrays at once, records of memory, checks."""

import gc
import weakref

import numpy as np
import pytest
from test_exchange import same
from test_tensors import alone

from tokenyard._native import _Anchor, _fits, _record_at


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


def test_arrays_of_an_output_come_at_once_and_those_that_are_not_there_are_none():
    case, comm = alone()
    received, _ = comm.dispatch(case.x[0], case.idx[0], layout="packed")
    names = ("x", "scales", "source", "expert_counts", "ranges")
    x, scales, *others = received._tensors(taken, names)
    assert scales is None
    same(x, received.x)
    for name, found in zip(names[2:], others, strict=True):
        same(found, getattr(received, name))
    with pytest.raises(ValueError, match="name of no array: rows"):
        received._tensors(taken, ("rows",))
    comm.close()


def test_a_record_is_found_by_the_last_array_until_its_memory_is_not_used_any_more():
    case, comm = alone()
    received, _ = comm.dispatch(case.x[0], case.idx[0], layout="packed")
    record = Record()
    lives = weakref.ref(record)
    x, ranges = received._tensors(taken, ("x", "ranges"), False, record)
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
