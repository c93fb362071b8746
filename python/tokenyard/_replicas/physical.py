"""Ids of copies for ids of experts."""

from typing import Any, Literal

from tokenyard import errors

from .arguments import integer_of
from .tensors import Refusal, of_torch, type_of


def _invalid(text: str) -> errors.InvalidInputError:
    return errors.InvalidInputError(
        f"physical_ids: {text}", kind="invalid_input", operation="physical_ids"
    )


def _integer(name: str, value: Any) -> int:
    try:
        return integer_of(name, value)
    except Refusal as refusal:
        raise _invalid(str(refusal)) from None


def physical_ids(
    topk_idx: Any,
    plan: Any,
    *,
    experts: int,
    by: Literal["token", "locality"] = "token",
    rank: int = 0,
    domain_ranks: int = 1,
) -> Any:
    """The ids of copies to which a rank sends its tokens, in place of ids of experts: `[T, K]`, of the same type.

    A rank has places for its own experts, and then for its slots: place `i` of rank `r` has the id
    `r * (E / R + C) + i`. So a communicator of `R * (E / R + C)` experts takes them.

    - `topk_idx`: `[T, K]` ids of experts below `experts`, E, an integer tensor of torch or an array of numpy, of a type
      that holds `R * (E / R + C)`; -1 stays -1.
    - `plan`: `[R, C]`, the expert of each slot or -1, of the same library and device; on the host also what
      `plan_replicas` gives.
    - `by`: `"token"`, copies of an expert take turns, by token, begun at `rank`. `"locality"`, the same among the
      copies of the nearest ones alone: on rank `rank`, or else in its domain of `domain_ranks` ranks, or else anywhere.

    Local: nothing is sent. On a GPU it is some kernels in the order of the current stream, and the host reads no
    values: a graph may capture it. Other ids below 0 stay as they are. Those of E or more become at least
    `R * (E / R + C)`, so a dispatch refuses them. Raises InvalidInputError.
    """
    library, ids, slots = _arrays(topk_idx, plan)
    ranks, spare = slots.shape
    experts = _integer("experts", experts)
    rank, domain_ranks = _integer("rank", rank), _integer("domain_ranks", domain_ranks)
    if experts < 1 or ranks < 1 or experts % ranks:
        raise _invalid(f"experts: found {experts}; expected a multiple of the plan's {ranks} ranks")
    if by not in ("token", "locality"):
        raise _invalid(f"by: found {by!r}; expected token or locality")
    if not 0 <= rank < ranks:
        raise _invalid(f"rank: found {rank}; expected one of {ranks}")
    if domain_ranks < 1 or ranks % domain_ranks:
        raise _invalid(f"domain_ranks: found {domain_ranks}; expected a divisor of {ranks}")
    local = experts // ranks
    places = ranks * (local + spare)
    if library.largest(topk_idx) < places:
        raise _invalid(
            f"topk_idx: found type {type_of(topk_idx)}; expected one that holds {places}, the number of places"
        )
    near = (rank, domain_ranks) if by == "locality" else None
    count, table = _copies(library, slots, local, near)
    tokens = library.arange(ids.shape[0])[:, None] + rank
    is_id = (ids >= 0) & (ids < experts)
    clipped = library.where(is_id, ids, 0)
    found = table[clipped, tokens % count[clipped]]
    # One between the numbers of experts and of places would become the id of a copy.
    others = library.where((ids >= experts) & (ids < places), places, ids)
    return library.of_type(library.where(is_id, found, others), topk_idx)


def _copies(library: Any, slots: Any, local: int, near: tuple[int, int] | None) -> tuple[Any, Any]:
    """How many copies each expert has, `[E]`, and their ids in ascending order, `[E, R * (E / R + C)]`."""
    ranks, spare = slots.shape
    own = library.arange(ranks * local).reshape(ranks, local)
    of_places = library.concatenate([own, slots]).reshape(-1)
    is_copy = own.reshape(-1)[:, None] == of_places[None]
    ids = library.arange(ranks * (local + spare))
    if near is not None:
        rank, domain = near
        ranks_of = ids // (local + spare)
        for is_near in (ranks_of // domain == rank // domain, ranks_of == rank):
            kept = is_copy & is_near
            is_copy = library.where(kept.any(1)[:, None], kept, is_copy)
    behind = library.where(is_copy, ids, ids.shape[0])
    return is_copy.sum(1), library.sorted(behind)


class _Numpy:
    def __init__(self) -> None:
        import numpy

        self._numpy: Any = numpy
        self.where = numpy.where

    def arange(self, count: int) -> Any:
        return self._numpy.arange(count, dtype=self._numpy.int64)

    def concatenate(self, parts: list[Any]) -> Any:
        return self._numpy.concatenate(parts, axis=1)

    def sorted(self, values: Any) -> Any:
        return self._numpy.sort(values, axis=1)

    def of_type(self, found: Any, like: Any) -> Any:
        return found.astype(like.dtype)

    def largest(self, like: Any) -> int:
        return int(self._numpy.iinfo(like.dtype).max)


class _Torch:
    def __init__(self, device: Any) -> None:
        import torch

        self._torch: Any = torch
        self._device = device
        self.where = torch.where

    def arange(self, count: int) -> Any:
        return self._torch.arange(count, device=self._device)

    def concatenate(self, parts: list[Any]) -> Any:
        return self._torch.cat(parts, 1)

    def sorted(self, values: Any) -> Any:
        return self._torch.sort(values, 1).values

    def of_type(self, found: Any, like: Any) -> Any:
        return found.to(like.dtype)

    def largest(self, like: Any) -> int:
        return int(self._torch.iinfo(like.dtype).max)


def _arrays(topk_idx: Any, plan: Any) -> tuple[Any, Any, Any]:
    """The functions of a library, and both arrays as int64. Raises InvalidInputError."""
    if of_torch(topk_idx):
        import torch

        library: Any = _Torch(topk_idx.device)
        slots = plan if of_torch(plan) else torch.as_tensor(_host(plan))
        if slots.device != topk_idx.device:
            raise _invalid(
                f"plan: found it on {slots.device}; expected {topk_idx.device}, as of topk_idx: move it there once"
            )
        for name, one in (("topk_idx", topk_idx), ("plan", slots)):
            if one.is_floating_point() or one.is_complex() or one.dtype == torch.bool:
                raise _invalid(f"{name}: found type {type_of(one)}; expected integers")
        ids, slots = topk_idx.long(), slots.long()
    else:
        import numpy

        if not isinstance(topk_idx, numpy.ndarray):
            found = type(topk_idx).__name__
            raise _invalid(
                f"topk_idx: found {found}; expected a tensor of torch or an array of numpy"
            )
        library = _Numpy()
        if topk_idx.dtype.kind not in "iu":
            raise _invalid(f"topk_idx: found type {topk_idx.dtype}; expected integers")
        ids, slots = topk_idx.astype(numpy.int64), _host(plan)
    for name, one, shape in (("topk_idx", ids, "[T, K]"), ("plan", slots, "[R, C]")):
        if len(one.shape) != 2:
            raise _invalid(f"{name}: found shape {list(one.shape)}; expected {shape}")
    return library, ids, slots


def _host(plan: Any) -> Any:
    """A plan in host memory as an array of int64."""
    import numpy

    try:
        found = numpy.asarray(plan)
        if found.dtype.kind not in "iu" and found.size:
            raise _invalid(f"plan: found type {found.dtype}; expected integers")
        return found.astype(numpy.int64)
    except (TypeError, ValueError) as error:
        if isinstance(error, errors.Error):
            raise
        raise _invalid(f"plan: cannot be read: {error}") from error
