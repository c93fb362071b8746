"""Tensors of all sorts, in and out."""

import ctypes
import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from oracle import Case
from test_exchange import opened, same

import tokenyard

CASE = Case(2, seed=7, hidden=256)


# Tensors of this module's own library, so that leaks show.
ALIVE = weakref.WeakSet()


class LikeTorch:
    """The part of a torch tensor that tokenyard uses, over an array of numpy."""

    def __init__(self, array):
        self.array, self.device = array, "cpu"
        self.shape, self.dtype = array.shape, f"torch.{array.dtype.name}"
        ALIVE.add(self)

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)


class ByDlpack:
    """An array that says what it is by DLPack alone."""

    def __init__(self, array, is_versioned):
        self.array, self.is_versioned = array, is_versioned

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.is_versioned and "max_version" in options:
            raise TypeError("this library is older")
        assert options.get("stream") is None
        return self.array.__dlpack__(**options)


SORTS = {
    "numpy": lambda array: array,
    "torch": LikeTorch,
    "dlpack": lambda array: ByDlpack(array, is_versioned=False),
    "dlpack_versioned": lambda array: ByDlpack(array, is_versioned=True),
}


def dispatched(world, sort, id_type):
    me, make = world.rank, SORTS[sort]
    with opened(world, CASE) as comm:
        idx = CASE.idx[me].astype(id_type)
        received, handle = comm.dispatch(make(CASE.x[me]), make(idx), make(CASE.weights[me]))
        same(received.x, CASE.rows(CASE.sources(me)))
        same(received.ids, CASE.flat(me)[0])
        out = np.zeros((CASE.tokens[me], CASE.hidden), np.float32)
        bias = make(np.full_like(out, 5))
        comm.combine(handle, received.x, bias=bias, out=make(out))
        assert out.any()
    gc.collect()
    del bias
    assert not ALIVE, "tokenyard keeps no tensor that it has done with"


@pytest.mark.parametrize("id_type", [np.int64, np.int32])
@pytest.mark.parametrize("sort", SORTS)
def test_tensors_of_every_library_are_read_where_they_lie(ranks, sort, id_type):
    ranks(2, dispatched, sort, id_type)


def strided(world):
    me = world.rank
    with opened(world, CASE) as comm:
        x = (CASE.x[me] * 3).astype(np.int8).view(np.uint8)
        scales = np.arange(4 * len(x), dtype=np.float32).reshape(4, len(x)).T
        # Every second id of a wider array: 32-bit ids are copied anyway, so they may have gaps.
        wide = np.repeat(CASE.idx[me].astype(np.int32), 2, axis=1)[:, ::2]
        received, _ = comm.dispatch(x, wide, scales=scales)
        sources = CASE.sources(me)
        assert received.scales.shape == (len(sources), 4)
        mine = [token for source, token in sources if source == me]
        rows = [row for row, (source, _) in enumerate(sources) if source == me]
        same(np.asarray(received.scales)[rows], scales[mine])
        same(np.asarray(received.x)[rows], x[mine])


def test_scales_and_32_bit_ids_may_have_strides(ranks):
    ranks(2, strided)


def row_types(world, name):
    me = world.rank
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    with opened(world, CASE) as comm:
        x = CASE.x[me].astype(dtype)
        received, handle = comm.dispatch(x, CASE.idx[me])
        assert received.x.dtype == name
        rows = np.asarray(received.x).view(dtype)
        same(rows, CASE.rows(CASE.sources(me)).astype(dtype))
        out, _ = comm.combine(handle, received.x)
        assert out.dtype == name
        times = np.array([len(CASE.ranks_of(me, t)) for t in range(CASE.tokens[me])])
        found = np.asarray(out).view(dtype).astype(np.float32)
        expected = x.astype(np.float32) * times[:, None]
        np.testing.assert_allclose(found, expected, rtol=2**-8)
        same(comm.combine_input(handle, dtype).shape, rows.shape)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_rows_of_every_type_arrive_bit_by_bit(ranks, name):
    ranks(2, row_types, name)


def cast(world, word):
    me, groups = world.rank, CASE.hidden // 128
    with opened(world, CASE) as comm:
        received, _ = comm.dispatch(CASE.x[me], CASE.idx[me], cast=word)
        expected = CASE.rows(CASE.sources(me)).reshape(-1, groups, 128)
        assert received.x.dtype == "float8_e4m3fn"
        codes = np.from_dlpack(received.x)
        assert codes.dtype == np.uint8
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(expected.shape)
        scales = np.asarray(received.scales)
        if word == "fp8_ue8m0":
            assert (received.scales.dtype, scales.shape) == ("int32", (len(expected), 1))
            exponents = scales.view(np.uint8)[:, :groups].astype(np.int32)
            assert not scales.view(np.uint8)[:, groups:].any()
            scales = np.exp2(exponents - 127.0)
        largest = np.abs(expected).max(axis=2)
        if word == "fp8":
            np.testing.assert_allclose(scales, largest / 448, rtol=1e-6)
        else:
            same(np.log2(scales), np.ceil(np.log2(largest / 448)))
        error = np.abs(values * scales[..., None] - expected)
        # Three bits of mantissa; below the smallest normal number, steps of 2**-9.
        assert (
            error <= np.maximum(np.abs(expected) / 16, scales[..., None] * 2**-10) * 1.001
        ).all()


