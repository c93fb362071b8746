"""An argument that cannot be is an exception of the package on all ranks of a call, whichever call and argument it is
of, and what is open goes on."""

import ast
import inspect
import pathlib

import numpy as np
import pytest
from oracle import Case
from pool import config
from test_exchange import opened, same

import tokenyard
from tokenyard import errors

CASE = Case(2, seed=9, tokens=(5, 7))
SIZES = {"experts": 8, "topk": 3, "hidden": 64, "max_tokens": 12}
INTEGER, TRUTH, WORD, BYTES = "an integer from 0 to", "True or False", "a str", "bytes"
# A tensor, or a handle.
OBJECT = "an object"
# Values that are refused where such a one is expected.
WRONG = {
    INTEGER: (-1, 2**70, 1.5, "4"),
    TRUTH: (2, "yes"),
    WORD: (7, b"flat"),
    BYTES: (7, "text", [300]),
    OBJECT: (7, "4"),
}
OWN, OTHERS = errors.InvalidInputError, errors.RefusedError
TABLE = {"entry_bytes": 4, "max_entries": 2, "max_indices": 1}


class Calls:
    """Right calls of the package, by name. Each takes arguments that replace others."""

    def __init__(self, world, comm):
        me, self._world, self._comm, self.layout = world.rank, world, comm, "expert_major"
        self._x, self._routing = CASE.x[me], (CASE.idx[me], CASE.weights[me])
        self._received, self._handle = comm.dispatch(self._x, *self._routing)
        # A combine takes weights of tokens for rows of experts.
        self._rows, self._of_rows = comm.dispatch(self._x, *self._routing, layout="expert_major")
        self.has_topk = False
        self._opened, self._is_written = {}, False

    def beside(self, kind):
        """A pipe, a gather or a table, opened at its first use, by both ranks."""
        if kind not in self._opened:
            sizes = TABLE if kind is tokenyard.Table else {"max_bytes": 64}
            sums = {"reduces": True} if kind is tokenyard.Gather else {}
            self._opened[kind] = kind(self._world, config(), **sizes, **sums)
        return self._opened[kind]

    def close(self):
        for beside in self._opened.values():
            beside.close()

    def _message(self, name, options):
        """Rank 1 makes the call, and rank 0 that of the other side of its message, where it has nothing to give."""
        pipe, me = self.beside(tokenyard.Pipe), self._world.rank
        message = np.zeros(4, np.uint8)
        if (name == "send") == (me == 1 or bool(options)):
            pipe.send(**{"tensor": message, "to": 1 - me, **options})
            pipe.flush()
        else:
            pipe.recv(**{"tensor": message, "source": 1 - me, **options})

    def _gather(self, name, options):
        call = getattr(self.beside(tokenyard.Gather), name)
        return self._finished(call, **{"shards": np.zeros(4, np.uint8), **options})

    def _reduce(self, name, options):
        call = getattr(self.beside(tokenyard.Gather), name)
        return self._finished(call, **{"tensors": np.zeros(4, np.float32), **options})

    def _table(self):
        """A table with entries."""
        table = self.beside(tokenyard.Table)
        if not self._is_written:
            table.write(np.zeros((2, 4), np.uint8))
            self._is_written = True
        return table

    def _fetched(self, options):
        """The end of a fetch; it is received in any case."""
        pending = self._table().fetch_send(np.zeros(1, np.int32))
        try:
            return pending.recv(**{"values": np.zeros(4, np.uint8), **options})
        except errors.InvalidInputError:
            pending.recv(np.zeros(4, np.uint8))
            raise

    def _finished(self, call, *arguments, **options):
        pending = call(*arguments, **options)
        return pending.recv() if hasattr(pending, "recv") else pending

    def _dispatch(self, name, options):
        call = getattr(self._comm, name)
        # A rank that names no layout refuses a flat dispatch.
        tensors = dict(zip(("topk_idx", "topk_weights"), self._routing, strict=True))
        options = {"layout": self.layout, "x": self._x, **tensors, **options}
        return self._finished(call, **options)

    def _by_handle(self, name, half, options):
        x = {"replay": self._x, "combine": self._received.x}[name]
        given = {"handle": self._handle, "x": x}
        if self.has_topk:
            ids, weights = self._routing
            given = {"handle": self._of_rows, "x": self._rows.x, "weighted": True}
            given |= {"topk_idx": ids, "topk_weights": weights}
        return self._finished(getattr(self._comm, name + half), **{**given, **options})

    def of(self, name):
        comm, received = self._comm, self._received
        return {
            "memory_needed": lambda **o: tokenyard.memory_needed(
                config(), **{"ranks": 2, **SIZES, **o}
            ),
            "routing_counts": lambda **o: tokenyard.routing_counts(
                self._routing[0], **{"experts": 8, "ranks": 2, **o}
            ),
            "plan_replicas": lambda **o: tokenyard.plan_replicas(
                **{"loads": [1, 2, 3, 4], "ranks": 2, "spare": 1, **o}
            ),
            "Config.built_in": lambda **o: tokenyard.Config.built_in("cpu", **o),
            "World": lambda **o: tokenyard.World(
                **{"rank": 0, "ranks": 1, "exchange": lambda mine: [mine], **o}
            ).close(),
            "Communicator": lambda **o: tokenyard.Communicator(
                self._world, config(), **{**SIZES, **o}
            ).close(),
            "Pipe": lambda **o: tokenyard.Pipe(
                self._world, config(), **{"max_bytes": 64, **o}
            ).close(),
            **{
                f"Pipe.{name}": lambda name=name, **o: self._message(name, o)
                for name in ("send", "recv")
            },
            "Gather": lambda **o: tokenyard.Gather(
                self._world, config(), **{"max_bytes": 64, **o}
            ).close(),
            **{
                f"Gather.{name}": lambda name=name, **o: self._gather(name, o)
                for name in ("all_gather", "all_gather_send")
            },
            **{
                f"Gather.{call}{half}": lambda name=call + half, **o: self._reduce(name, o)
                for call in ("reduce_scatter", "all_reduce")
                for half in ("", "_send")
            },
            "PendingReduce.recv": lambda **o: (
                self.beside(tokenyard.Gather).reduce_scatter_send(np.zeros(4, np.float32)).recv(**o)
            ),
            "PendingGather.recv": lambda **o: (
                self.beside(tokenyard.Gather).all_gather_send(np.zeros(4, np.uint8)).recv(**o)
            ),
            "Table": lambda **o: tokenyard.Table(self._world, config(), **{**TABLE, **o}).close(),
            "Table.write": lambda **o: self._table().write(
                **{"values": np.zeros((2, 4), np.uint8), **o}
            ),
            "Table.fetch": lambda **o: self._table().fetch(
                **{"indices": np.zeros(1, np.int32), "values": np.zeros(4, np.uint8), **o}
            ),
            "Table.fetch_send": lambda **o: (
                self._table()
                .fetch_send(**{"indices": np.zeros(1, np.int32), **o})
                .recv(np.zeros(4, np.uint8))
            ),
            "PendingFetch.recv": lambda **o: self._fetched(o),
            "Communicator.refuse": lambda **o: comm.refuse(
                **{"operation": "dispatch", "why": "why", **o}
            ),
            "Communicator.copy_out": lambda **o: comm.copy_out(received, **o),
            "Communicator.count_routing": lambda **o: comm.count_routing(
                **{
                    "topk_idx": self._routing[0],
                    "rank_tokens": np.zeros(2, np.int32),
                    "expert_tokens": np.zeros(8, np.int32),
                    "is_token_in_rank": np.zeros((len(self._x), 2), np.uint8),
                    "stream": 0,
                    **o,
                }
            ),
            "World.all_gather": lambda **o: self._world.all_gather(
                **{"topic": "topic", "mine": b"mine", **o}
            ),
            "World.barrier": lambda topic="topic": self._world.barrier(topic),
            "Communicator.release_after": lambda streams: comm.release_after([streams]),
            "Communicator.mask_rank": lambda rank: comm.mask_rank(rank),
            "Communicator.unmask_rank": lambda rank=0: comm.unmask_rank(rank),
            **{
                f"Communicator.{name}": lambda name=name, **o: self._dispatch(name, o)
                for name in ("dispatch", "dispatch_send")
            },
            **{
                f"Communicator.{name}{half}": lambda name=name, half=half, **o: self._by_handle(
                    name, half, o
                )
                for name in ("replay", "combine")
                for half in ("", "_send")
            },
        }[name]


