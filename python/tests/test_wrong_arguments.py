"""A number, word or truth value that cannot be is an exception of the package on all ranks of a call, whichever call
and argument it is of, and what is open goes on."""

import ast
import contextlib
import inspect
import os
import pathlib

import numpy as np
import pytest
from oracle import Case
from pool import config
from test_deep_ep_normal import buffer_of, layout_of
from test_exchange import opened, same

import tokenyard
from tokenyard import errors
from tokenyard.deep_ep import Buffer, ElasticBuffer

CASE = Case(2, seed=9, tokens=(5, 7))
SIZES = {"experts": 8, "topk": 3, "hidden": 64, "max_tokens": 12}
INTEGER, TRUTH, WORD = "an integer from 0 to", "True or False", "a str"
# Values that are refused where such a one is expected.
WRONG = {INTEGER: (-1, 2**70, 1.5, "4"), TRUTH: (2, "yes"), WORD: (7, b"flat")}
OWN, OTHERS = errors.InvalidInputError, errors.RefusedError


class Calls:
    """Right calls of the package, by name. Each takes arguments that replace others."""

    def __init__(self, world, comm):
        me, self._world, self._comm, self.layout = world.rank, world, comm, "expert_major"
        self._x, self._routing = CASE.x[me], (CASE.idx[me], CASE.weights[me])
        self._received, self._handle = comm.dispatch(self._x, *self._routing)

    def _finished(self, call, *arguments, **options):
        pending = call(*arguments, **options)
        return pending.recv() if hasattr(pending, "recv") else pending

    def _dispatch(self, name, options):
        call = getattr(self._comm, name)
        # A rank that names no layout refuses a flat dispatch.
        options = {"layout": self.layout, **options}
        return self._finished(call, self._x, *self._routing, **options)

    def of(self, name):
        comm, received, handle = self._comm, self._received, self._handle
        rows = {"replay": self._x, "combine": received.x}
        return {
            "memory_needed": lambda **o: tokenyard.memory_needed(
                config(), **{"ranks": 2, **SIZES, **o}
            ),
            "routing_counts": lambda **o: tokenyard.routing_counts(
                self._routing[0], **{"experts": 8, "ranks": 2, **o}
            ),
            "Config.built_in": lambda **o: tokenyard.Config.built_in("cpu", **o),
            "World": lambda **o: tokenyard.World(
                **{"rank": 0, "ranks": 1, "exchange": lambda mine: [mine], **o}
            ).close(),
            "Communicator": lambda **o: tokenyard.Communicator(
                self._world, config(), **{**SIZES, **o}
            ).close(),
            "Communicator.refuse": lambda **o: comm.refuse(
                **{"operation": "dispatch", "why": "why", **o}
            ),
            "Communicator.copy_out": lambda **o: comm.copy_out(received, **o),
            "Communicator.count_routing": lambda **o: comm.count_routing(
                self._routing[0],
                np.zeros(2, np.int32),
                np.zeros(8, np.int32),
                np.zeros((len(self._x), 2), np.uint8),
                **o,
            ),
            "Communicator.release_after": lambda streams: comm.release_after([streams]),
            "Communicator.mask_rank": lambda rank: comm.mask_rank(rank),
            "Communicator.unmask_rank": lambda rank=0: comm.unmask_rank(rank),
            **{
                f"Communicator.{name}": lambda name=name, **o: self._dispatch(name, o)
                for name in ("dispatch", "dispatch_send")
            },
            **{
                f"Communicator.{name}{half}": lambda name=name, half=half, **o: self._finished(
                    getattr(comm, name + half), handle, rows[name], **o
                )
                for name in rows
                for half in ("", "_send")
            },
        }[name]


# Calls that no other rank takes part in.
LOCAL = {
    "memory_needed",
    "routing_counts",
    "Config.built_in",
    "World",
    "Communicator.refuse",
    "Communicator.copy_out",
    "Communicator.count_routing",
    "Communicator.release_after",
    "Communicator.mask_rank",
}


