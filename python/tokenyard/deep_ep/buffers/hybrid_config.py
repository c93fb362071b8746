"""The config of Hybrid-EP's buffers, which callers read: sizes here, and numbers of kernels that mean nothing here."""

from typing import Any

from ..utils.math import align

# DeepEP takes memory for as many tokens at least, and in units of these.
_LEAST_TOKENS = 512
_UNIT = 64


class HybridEpConfigInstance:
    """The sizes of a buffer or of a call. Other fields are what a caller has set."""

    def __init__(self, **fields: Any) -> None:
        self.hidden_dim: int = 0
        self.max_num_of_tokens_per_rank: int = 0
        self.num_of_experts_per_rank: int = 0
        self.num_of_ranks_per_node: int = 0
        self.num_of_nodes: int = 0
        self.pad_multiple: int = 0
        # UINT8 or UINT16, by the bytes of a number.
        self.token_data_type: str = "UINT16"
        vars(self).update(fields)

    def is_valid(self, *arguments: Any, **keywords: Any) -> bool:
        """Whether its sizes are those of a buffer."""
        sizes = (self.hidden_dim, self.max_num_of_tokens_per_rank, self.num_of_experts_per_rank)
        return min(*sizes, self.num_of_ranks_per_node, self.num_of_nodes) > 0

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"HybridEpConfigInstance({fields})"


class Runtime:
    """The count of how often a buffer has grown."""

    def __init__(self) -> None:
        self.buffer_generation = 0


class Configurer:
    """The config of a buffer, which grows with its calls, and those of calls."""

    def __init__(self, runtime: Runtime, config: HybridEpConfigInstance) -> None:
        self._runtime, self.buffer_config = runtime, config
        config.max_num_of_tokens_per_rank = _capacity(config.max_num_of_tokens_per_rank)
        self._first_tokens = config.max_num_of_tokens_per_rank

    def get_default_config(self, fuse_permute_dispatch: bool = False) -> HybridEpConfigInstance:
        """A config with the sizes of the buffer."""
        return HybridEpConfigInstance(**vars(self.buffer_config))

    def adjust_template(
        self, config: HybridEpConfigInstance, fuse_permute_dispatch: bool = False
    ) -> HybridEpConfigInstance:
        """The config as it is: it has nothing that depends on the form of a call."""
        return config

    def template(self, **fields: Any) -> HybridEpConfigInstance:
        """A config of the buffer's sizes, with other fields."""
        return HybridEpConfigInstance(**{**vars(self.buffer_config), **fields})

    def room_for(self, tokens: int) -> int:
        """M to open a communicator with, for a call that names none: the buffer's first, or the next power of two."""
        return (
            self._first_tokens if tokens <= self._first_tokens else 1 << (tokens - 1).bit_length()
        )

    def grow(self, hidden: int, tokens: int, local_experts: int) -> None:
        """Makes the sizes as large as those of a call, at least. Handles from before then belong to no memory."""
        config = self.buffer_config
        wanted = {
            "hidden_dim": hidden,
            "max_num_of_tokens_per_rank": tokens,
            "num_of_experts_per_rank": local_experts,
        }
        if all(value <= getattr(config, name) for name, value in wanted.items()):
            return
        wanted["max_num_of_tokens_per_rank"] = _capacity(tokens)
        for name, value in wanted.items():
            setattr(config, name, max(value, getattr(config, name)))
        self._runtime.buffer_generation += 1


def _capacity(tokens: int) -> int:
    return align(max(tokens, _LEAST_TOKENS), _UNIT)