# Calls that no other rank takes part in, and arguments without which no other rank can.
LOCAL = {
    "memory_needed",
    "plan_replicas",
    "routing_counts",
    "Config.built_in",
    "World",
    "Communicator.refuse",
    "Communicator.copy_out",
    "Communicator.count_routing",
    "Communicator.release_after",
    "Communicator.mask_rank",
    "Pipe.send.to",
    "Pipe.recv.source",
    "PendingGather.recv",
    "PendingReduce.recv",
    "Table.fetch",
    "Table.fetch_send",
    "PendingFetch.recv",
}


def kind_of(annotation):
    """The kind of a parameter that is judged with its call."""
    plain = annotation.removesuffix(" | None")
    if plain in ("int", "Sequence[int]"):
        return INTEGER
    if plain == "bool":
        return TRUTH
    if plain in ("str", "_Layout", "_Cast") or plain.startswith("Literal["):
        return WORD
    if plain == "bytes":
        return BYTES
    return OBJECT if plain == "Handle" or plain.startswith("_Tensor") else None


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
    # Python raises a TypeError for what is no word or object of other calls, which are of one rank.
    calls = (
        "Communicator",
        "Gather",
        "PendingFetch",
        "PendingGather",
        "PendingReduce",
        "Pipe",
        "Table",
        "World.",
    )
    found = [it for it in found if it[2] == INTEGER or it[0].startswith(calls)]
    return [it for it in found if it[:2] != ("Communicator.combine_input", "handle")]


