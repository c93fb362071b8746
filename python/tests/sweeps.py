"""Exchanges over many sizes and shapes, as public reports name them; on two buffers, one of each kind."""

import exact
from exact import Exchange

MOST_TOKENS = (1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 255, 257)
MANY_TOKENS = 131_072
SHAPES = {
    "Kimi-K3": {"experts": 896, "topk": 16, "hidden": 3584},
    "Nemotron": {"experts": 512, "topk": 22, "hidden": 1024},
    "hidden 2432": {"hidden": 2432},
    "hidden 2880": {"hidden": 2880},
    "hidden 6656": {"hidden": 6656},
}


def every_kind(buffer, elastic, it, use_fp8=False):
    """An exchange in each form that the drop-in has."""
    exact.low_latency(buffer, it, use_fp8=use_fp8)()
    exact.normal(buffer, it, use_fp8=use_fp8)()
    exact.elastic(elastic, it, use_fp8=use_fp8)()
    exact.elastic(elastic, it, is_expanded=True, use_fp8=use_fp8)()


def every_m(buffer, elastic, hidden=16):
    for most in MOST_TOKENS:
        for tokens in sorted({0, 1, most}):
            # The other rank has as many as are left.
            every_kind(buffer, elastic, Exchange((tokens, most - tokens), hidden=hidden, most=most))


def many_tokens(buffer, elastic, both=True):
    """More tokens than 16 bits count, on each rank in turn."""
    for tokens in ((65_537, 3), (1, MANY_TOKENS)) if both else ((65_537, 3),):
        it = Exchange(tokens, most=MANY_TOKENS)
        exact.normal(buffer, it)()
        exact.elastic(elastic, it)()


def shapes(buffer, elastic):
    for shape in SHAPES.values():
        it = Exchange((5, 2), most=5, **shape)
        for use_fp8 in (False, True):
            every_kind(buffer, elastic, it, use_fp8)


def one_expert(buffer, elastic, hidden=16):
    """Counts stay below R * M where all tokens of all ranks go to one expert."""
    ranks = buffer.group_size
    sizes = {"experts": max(8, ranks), "topk": 1, "hidden": hidden, "most": 33}
    it = Exchange((33,) * ranks, is_skewed=True, **sizes)
    every_kind(buffer, elastic, it)