def kind_of(annotation):
    """The kind of a parameter that is judged with its call; none of objects, which are read by what they have."""
    plain = annotation.removesuffix(" | None")
    if plain in ("int", "Sequence[int]"):
        return INTEGER
    if plain == "bool":
        return TRUTH
    if plain in ("str", "_Layout", "_Cast") or plain.startswith("Literal["):
        return WORD
    return None


def judged(function):
    """The parameters of a function of the stub that are judged, and their kinds."""
    parameters = function.args.args + function.args.kwonlyargs
    kinds = {it.arg: kind_of(ast.unparse(it.annotation)) for it in parameters if it.annotation}
    return [(name, kind) for name, kind in kinds.items() if kind]


def native_arguments():
    """(call, parameter, kind) of what callers give to the native module, by its stub."""
    stub = ast.parse(pathlib.Path(tokenyard.__file__).with_name("_native.pyi").read_text())
    found = []
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for function in node.body:
                name = getattr(function, "name", "_")
                if name == "__new__":
                    found += [(node.name, *it) for it in judged(function)]
                elif not name.startswith("_"):
                    found += [(f"{node.name}.{name}", *it) for it in judged(function)]
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found += [(node.name, *it) for it in judged(node)]
    # Other calls are of one rank, or are those by which ranks meet: Python raises a TypeError for what is no word.
    return [it for it in found if it[2] == INTEGER or it[0].startswith("Communicator")]


NATIVE = native_arguments()


def refused(world, comm, name, call, parameter, kind):
    for value in WRONG[kind]:
        if name in LOCAL or world.rank == 1:
            with pytest.raises(OWN) as raised:
                call(**{parameter: value})
            says = f"{parameter}: found {value!r}; expected {kind}"
            assert says in str(raised.value), str(raised.value)
        else:
            with pytest.raises(OTHERS, match=f"expected {kind}") as raised:
                call()
            assert raised.value.rank == 1, repr(raised.value)
        received, _ = comm.dispatch(CASE.x[world.rank], CASE.idx[world.rank])
        same(received.x, CASE.rows(CASE.sources(world.rank)))


def all_refused(world, name):
    # Exceptions keep the handles of their frames for a while.
    with opened(world, CASE, handles=64) as comm:
        calls = Calls(world, comm)
        call = calls.of(name)
        for _, parameter, kind in (it for it in NATIVE if it[0] == name):
            calls.layout = "flat" if parameter == "layout" else "expert_major"
            refused(world, comm, name, call, parameter, kind)
    with opened(world, CASE):
        pass


@pytest.mark.parametrize("name", sorted({name for name, *_ in NATIVE}))
def test_what_is_no_number_word_or_truth_value_is_refused_in_every_native_call(ranks, name):
    ranks(2, all_refused, name)


def test_defaults_are_those_of_the_stub():
    assert len(NATIVE) >= 70
    stub = ast.parse(pathlib.Path(tokenyard.__file__).with_name("_native.pyi").read_text())
    (communicator,) = [it for it in stub.body if getattr(it, "name", "") == "Communicator"]
    functions = {it.name: it.args for it in communicator.body if isinstance(it, ast.FunctionDef)}
    for name in ("dispatch", "dispatch_send", "refuse", "replay", "combine", "copy_out"):
        expected = {
            it.arg: ast.literal_eval(default)
            for it, default in zip(
                functions[name].kwonlyargs, functions[name].kw_defaults, strict=True
            )
            if default is not None
        }
        found = inspect.signature(getattr(tokenyard.Communicator, name)).parameters
        assert expected == {key: found[key].default for key in expected}, name


def dropin_integers():
    """(class, method, parameter) of the integers that callers give to the collective calls of the drop-in."""
    found = []
    for kind in (Buffer, ElasticBuffer):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
            if name.startswith("_") or is_static:
                continue
            parameters = inspect.signature(method).parameters.values()
            found += [
                (kind, name, it.name) for it in parameters if it.annotation in (int, int | None)
            ]
    return found


