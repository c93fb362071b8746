"""An argument of the drop-in that cannot be is an exception on all ranks, whichever call and argument it is of, and the
buffer goes on. A call takes any value where it reads none."""

import collections
import inspect
import os

import numpy as np
import pytest
from oracle import Case
from test_deep_ep_normal import buffer_of, layout_of, same

import tokenyard.deep_ep
from tokenyard import errors
from tokenyard.deep_ep import Buffer, ElasticBuffer, EPBuffer, EventOverlap, HybridEPBuffer

CASE = Case(2, seed=9, tokens=(5, 7))
OWN, OTHERS = errors.InvalidInputError, errors.RefusedError

# Values that are refused, by the kind of a parameter.
INTEGERS = (-1, 2**70, 1.5, "4", np.array([1, 2]))
FLAGS = (2, "yes", np.array([True, False]))
OBJECTS = (7, "4", collections.namedtuple("Pair", "a b")(1, 2))
# An event of another library, and none.
EVENTS = (7, object())


def wrong_values(parameter):
    if parameter.annotation in (int, int | None):
        return INTEGERS
    if parameter.annotation in (bool, bool | None):
        return FLAGS
    return EVENTS if "event" in parameter.name else OBJECTS


def parameters_of(call):
    """Those that callers can give, but for keywords of forks."""
    found = list(inspect.signature(call).parameters.values())
    return [it for it in found if it.name != "self" and it.kind is not it.VAR_KEYWORD]


class Calls:
    """Right calls of all buffers, which take arguments that replace others."""

    def __init__(self, world):
        self.me = world.rank
        self.buffer = buffer_of(world)
        self.elastic = ElasticBuffer(world, explicitly_destroy=True)
        self.ep = EPBuffer(world, explicitly_destroy=True)
        self.hybrid = HybridEPBuffer(world, 64, 12, 4)
        me, x, routing = self.me, CASE.x[self.me], (CASE.idx[self.me], CASE.weights[self.me])
        names = ("topk_idx", "topk_weights")
        routed = dict(zip(names, routing, strict=True))
        normal = {"x": x, **routed, **layout_of(self.buffer, CASE)}
        recv_x, _, _, _, handle, _ = self.buffer.dispatch(**normal)
        low = {
            "x": x,
            "topk_idx": routing[0],
            "num_max_dispatch_tokens_per_rank": 12,
            "num_experts": 8,
            "use_fp8": False,
        }
        packed, _, low_handle, _, _ = self.buffer.low_latency_dispatch(**low)
        v2 = {"x": x, **routed, "num_experts": 8, "num_max_tokens_per_rank": 12}
        rows, _, _, v2_handle, _ = self.elastic.dispatch(**v2)
        ep_rows, _, _, ep_handle, _ = self.ep.dispatch(**v2)
        hybrid = {"hidden": x, **routed, "num_of_experts": 8}
        flat_rows, _, _, flat_handle = self.hybrid.dispatch(**hybrid)
        hybrid_rows, *_, hybrid_handle = self.hybrid.dispatch_with_permute(**hybrid)
        low_combine = {"x": packed, **routed, "handle": low_handle}
        self.right = {
            "Buffer.get_dispatch_layout": {"topk_idx": routing[0], "num_experts": 8},
            "Buffer.dispatch": normal,
            "Buffer.dispatch by a handle": {"x": x, "handle": handle},
            "Buffer.combine": {"x": recv_x, "handle": handle},
            "Buffer.clean_low_latency_buffer": {
                "num_max_dispatch_tokens_per_rank": 12,
                "hidden": 64,
                "num_experts": 8,
            },
            "Buffer.low_latency_dispatch": low,
            "Buffer.low_latency_combine": low_combine,
            "ElasticBuffer.dispatch": v2,
            "ElasticBuffer.dispatch by a handle": {"x": x, "handle": v2_handle},
            "ElasticBuffer.combine": {"x": rows, "handle": v2_handle},
            "ElasticBuffer.barrier": {},
            "EPBuffer.dispatch": v2,
            "EPBuffer.dispatch by a handle": {"x": x, "handle": ep_handle},
            "EPBuffer.combine": {"x": ep_rows, "handle": ep_handle},
            "EPBuffer.barrier": {},
            "EPBuffer.lb_prefetch_weights": {
                "redundant_expert_weights": np.zeros((1, 8), np.float32),
                "expert_weights": np.zeros((2, 8), np.float32),
                "redundancy_mapping": np.array([[2], [1]], np.int32),
            },
            "EPBuffer.lb_reduce_grads": {
                "redundant_expert_grads": np.zeros((1, 8), np.float32),
                "expert_grads": np.zeros((2, 8), np.float32),
                "redundancy_mapping": np.array([[2], [1]], np.int32),
            },
            "HybridEPBuffer.dispatch": hybrid,
            "HybridEPBuffer.dispatch by a handle": {"hidden": x, "handle": flat_handle},
            "HybridEPBuffer.combine": {"hidden": flat_rows, "handle": flat_handle},
            "HybridEPBuffer.dispatch_with_permute": hybrid,
            "HybridEPBuffer.dispatch_with_permute by a handle": {
                "hidden": x,
                "handle": hybrid_handle,
            },
            "HybridEPBuffer.combine_with_unpermute": {
                "hidden": hybrid_rows,
                "handle": hybrid_handle,
            },
        }
        self.expected = CASE.rows(CASE.sources(me))

    def call(self, name, **others):
        kind, method = name.split(" ")[0].split(".")
        owners = {
            "Buffer": self.buffer,
            "ElasticBuffer": self.elastic,
            "EPBuffer": self.ep,
            "HybridEPBuffer": self.hybrid,
        }
        owner = owners[kind]
        results = getattr(owner, method)(**{**self.right[name], **others})
        # Of a call that asks wrongly to be deferred.
        return results.wait() if isinstance(results, EventOverlap) else results

    def goes_on(self):
        same(self.call("Buffer.dispatch")[0], self.expected)
        self.call("Buffer.low_latency_dispatch")
        same(self.call("ElasticBuffer.dispatch")[0], self.expected)
        same(self.call("EPBuffer.dispatch")[0], self.expected)
        same(self.call("HybridEPBuffer.dispatch")[0], self.expected)
        self.call("HybridEPBuffer.dispatch_with_permute")

    def close(self):
        self.buffer.destroy()
        self.elastic.destroy()
        self.ep.destroy()


