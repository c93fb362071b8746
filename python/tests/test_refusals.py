"""Bad input of one rank is an exception on all of them, before a byte moves, and the communicator goes on."""

import pickle
import types

import numpy as np
import pytest
from oracle import Case
from pool import config
from test_exchange import opened, same

import tokenyard
from tokenyard import errors

CASE = Case(2, seed=9, tokens=(5, 7))
EXPERT_MAJOR = {"layout": "expert_major"}


class OnGpu:
    """A tensor of torch on a device that is not there."""

    def __init__(self, array):
        self.device, self.shape, self.dtype = "cuda:1", array.shape, "torch.float32"

    def data_ptr(self):
        return 4096

    def stride(self):
        return (self.shape[1], 1)


class Negated(OnGpu):
    """A view of torch in host memory that has the opposite of its values."""

    def __init__(self, array):
        super().__init__(array)
        self.device = "cpu"

    def is_neg(self):
        return True


class LikeCupy:
    """An array of CuPy on a device that is not there: it has CUDA's interface alone."""

    def __init__(self, array):
        self.device = types.SimpleNamespace(id=3)
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": "<f4",
            "data": (4096, False),
            "strides": array.strides,
        }


class Broken:
    """A tensor whose library fails."""

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        raise RuntimeError("the library failed")


def with_interface(array, **changes):
    array.__cuda_array_interface__ |= changes
    return array


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


# Each: what is spoilt, how, and what the message says.
DISPATCHES = {
    "a list": ("x", lambda a: a.tolist(), "found list; expected a tensor"),
    "nothing": ("x", lambda a: None, "found NoneType"),
    "a type": ("x", lambda a: a.astype(np.float64), "found type float64; expected one of"),
    "bytes swapped": ("x", lambda a: a.astype(">f4"), "found type >f4"),
    "a width": ("x", lambda a: a[:, :32], "found shape [7, 32]; expected [7, 64]"),
    "too few rows": ("x", lambda a: a[:3], "found shape [3, 64]; expected [7, 64]"),
    "gaps": ("x", lambda a: np.repeat(a, 2, axis=0)[::2], "expected [64, 1]: contiguous rows"),
    "a negative stride": ("x", lambda a: a[::-1], "not negative"),
    "a dimension": ("x", lambda a: a[None, None], "one to three dimensions"),
    "an address": (
        "x",
        lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(np.float32).reshape(a.shape),
        "found address",
    ),
    "a device": ("x", OnGpu, "found memory of device 1; expected host memory"),
    "a negated view": ("x", Negated, "found a view that is negated when it is read"),
    "a device of CuPy": ("x", LikeCupy, "found memory of device 3; expected host memory"),
    "a type of CuPy": (
        "x",
        lambda a: with_interface(LikeCupy(a), typestr="<f8"),
        "found type <f8; expected one of",
    ),
    "strides of CuPy": (
        "x",
        lambda a: with_interface(LikeCupy(a), strides=(254, 4)),
        "expected whole elements",
    ),
    "a broken library": ("x", lambda a: Broken(), "the library failed"),
    "an expert": ("topk_idx", lambda a: a + 100, "expert"),
    "K": ("topk_idx", lambda a: a[:, :2].copy(), "found shape [7, 2]; expected [7, 3]"),
    "an expert twice": ("topk_idx", lambda a: np.zeros_like(a), "expected distinct experts"),
    "a type of ids": ("topk_idx", lambda a: a.astype(np.float32), "found type fp32; expected i64"),
    "a type of weights": ("topk_weights", lambda a: a.astype(np.float16), "expected fp32"),
    "rows of weights": ("topk_weights", lambda a: a[:2], "found shape [2, 3]"),
    "scales with a cast": ("scales", lambda a: a, "found some together with a cast"),
}


def bad_dispatch(world, name):
    what, spoil, says = DISPATCHES[name]
    me = world.rank
    with opened(world, CASE) as comm:
        good = {"x": CASE.x[me], "topk_idx": CASE.idx[me], "topk_weights": CASE.weights[me]}
        bad, options = dict(good), {}
        if what == "scales":
            options["cast"] = "fp8"
        if me == 1:
            bad[what] = spoil(good.get(what, np.ones((7, 1), np.float32)))
            with pytest.raises(errors.InvalidInputError) as raised:
                comm.dispatch(**bad, **options)
            text = str(raised.value)
            assert says in text, text
            assert what in text, text
            assert isinstance(raised.value, ValueError)
            assert raised.value.kind == "invalid_input"
        else:
            with pytest.raises(errors.RefusedError) as raised:
                comm.dispatch(**good, **options)
            assert raised.value.rank == 1
            assert says in str(raised.value)
        received, _ = comm.dispatch(**good)
        same(received.x, CASE.rows(CASE.sources(me)))


@pytest.mark.parametrize("name", DISPATCHES)
def test_a_bad_argument_of_a_dispatch_is_refused_on_all_ranks_and_the_next_one_works(ranks, name):
    ranks(2, bad_dispatch, name)