# No call on the CPU reads these: a memory that is local, calls that only GPUs have, and what stands for a network.
UNREAD_CALLS = (
    "clean_low_latency_buffer",
    "get_local_buffer_tensor",
    "get_theoretical_num_qps",
    "low_latency_update_mask_buffer",
)
UNREAD = ("num_qps", "num_sms")
DROPIN = [it for it in dropin_integers() if it[1] not in UNREAD_CALLS and it[2] not in UNREAD]


def dropin_call(world, kind, name):
    """A right call, which takes arguments that replace others; and how to end what it needs."""
    me = world.rank
    buffer = buffer_of(world)
    x, idx, weights = CASE.x[me], CASE.idx[me], CASE.weights[me]
    if kind is ElasticBuffer:
        elastic = ElasticBuffer(world, explicitly_destroy=True)
        good = {"num_experts": 8, "num_max_tokens_per_rank": 12}
        return lambda **o: elastic.dispatch(x, idx, weights, **{**good, **o}), elastic
    calls = {
        "dispatch": lambda **o: buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, **layout_of(buffer, CASE), **o
        ),
        "low_latency_dispatch": lambda **o: buffer.low_latency_dispatch(
            x,
            idx,
            **{"num_max_dispatch_tokens_per_rank": 12, "num_experts": 8, "use_fp8": False, **o},
        ),
        "get_dispatch_layout": lambda **o: buffer.get_dispatch_layout(
            idx, **{"num_experts": 8, **o}
        ),
    }
    return calls[name.removeprefix("internode_")], buffer


def dropin_refused(world, kind, name, parameter):
    call, owner = dropin_call(world, kind, name)
    call()
    for value in (-1, 2**70):
        with pytest.raises((OWN, OTHERS)) as raised:
            call(**({parameter: value} if world.rank == 1 or name == "get_dispatch_layout" else {}))
        assert raised.value.rank in (None, 1, world.rank), repr(raised.value)
        assert f"{parameter}: found " in str(raised.value), str(raised.value)
        call()
    owner.destroy()


@pytest.mark.parametrize(
    ("kind", "name", "parameter"),
    DROPIN,
    ids=[f"{kind.__name__}.{name}.{parameter}" for kind, name, parameter in DROPIN],
)
def test_what_is_no_integer_is_refused_in_every_call_of_the_drop_in(ranks, kind, name, parameter):
    ranks(2, dropin_refused, kind, name, parameter)


def wrong_timeouts(world):
    path = os.environ.pop("TOKENYARD_CONFIG", None)
    try:
        for value in (-1, 2**70):
            given = {"num_gpu_timeout_secs": value} if world.rank == 1 else {}
            with pytest.raises(OWN if world.rank == 1 else OTHERS, match="deadline_ms: found"):
                ElasticBuffer(world, explicitly_destroy=True, **given)
    finally:
        if path is not None:
            os.environ["TOKENYARD_CONFIG"] = path
    buffer_of(world).destroy()


def test_a_timeout_that_cannot_be_is_refused_on_all_ranks(ranks):
    ranks(2, wrong_timeouts)


def wrong_constructors(world):
    """A constructor takes a number that says nothing here, or refuses it on all ranks."""
    for kind in (Buffer, ElasticBuffer):
        parameters = inspect.signature(kind).parameters.values()
        names = [it.name for it in parameters if it.annotation in (int, int | None)]
        assert len(names) >= 3
        for name in names:
            given = {name: 2**70} if world.rank == 1 else {}
            with contextlib.suppress(OWN, OTHERS):
                kind(world, explicitly_destroy=True, **given).destroy()
    buffer_of(world).destroy()


def test_no_integer_of_a_constructor_makes_other_ranks_wait(ranks):
    ranks(2, wrong_constructors)