CALLS = (
    "Buffer.get_dispatch_layout",
    "Buffer.dispatch",
    "Buffer.dispatch by a handle",
    "Buffer.combine",
    "Buffer.clean_low_latency_buffer",
    "Buffer.low_latency_dispatch",
    "Buffer.low_latency_combine",
    "ElasticBuffer.dispatch",
    "ElasticBuffer.dispatch by a handle",
    "ElasticBuffer.combine",
    "ElasticBuffer.barrier",
    "EPBuffer.dispatch",
    "EPBuffer.dispatch by a handle",
    "EPBuffer.combine",
    "EPBuffer.barrier",
    "EPBuffer.lb_prefetch_weights",
    "EPBuffer.lb_reduce_grads",
    "HybridEPBuffer.dispatch",
    "HybridEPBuffer.dispatch by a handle",
    "HybridEPBuffer.combine",
    "HybridEPBuffer.dispatch_with_permute",
    "HybridEPBuffer.dispatch_with_permute by a handle",
    "HybridEPBuffer.combine_with_unpermute",
)
# Parameters that a call does not read, by its name.
_OF_LAYOUTS = {"num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"}
_OF_ROUTINGS = {"topk_idx", "routing_map", "num_of_experts", "num_of_tokens_per_rank"}
_OLD = {"num_dispatched_tokens", "use_host_meta"}
UNREAD = {
    "Buffer.dispatch": {"config", "num_tokens_per_rdma_rank"},
    "Buffer.dispatch by a handle": {"config", "num_tokens_per_rdma_rank", *_OF_LAYOUTS},
    "Buffer.combine": {"config"},
    "Buffer.clean_low_latency_buffer": {
        "num_max_dispatch_tokens_per_rank",
        "hidden",
        "num_experts",
    },
    "HybridEPBuffer.dispatch": {"num_dispatched_tokens_tensor"},
    "HybridEPBuffer.dispatch by a handle": {"num_dispatched_tokens_tensor", *_OF_ROUTINGS},
    "HybridEPBuffer.dispatch_with_permute": _OLD,
    "HybridEPBuffer.dispatch_with_permute by a handle": {
        "num_of_experts_per_rank",
        "pad_multiple",
        *_OF_ROUTINGS,
        *_OLD,
    },
    "HybridEPBuffer.combine_with_unpermute": {"pad_multiple", *_OLD},
}
# A handle makes it another operation: that is the case of its own.
_KINDS = ("Buffer", "ElasticBuffer", "EPBuffer", "HybridEPBuffer")
WITHOUT = {f"{kind}.dispatch": {"handle"} for kind in _KINDS}
WITHOUT["HybridEPBuffer.dispatch_with_permute"] = {"handle"}
# Calls that no other rank takes part in.
LOCAL = {"Buffer.get_dispatch_layout"}
# Calls of the classes that are no exchange of all ranks, and do not wait.
OTHER_CALLS = {
    "destroy",
    "get_comm_stream",
    "get_local_buffer_tensor",
    "get_logical_domain_size",
    "get_next_low_latency_combine_buffer",
    "get_physical_domain_size",
    "get_theoretical_num_qps",
    "get_theoretical_num_sms",
    "lb_get_theoretical_num_sms",
    # Of kernels of GPUs: in the script for these.
    "low_latency_clean_mask_buffer",
    "low_latency_query_mask_buffer",
    "low_latency_update_mask_buffer",
    "print_memory_usage",
    # Beside dispatch and combine: test_deep_ep_operations.py has what is wrong there.
    "agrs_get_inplace_tensor",
    "agrs_new_session",
    "agrs_set_config",
    "all_gather",
    "create_agrs_session",
    "destroy_agrs_session",
    "engram_fetch",
    "engram_write",
    "pp_recv",
    "pp_send",
    "pp_set_config",
    # It exchanges nothing: test_deep_ep_hybrid.py has what is wrong there.
    "update_template_config",
}