def too_many(world):
    me = world.rank
    with opened(world, CASE) as comm:
        tokens = 13 if me == 0 else 1
        x = np.ones((tokens, 64), np.float32)
        idx = np.full((tokens, 3), -1, np.int64)
        with pytest.raises(
            tokenyard.Error, match="found 13 tokens; expected at most max_tokens = 12"
        ):
            comm.dispatch(x, idx)


def test_more_tokens_than_m_are_refused(ranks):
    ranks(2, too_many)


def words(world):
    me = world.rank
    with opened(world, CASE) as comm:
        good = CASE.x[me], CASE.idx[me]
        for options, says in [
            ({"layout": "flatt"}, 'found "flatt"; expected "flat"'),
            ({"cast": "fp4"}, 'found "fp4"; expected None, "fp8"'),
            ({"alignment": 4}, 'with "expert_major" alone'),
            ({**EXPERT_MAJOR, "alignment": 5000}, "expected 1 to 4096"),
        ]:
            with pytest.raises(errors.InvalidInputError) as raised:
                comm.dispatch(*good, **options)
            assert says in str(raised.value)
        comm.dispatch(*good)


def test_words_that_mean_nothing_are_refused(ranks):
    ranks(2, words)


def bad_combine(world):
    me = world.rank
    with opened(world, CASE) as comm, opened(world, CASE) as other:
        tokens = CASE.tokens[me]
        received, handle = comm.dispatch(CASE.x[me], CASE.idx[me], CASE.weights[me])
        _, foreign = other.dispatch(CASE.x[me], CASE.idx[me])
        out = np.zeros((tokens, 64), np.float32)
        for arguments, options, says in [
            ((foreign, received.x), {}, "the handle belongs to another communicator"),
            ((None, received.x), {}, "handle: found NoneType"),
            ((handle, "rows"), {}, "x: found str"),
            ((handle, CASE.x[me][:1]), {}, "x: found shape [1, 64]"),
            ((handle, received.ids), {}, "x: found type i32; expected bf16 or fp16 or fp32"),
            ((handle, received.x, received.x), {}, "weights: found shape"),
            ((handle, received.x), {"bias": [out] * 3}, "bias: found 3 tensors"),
            ((handle, received.x), {"bias": [None, out]}, "the second without the first"),
            ((handle, received.x), {"bias": out[:1]}, "bias 0: found shape [1, 64]"),
            ((handle, received.x), {"out": out[:1]}, "out: found shape [1, 64]"),
            ((handle, received.x), {"out": read_only(out)}, "may only be read"),
            (
                (handle, received.x),
                {"out": np.zeros((tokens, 128), np.float32)[:, ::2]},
                "rows without gaps",
            ),
            ((handle, received.x), {"missing": out}, "missing: found type fp32; expected u8"),
            ((handle, received.x), {"out_weights": out}, "expected both or neither"),
            ((handle, received.x), {"weighted": True}, "flat rows are merged already"),
        ]:
            if me == 1:
                with pytest.raises(errors.InvalidInputError) as raised:
                    comm.combine(*arguments, **options)
            else:
                with pytest.raises(errors.RefusedError) as raised:
                    comm.combine(handle, received.x)
                assert raised.value.rank == 1
            assert says in str(raised.value), (says, str(raised.value))
        for arguments, says in [
            ((handle, CASE.x[me][:1]), "x: found shape [1, 64]"),
            ((foreign, CASE.x[me]), "the handle belongs to another communicator"),
            ((handle, object()), "x: found object"),
        ]:
            kind = errors.InvalidInputError if me == 1 else errors.RefusedError
            with pytest.raises(kind) as raised:
                comm.replay(*(arguments if me == 1 else (handle, CASE.x[me])))
            assert says in str(raised.value), (says, str(raised.value))
        comm.combine(handle, received.x, out=out, missing=np.ones(tokens, np.uint8))


def test_bad_arguments_of_combine_and_replay_are_refused_on_all_ranks_and_the_next_one_works(ranks):
    ranks(2, bad_combine)


def local(world):
    me = world.rank
    with opened(world, CASE) as comm:
        received, handle = comm.dispatch(CASE.x[me], CASE.idx[me])
        for call in [
            lambda: comm.combine_input(handle, "float64"),
            lambda: comm.combine_input(handle, "int32"),
            lambda: comm.copy_out(received, x=np.zeros((1, 64), np.float32)),
            lambda: comm.copy_out(received, slots=np.zeros((1, 3), np.int32)),
            lambda: comm.copy_out(received, y=np.zeros((1, 3), np.int32)),
        ]:
            with pytest.raises(errors.InvalidInputError):
                call()
    with pytest.raises(errors.InvalidInputError, match="the communicator was closed"):
        comm.dispatch(CASE.x[me], CASE.idx[me])
    with pytest.raises(errors.InvalidInputError, match="the communicator was closed"):
        comm.combine(handle, received.x)


