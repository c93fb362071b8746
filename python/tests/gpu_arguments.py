"""Arguments that cannot be, where kernels of GPUs run: all ranks get an error, and what is open goes on."""

from gpu_common import CASE, inputs, is_gpu, layout_of, raised, rows_of, same, v1, v2

from tokenyard import errors
from tokenyard.deep_ep import Buffer

OWN, OTHERS = errors.InvalidInputError, errors.RefusedError
INTEGERS = (-1, 2**70, 1.5, "4")
FLAGS = ("yes", 2)
# No event, and one that has none of ours.
EVENTS = (7, type("Overlap", (), {"event": object()})())


def refused(world, call, name, values):
    """Rank 1 gives a wrong value, and both ranks get an error that names it."""
    for value in values:
        error = raised(lambda value=value: call(**({name: value} if world.rank == 1 else {})))
        assert isinstance(error, OWN if world.rank == 1 else OTHERS), repr(error)
        assert f"{name}: found " in str(error), error


def of_normal_calls(world):
    buffer = v1(world)
    x, idx, weights = inputs(world, CASE)
    options = {**layout_of(buffer, idx, CASE.experts), "topk_idx": idx, "topk_weights": weights}

    def dispatch(**others):
        return buffer.dispatch(x, **{**options, **others})

    # Calls of this kind have another communicator, which the others do not call below.
    dispatch(num_worst_tokens=CASE.ranks * CASE.max_tokens)
    rows, *_, handle, _ = dispatch()
    timing = {
        "previous_event": EVENTS,
        "async_finish": FLAGS,
        "allocate_on_comm_stream": FLAGS,
    }
    calls = (
        (dispatch, {**timing, "num_worst_tokens": INTEGERS, "expert_alignment": INTEGERS}),
        (lambda **o: buffer.dispatch(x, **{"handle": handle, **o}), timing),
        (lambda **o: buffer.combine(rows, handle, **o), timing),
    )
    for call, arguments in calls:
        for name, values in arguments.items():
            refused(world, call, name, values)
            same(dispatch()[0], rows_of(world, CASE, CASE.sources(world.rank)))
    # It is local: no other rank waits.
    for event in EVENTS:
        error = raised(lambda event=event: buffer.get_dispatch_layout(idx, 32, event))
        assert "previous_event: found" in str(error), error
    buffer.destroy()


def of_elastic_calls(world):
    buffer = v2(world, CASE)
    x, idx, weights = inputs(world, CASE)
    options = {"topk_idx": idx, "topk_weights": weights, "num_experts": CASE.experts}

    def dispatch(**others):
        return buffer.dispatch(x, **{**options, **others})

    rows, *_, handle, _ = dispatch()
    both = {
        "num_sms": INTEGERS,
        "num_qps": INTEGERS,
        "previous_event": EVENTS,
        "previous_event_before_epilogue": EVENTS,
        "async_with_compute_stream": FLAGS,
    }
    calls = (
        (dispatch, {**both, "expert_alignment": INTEGERS, "do_cpu_sync": FLAGS}),
        (
            lambda **o: buffer.dispatch(x, **{"handle": handle, **o}),
            {**both, "do_cpu_sync": [True]},
        ),
        (lambda **o: buffer.combine(rows, handle, **o), both),
        # On a GPU no host waits for a barrier, so the others learn of it in a later one.
        (buffer.barrier, {} if is_gpu() else {"use_comm_stream": FLAGS, "with_cpu_sync": FLAGS}),
    )
    for call, arguments in calls:
        for name, values in arguments.items():
            refused(world, call, name, values)
            same(dispatch()[0], rows_of(world, CASE, CASE.sources(world.rank)))
    buffer.destroy()


def of_native_calls(world):
    """A stream that cannot be one."""
    buffer = v1(world)
    x, idx, weights = inputs(world, CASE)
    options = {**layout_of(buffer, idx, CASE.experts), "topk_idx": idx, "topk_weights": weights}
    buffer.dispatch(x, **options)
    communicator = buffer._pool.current.communicator

    def dispatch(**others):
        return communicator.dispatch(x, idx, weights, **others)

    refused(world, dispatch, "stream", INTEGERS)
    refused(world, dispatch, "max_tokens", INTEGERS)
    refused(world, dispatch, "sms", [*INTEGERS, 1025])
    rows = buffer.dispatch(x, **options)[0]
    same(rows, rows_of(world, CASE, CASE.sources(world.rank)))
    buffer.destroy()


def of_the_number_of_multiprocessors(world):
    """A rank that asks for none that can be gets an error where it counts, and the others a refusal."""
    buffer = v1(world)
    x, idx, weights = inputs(world, CASE)
    options = {**layout_of(buffer, idx, CASE.experts), "topk_idx": idx, "topk_weights": weights}
    try:
        for number in (-2, 2**70):
            if world.rank == 1:
                Buffer.set_num_sms(number)
            if buffer._pool.sms_of(number):
                error = raised(lambda: buffer.dispatch(x, **options))
                assert isinstance(error, OWN if world.rank == 1 else OTHERS), repr(error)
                assert f"sms: found {number}" in str(error), error
            Buffer.num_sms, Buffer._has_chosen_sms = 20, False
            rows = buffer.dispatch(x, **options)[0]
            same(rows, rows_of(world, CASE, CASE.sources(world.rank)))
    finally:
        Buffer.num_sms, Buffer._has_chosen_sms = 20, False
    buffer.destroy()


CHECKS = [
    of_normal_calls,
    of_elastic_calls,
    of_native_calls,
    of_the_number_of_multiprocessors,
]