NATIVE = native_arguments()


def refused(world, comm, name, call, parameter, kind):
    for value in WRONG[kind]:
        if {name, f"{name}.{parameter}"} & LOCAL or world.rank == 1:
            with pytest.raises(OWN) as raised:
                call(**{parameter: value})
            says = f"{parameter}: found "
            if kind is not OBJECT:
                says += f"{value!r}; expected {kind}"
            assert says in str(raised.value), str(raised.value)
        else:
            says = f"{parameter}: found" if kind is OBJECT else f"expected {kind}"
            with pytest.raises(OTHERS, match=says) as raised:
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
            calls.has_topk = "combine" in name and parameter.startswith("topk_")
            refused(world, comm, name, call, parameter, kind)
        calls.close()
    with opened(world, CASE):
        pass


@pytest.mark.parametrize("name", sorted({name for name, *_ in NATIVE}))
def test_what_is_no_number_word_truth_value_or_object_is_refused_in_every_native_call(ranks, name):
    ranks(2, all_refused, name)


def test_defaults_are_those_of_the_stub():
    assert len(NATIVE) >= 120
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


def wrong_topics(world):
    """Topics and sizes that fit their types, and cannot be sent."""
    topics = ("", "x" * 200, "a\nb")
    calls = [(world.barrier, (topic,)) for topic in topics]
    calls += [(world.all_gather, (topic, b"")) for topic in topics]
    for call, arguments in (*calls, (world.all_gather, ("topic", bytes(1 << 26)))):
        if world.rank == 1:
            with pytest.raises(OWN, match=r"found topic|found 67108864 bytes"):
                call(*arguments)
        else:
            with pytest.raises(OTHERS, match=r"rank 1 cannot take part: .*: found"):
                world.barrier("another topic")
    assert world.all_gather("the world goes on", bytes([world.rank])) == [b"\0", b"\1"]


def test_a_topic_that_cannot_be_sent_is_refused_on_all_ranks(ranks):
    ranks(2, wrong_topics)
