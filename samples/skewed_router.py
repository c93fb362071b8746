#!/usr/bin/env python3
"""Writes skewed-router.safetensors, the sample input of `tokenyard run --input`.

The data is synthetic: no model was run. Token embeddings lie around a few cluster centres, and half
of all tokens belong to the largest cluster, as the tokens of one topic would. A router with random
weights takes the top-k of a softmax over its logits, as the gates of Mixture-of-Experts models do.
Tokens of one cluster like the same experts, so the experts of the largest cluster are overloaded:
the busiest gets more than 4 times the mean load.

Needs Python 3 alone. The same bytes come out on every machine with IEEE arithmetic.
"""

import json
import math
import pathlib
import struct

TOKENS, HIDDEN, EXPERTS, TOPK = 512, 128, 32, 4
# How many of 16 tokens belong to each cluster.
CLUSTERS = [9, 3, 2, 1, 1]
NOISE = 0.35


class Random:
    """splitmix64, written out so that the sample never changes with a library."""

    def __init__(self, seed):
        self.state = seed

    def uniform(self):
        mask = (1 << 64) - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & mask
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return ((z ^ (z >> 31)) >> 11) / (1 << 53)

    def bell(self):
        """Near a normal distribution: the sum of 12 uniform numbers."""
        return sum(self.uniform() for _ in range(12)) - 6.0

    def vector(self):
        return [self.bell() for _ in range(HIDDEN)]


def bf16(value):
    """The bits of `value` rounded to bfloat16: nearest, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def route(embedding, router):
    logits = [sum(e * w for e, w in zip(embedding, row)) / math.sqrt(HIDDEN) for row in router]
    top = max(logits)
    exps = [math.exp(logit - top) for logit in logits]
    chosen = sorted(range(EXPERTS), key=lambda e: (-logits[e], e))[:TOPK]
    share = sum(exps[e] for e in chosen)
    return chosen, [exps[e] / share for e in chosen]


def main():
    random = Random(2026)
    centres = [random.vector() for _ in CLUSTERS]
    router = [random.vector() for _ in range(EXPERTS)]
    deck = [cluster for cluster, share in enumerate(CLUSTERS) for _ in range(share)]
    rows, indices, weights, loads = [], [], [], [0] * EXPERTS
    for _ in range(TOKENS):
        centre = centres[deck[int(random.uniform() * len(deck))]]
        embedding = [c + NOISE * random.bell() for c in centre]
        chosen, shares = route(embedding, router)
        rows += [bf16(value) for value in embedding]
        indices += chosen
        weights += shares
        for expert in chosen:
            loads[expert] += 1
    tensors = [
        ("x", "BF16", [TOKENS, HIDDEN], struct.pack(f"<{len(rows)}H", *rows)),
        ("topk_idx", "I64", [TOKENS, TOPK], struct.pack(f"<{len(indices)}q", *indices)),
        ("topk_weights", "F32", [TOKENS, TOPK], struct.pack(f"<{len(weights)}f", *weights)),
    ]
    about = "synthetic: softmax router over clustered embeddings, samples/skewed_router.py"
    header = {"__metadata__": {"num_experts": str(EXPERTS), "made_by": about}}
    offset = 0
    for name, dtype, shape, data in tensors:
        offsets = [offset, offset + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = pathlib.Path(__file__).with_name("skewed-router.safetensors")
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors))
    mean = TOKENS * TOPK / EXPERTS
    print(f"{path}: busiest expert {max(loads)} tokens, {max(loads) / mean:.1f} times the mean")


if __name__ == "__main__":
    main()