def method_of(name):
    kind, method = name.split(" ")[0].split(".")
    return getattr(getattr(tokenyard.deep_ep, kind), method)


def all_refused(world, name):
    calls = Calls(world)
    for parameter in parameters_of(method_of(name)):
        if parameter.name in WITHOUT.get(name, ()):
            continue
        for value in wrong_values(parameter):
            is_wrong = world.rank == 1
            given = {parameter.name: value} if is_wrong else {}
            if parameter.name in UNREAD.get(name, ()) or (name in LOCAL and not is_wrong):
                calls.call(name, **given)
                continue
            with pytest.raises((OWN, OTHERS)) as raised:
                calls.call(name, **given)
            text = str(raised.value)
            assert f"{parameter.name}: found " in text, (value, text)
            assert isinstance(raised.value, OWN if is_wrong else OTHERS), (value, repr(raised))
            assert raised.value.rank in ((None, 1) if is_wrong else (1,)), (value, repr(raised))
        calls.goes_on()
    calls.close()


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_is_refused_in_every_call_of_the_drop_in(ranks, name):
    ranks(2, all_refused, name)


def test_every_call_of_the_drop_in_is_walked():
    for kind in (Buffer, ElasticBuffer, EPBuffer, HybridEPBuffer):
        found = set()
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
            # Others are names of the same method, and of what is missing.
            is_there = method.__name__ == name and "Not there" not in str(method.__doc__)
            if name[0] != "_" and not is_static and is_there:
                found.add(name)
        walked = {it.split(" ")[0].split(".")[1] for it in CALLS if it.startswith(kind.__name__)}
        assert walked
        assert found - walked <= OTHER_CALLS, found - walked


def both_ends(world):
    """Arguments that exclude each other, on one rank alone."""
    calls = Calls(world)
    both = {"async_finish": True, "return_recv_hook": True}
    for name, wrong, says in (
        ("Buffer.low_latency_dispatch", both, "async_finish: found True with return_recv_hook"),
        ("Buffer.low_latency_combine", both, "async_finish: found True with return_recv_hook"),
        (
            "ElasticBuffer.dispatch by a handle",
            {"do_cpu_sync": True},
            "do_cpu_sync: found True with a handle",
        ),
        (
            "EPBuffer.combine",
            {"defer_epilogue": True},
            "defer_epilogue: found True without async_with_compute_stream",
        ),
    ):
        with pytest.raises(OWN if world.rank == 1 else OTHERS, match=says):
            calls.call(name, **(wrong if world.rank == 1 else {}))
        calls.call(name)
    calls.goes_on()
    calls.close()


def test_arguments_that_exclude_each_other_are_refused_on_all_ranks(ranks):
    ranks(2, both_ends)


def wrong_constructors(world):
    path = os.environ.pop("TOKENYARD_CONFIG", None)
    try:
        beside = ("group", "comm")
        sizes = {"hidden_dim": 64, "max_num_of_tokens_per_rank": 12, "num_local_experts": 4}
        for kind in (Buffer, ElasticBuffer, EPBuffer, HybridEPBuffer):
            right = sizes if kind is HybridEPBuffer else {"explicitly_destroy": True}
            found = [it for it in parameters_of(kind) if it.name not in beside]
            assert len(found) >= 8
            for parameter in found:
                for value in wrong_values(parameter):
                    given = right | ({parameter.name: value} if world.rank == 1 else {})
                    with pytest.raises(OWN if world.rank == 1 else OTHERS) as raised:
                        kind(world, **given)
                    text = str(raised.value)
                    assert f"{parameter.name}: found " in text, (value, text)
        # It fits its parameter, and no deadline.
        given = {"num_gpu_timeout_secs": 2**31 - 1} if world.rank == 1 else {}
        kind = errors.ConfigError if world.rank == 1 else OTHERS
        with pytest.raises(kind, match=r"deadline_ms = \d+ is out of range"):
            ElasticBuffer(world, explicitly_destroy=True, **given)
    finally:
        if path is not None:
            os.environ["TOKENYARD_CONFIG"] = path
    calls = Calls(world)
    calls.goes_on()
    calls.close()


def test_what_cannot_be_is_refused_in_every_argument_of_a_constructor(ranks):
    ranks(2, wrong_constructors)


def truths(world):
    """0, 1 and None are flags, and so are numpy's."""
    calls = Calls(world)
    rows = calls.call("ElasticBuffer.dispatch", do_expand=True)[0]
    for one, zero in ((1, 0), (np.True_, np.False_), (True, None)):
        same(calls.call("ElasticBuffer.dispatch", do_expand=one, do_cpu_sync=one)[0], rows)
        flat = calls.call("ElasticBuffer.dispatch", do_expand=zero, do_zero_padding=zero)[0]
        same(flat, calls.expected)
        *_, hook = calls.call("Buffer.low_latency_dispatch", return_recv_hook=one, use_fp8=zero)
        hook()
    calls.close()


def test_flags_may_be_numbers_and_those_of_numpy(ranks):
    ranks(2, truths)