@pytest.mark.parametrize("word", ["fp8", "fp8_round", "fp8_ue8m0"])
def test_rows_are_cast_on_their_way_with_a_scale_per_128_channels(ranks, word):
    ranks(2, cast, word)


def alone(hidden=64, **options):
    """A communicator of one rank, in this process."""
    case = Case(1, seed=8, tokens=(6,), hidden=hidden)
    world = tokenyard.World(0, 1, exchange=lambda mine: [mine])
    return case, opened(world, case, **options)


def test_outputs_leave_by_both_capsules_and_by_numpys_interface_without_a_copy():
    case, comm = alone()
    received, _ = comm.dispatch(case.x[0], case.idx[0])
    array = received.x
    assert array.__dlpack_device__() == (1, 0)
    assert (array.shape, array.stride()) == ((received.rows, case.hidden), (case.hidden, 1))
    assert array.nbytes == received.rows * case.hidden * 4
    assert len(array) == received.rows
    assert repr(array) == f"tokenyard.Array(shape=[{received.rows}, 64], dtype=float32, device=cpu)"
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    assert name(array.__dlpack__()) == b"dltensor"
    assert name(array.__dlpack__(max_version=(1, 2))) == b"dltensor_versioned"
    for found in (np.from_dlpack(array), np.asarray(array)):
        assert found.ctypes.data == array.data_ptr()
        assert np.shares_memory(found, np.asarray(received.x))
    np.asarray(array)[0, 0] = 42
    assert np.from_dlpack(received.x)[0, 0] == 42, "rows may be changed in place"
    for options in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError):
            array.__dlpack__(**options)
    comm.close()


def test_a_region_is_free_again_when_the_last_tensor_over_it_goes_on_whatever_thread():
    case, comm = alone(hidden=8192)
    fill = case.x[0], case.idx[0]
    kept = []

    def fill_up():
        while len(kept) < 1000:
            kept.append(np.from_dlpack(comm.dispatch(*fill)[0].x))

    with pytest.raises(tokenyard.errors.FullError, match="arena") as full:
        fill_up()
    assert isinstance(full.value, MemoryError)
    assert full.value.kind == "full"
    assert len(kept) > 2
    with pytest.raises(MemoryError):
        comm.dispatch(*fill)
    part = kept.pop()[:1]
    with pytest.raises(MemoryError):
        comm.dispatch(*fill)
    thread = threading.Thread(target=lambda old: old.clear(), args=([part],))
    del part
    thread.start()
    thread.join()
    received, _ = comm.dispatch(*fill)
    same(received.x, case.rows(case.sources(0)))
    comm.close()


def test_the_deleter_needs_no_gil():
    case, comm = alone(hidden=8192)
    fill = case.x[0], case.idx[0]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    used = b"used_dltensor"
    # More than the arena has room for: the deleter frees each, or it is full.
    for _ in range(100):
        capsule = comm.dispatch(*fill)[0].x.__dlpack__()
        managed = pointer(capsule, b"dltensor")
        rename(capsule, used)
        # Behind the tensor (48 bytes) and the context. ctypes calls it without the GIL.
        deleter = ctypes.cast(managed + 56, ctypes.POINTER(ctypes.c_void_p))[0]
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(managed)
    comm.close()


def test_outputs_and_handles_outlive_their_communicator_and_their_world():
    case, comm = alone()
    received, handle = comm.dispatch(case.x[0], case.idx[0])
    array = np.from_dlpack(received.x)
    comm.close()
    del comm
    gc.collect()
    same(array, case.rows(case.sources(0)))
    same(received.ids, case.flat(0)[0])
    assert handle.tokens == 6
    del received, handle
    gc.collect()
    same(array, case.rows(case.sources(0)))


def test_handles_are_refused_when_all_are_alive_and_come_back_when_dropped():
    case, comm = alone(handles=2)
    handles = [comm.dispatch(case.x[0], case.idx[0])[1] for _ in range(2)]
    with pytest.raises(tokenyard.errors.FullError, match="all 2 handles"):
        comm.dispatch(case.x[0], case.idx[0])
    handles.pop()
    comm.dispatch(case.x[0], case.idx[0])
    comm.close()
