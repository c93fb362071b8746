"""Public reports of faults of libraries of this kind, on GPUs: the sweeps of `test_reports.py`, and buffers by the
hundred.

Values are made and checked by numpy, in host memory: `OnDevice` carries them.
"""

import ml_dtypes
import numpy as np
import sweeps
import torch
from exact import Exchange, low_latency
from gpu_common import device_of, is_gpu, layout_of, raised, synchronize, v1, v2
from oracle import Case

from tokenyard.deep_ep.utils.math import per_token_cast_to_fp8

NEEDS_GPUS = True
DEVICE = "cuda" if is_gpu() else "cpu"
BUFFERS = 200
# Hidden sizes of low latency are multiples of this many numbers.
HIDDEN = 128
# numpy's types that torch takes as bits.
BITS = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
}
TYPES = {torch_type: (bits, numpy) for numpy, (bits, torch_type) in BITS.items()}


def to_device(value):
    if isinstance(value, tuple):
        return tuple(map(to_device, value))
    if not isinstance(value, np.ndarray):
        return value
    bits, dtype = BITS.get(value.dtype, (None, None))
    if dtype is None:
        return torch.from_numpy(np.ascontiguousarray(value)).to(DEVICE)
    return torch.from_numpy(np.ascontiguousarray(value).view(bits)).to(DEVICE).view(dtype)


def to_host(value):
    bits, dtype = TYPES.get(value.dtype, (None, None))
    if dtype is None:
        return value.cpu().numpy()
    return value.view(torch.int16 if bits is np.int16 else torch.uint8).cpu().numpy().view(dtype)


class OnDevice:
    """A buffer of the drop-in whose calls take and give arrays of numpy, by way of tensors on the GPU.

    The arrays of a call with a hook have their values once the hook has run.
    """

    def __init__(self, buffer):
        self._buffer, self._pairs = buffer, []

    def __getattr__(self, name):
        found = getattr(self._buffer, name)
        if not callable(found):
            return found

        def call(*args, **keywords):
            given = {key: to_device(value) for key, value in keywords.items()}
            results = found(*map(to_device, args), **given)
            pairs = []
            shown = tuple(self._shown(result, pairs) for result in results)
            if not keywords.get("return_recv_hook"):
                fill(pairs)
                return shown
            hook = results[-1]

            def receive():
                hook()
                fill(pairs)

            return (*shown[:-1], receive)

        return call

    def _shown(self, value, pairs):
        # Rows and their scales; a handle of V1 is a longer tuple, and its tensors stay what they are.
        if isinstance(value, tuple) and len(value) == 2:
            return tuple(self._shown(one, pairs) for one in value)
        if not isinstance(value, torch.Tensor):
            return value
        _, dtype = TYPES.get(value.dtype, (None, None))
        shape = tuple(value.shape)
        shown = np.empty(shape, dtype or torch.empty(0, dtype=value.dtype).numpy().dtype)
        pairs.append((shown, value))
        return shown


def fill(pairs):
    for shown, value in pairs:
        shown[...] = to_host(value)


def both(world, most):
    """A buffer of each kind."""
    case = Case(2, max_tokens=most)
    return OnDevice(v1(world, low_latency_mode=True)), OnDevice(v2(world, case))


def swept(world, most, sweep):
    buffer, elastic = both(world, most)
    sweep(buffer, elastic)
    elastic._buffer.destroy()
    buffer._buffer.destroy()


def every_m(world):
    swept(world, max(sweeps.MOST_TOKENS), lambda *both: sweeps.every_m(*both, hidden=HIDDEN))


def many_tokens(world):
    swept(world, sweeps.MANY_TOKENS, sweeps.many_tokens)


def shapes(world):
    swept(world, 5, sweeps.shapes)


def one_expert(world):
    swept(world, 33, lambda *both: sweeps.one_expert(*both, hidden=HIDDEN))


def open_hooks(world):
    """Four operations may wait for their hooks, and a fifth is refused."""
    buffer = v1(world, low_latency_mode=True)
    it = Exchange((5, 3), hidden=HIDDEN, most=8)
    x, ids = to_device(it.x(world.rank)), to_device(it.ids(world.rank))

    def dispatch():
        return buffer.low_latency_dispatch(
            x, ids, it.most, it.experts, use_fp8=False, return_recv_hook=True
        )

    sent = [dispatch() for _ in range(4)]
    text = str(raised(dispatch))
    assert "because in_flight = 4" in text, text
    for *_, hook in sent:
        hook()
    synchronize()
    low_latency(OnDevice(buffer), it)()
    buffer.destroy()


def made_and_destroyed(world):
    """The GPU has as much memory behind 200 buffers as behind the first ten."""
    it, free = Exchange((5, 3), hidden=HIDDEN, most=8), []
    for number in range(BUFFERS):
        buffer = v1(world, low_latency_mode=True)
        low_latency(OnDevice(buffer), it)()
        buffer.destroy()
        synchronize()
        if number >= 9:
            free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[-1] < 1 << 21, f"{free[0] - free[-1]} bytes less are free"


def check_no_rows(buffer, elastic, device):
    """One of two ranks without tokens, then both: with values of FP8 and without, cached, and without ids."""
    me = buffer.rank
    for tokens in ((0, 3), (3, 0), (0, 0)):
        ids = torch.tensor([[0, 5]] * tokens[me], dtype=torch.int64, device=device).reshape(-1, 2)
        weights = torch.ones(ids.shape, device=device)
        x = torch.ones(tokens[me], 256, dtype=torch.bfloat16, device=device)
        assert tokens[me] or 0 in (x.data_ptr(), ids.data_ptr())
        layout, found = layout_of(buffer, ids, 8), sum(tokens)
        for rows in (x, per_token_cast_to_fp8(x)):
            for given in ({"topk_idx": ids, "topk_weights": weights}, {}):
                recv_x, *_, handle, _ = buffer.dispatch(rows, **given, **layout)
                again, *_ = buffer.dispatch(rows, handle=handle)
                for one in (recv_x, again):
                    assert len(one[0] if isinstance(rows, tuple) else one) == found
            for expands in (False, True):
                recv_x, _, _, handle, _ = elastic.dispatch(
                    rows, topk_idx=ids, topk_weights=weights, num_experts=8, do_expand=expands
                )
                elastic.dispatch(rows, handle=handle, do_expand=expands)
                y = torch.ones(found, 256, dtype=torch.bfloat16, device=device)
                assert torch.equal(elastic.combine(y, handle)[0], 2 * x)
        recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, **layout
        )
        out, back, _ = buffer.combine(recv_x, handle, recv_weights)
        assert torch.equal(out, 2 * x)
        assert torch.equal(back, weights)
        for use_fp8 in (False, True):
            _, counts, handle, *_ = buffer.low_latency_dispatch(x, ids, 4, 8, use_fp8=use_fp8)
            assert int(counts.sum()) == found
            y = torch.ones(4, 8, 256, dtype=torch.bfloat16, device=device)
            assert torch.equal(buffer.low_latency_combine(y, ids, weights, handle)[0], 2 * x)


def no_rows(world):
    buffer, elastic = v1(world, low_latency_mode=True), v2(world, Case(2, max_tokens=4))
    check_no_rows(buffer, elastic, device_of(world))
    elastic.destroy()
    buffer.destroy()


CHECKS = [no_rows, every_m, many_tokens, shapes, one_expert, open_hooks, made_and_destroyed]
# In host memory `test_reports.py` has the others.
ON_HOST = (no_rows,)