def test_local_calls_and_calls_after_close_are_refused_without_the_others(ranks):
    ranks(2, local)


def unreceived(world):
    me = world.rank
    comm = opened(world, CASE)
    pending = comm.dispatch_send(CASE.x[me], CASE.idx[me])
    comm.dispatch_send(CASE.x[me], CASE.idx[me])
    with pytest.raises(errors.InvalidInputError, match="sent and not received"):
        comm.dispatch(CASE.x[me], CASE.idx[me])
    received, _ = pending.recv()
    same(received.x, CASE.rows(CASE.sources(me)))
    world.barrier("both have seen it")
    with pytest.raises(tokenyard.Error, match=r"sent and not received|failed: close communicator"):
        comm.close()


def test_an_operation_that_is_dropped_counts_as_open(ranks):
    ranks(2, unreceived)


def mismatch(world):
    with pytest.raises(errors.MismatchError, match="topk") as raised:
        tokenyard.Communicator(world, config(), 8, 2 + world.rank, 64, 4)
    return type(raised.value).__name__


def test_ranks_that_differ_in_a_size_are_named(ranks):
    assert ranks(2, mismatch) == ["MismatchError"] * 2


def surveys_that_fail(world):
    other = tokenyard.Config.built_in("cpu", deadline_ms=20_000 + world.rank)
    with pytest.raises(errors.MismatchError, match="deadline_ms"):
        tokenyard.survey(world, other)
    kind = errors.InvalidInputError if world.rank == 1 else errors.RefusedError
    with pytest.raises(kind, match=r"found int; expected a tokenyard\.Config"):
        tokenyard.survey(world, 7 if world.rank == 1 else config())
    return tokenyard.survey(world, config())["domains"]


def test_a_survey_that_fails_on_one_rank_fails_on_all_and_the_world_goes_on(ranks):
    assert ranks(2, surveys_that_fail) == [1, 1]


def test_a_config_that_cannot_be_is_refused_with_its_line(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"test\.toml:1"):
        tokenyard.Config.parse('[kernels]\nus = "cpu"\n', "test.toml")
    with pytest.raises(ValueError, match=r"no\.toml"):
        tokenyard.Config.load(tmp_path / "no.toml")
    world = tokenyard.World(0, 1, exchange=lambda mine: [mine])
    with pytest.raises(errors.InvalidInputError, match=r"found int; expected a tokenyard\.Config"):
        tokenyard.Communicator(world, 7, 8, 2, 64, 4)
    world.close()
    with pytest.raises(errors.InvalidInputError, match="the world was left"):
        world.barrier("end")


def test_an_exchange_that_fails_is_the_cause_of_the_error():
    def exchange(mine):
        raise KeyError("the store is down")

    with pytest.raises(errors.SystemCallError, match="the store is down") as raised:
        tokenyard.World(0, 2, exchange=exchange)
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("ConfigError", ValueError),
        ("InvalidInputError", ValueError),
        ("MismatchError", ValueError),
        ("DeadlineError", TimeoutError),
        ("PeerLostError", ConnectionError),
        ("TransportError", ConnectionError),
        ("ProtocolError", ConnectionError),
        ("FullError", MemoryError),
        ("UnsupportedError", NotImplementedError),
        ("PluginError", OSError),
        ("UnavailableError", OSError),
        ("SystemCallError", OSError),
    ],
)
def test_every_exception_is_also_what_python_calls_it_and_can_be_pickled(name, base):
    error = getattr(errors, name)("what", kind="k", rank=3, operation="o", fix="f")
    assert isinstance(error, base)
    assert isinstance(error, tokenyard.Error)
    assert isinstance(error, RuntimeError)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.kind, copy.rank, copy.operation, copy.fix) == ("what", "k", 3, "o", "f")


def by_hand(world):
    me = world.rank
    with opened(world, CASE) as comm:
        for operation in ("dispatch", "replay", "combine"):
            received, handle = comm.dispatch(CASE.x[me], CASE.idx[me])
            calls = {
                "dispatch": lambda: comm.dispatch(CASE.x[me], CASE.idx[me]),
                "replay": lambda handle=handle: comm.replay(handle, CASE.x[me]),
                "combine": lambda handle=handle, x=received.x: comm.combine(handle, x),
            }
            if me == 1:
                with pytest.raises(errors.InvalidInputError, match="found 3; expected 4"):
                    comm.refuse(operation, "found 3; expected 4")
            else:
                with pytest.raises(errors.RefusedError, match="found 3; expected 4"):
                    calls[operation]()
            calls[operation]()
        with pytest.raises(errors.InvalidInputError, match='operation: found "leave"'):
            comm.refuse("leave", "never sent")


def test_a_library_refuses_an_operation_before_it_calls_it(ranks):
    ranks(2, by_hand)
