"""The tables of DeepEP's tuned chunk sizes. Only their numbers matter to callers, who print and compare them."""

from ._C import Config

# Ranks: send and receive chunks inside a node for dispatch and combine, then between nodes.
_DISPATCH = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
_COMBINE = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


def chunk_config(operation: str, ranks: int, sms: int) -> Config:
    """The entry of the least number of ranks that is not below `ranks`, or the last."""
    table = _DISPATCH if operation == "dispatch" else _COMBINE
    key = next((key for key in table if ranks <= key), 160)
    return Config(sms, *table[key])
