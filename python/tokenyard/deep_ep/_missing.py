"""Names that DeepEP or a fork of it has and this package has not. A test holds the list."""

from collections.abc import Callable
from typing import Any, NoReturn

from tokenyard import errors

# Reasons, and the names of what is not there for each of them.
_REASONS = {
    "rows of NVFP4": "use_nvfp4 x_global_scale use_ue8m0_for_sf",
    "signals between a GEMM and a combine": "overlap packed_recv_count comp_signal block_m threshold src_signals "
    "src_signal_expect_value",
    "waiting times per source rank on this kernel set": "dispatch_wait_recv_cost_stats combine_wait_recv_cost_stats",
    "views of the memory that rows arrive in": "borrow_recv",
    "calls outside of EPBuffer whose event gives their results": "defer_epilogue",
    "calls outside of HybridEPBuffer that drop rows above a limit": "non_blocking",
    "redundant experts outside of EPBuffer": "lb_allocation_plan_or_num_bytes",
    # Of `deep_ep.comm`.
    "communicators of NCCL": "get_nccl_comm_handle",
}
MISSING = {name: it for it, names in _REASONS.items() for name in names.split()}


class MissingError(errors.UnsupportedError, TypeError):
    """A keyword or a method that is not there. It is a TypeError, too: callers try again without what is refused."""


def missing(operation: str, name: str) -> NoReturn:
    """Raises for a name of the list. The caller's code is the same on all ranks, so no rank needs a message."""
    raise MissingError(
        f"{operation}: found {name}; expected a call without it: tokenyard has no {MISSING[name]} yet",
        kind="unsupported",
        operation=operation,
        fix="see what is missing in docs/deep_ep.md",
    )


# They describe the signals of `overlap`.
OF_OVERLAP = ("packed_recv_count", "comp_signal", "block_m", "threshold")


def refuse_missing(operation: str, keywords: dict[str, object], ignored: tuple[str, ...]) -> None:
    """Judges keywords that only forks have: those that ask for nothing pass, and those that are `ignored`. Without
    `overlap`, all that describe it may be."""
    is_off = "overlap" in keywords and not keywords["overlap"]
    for name, value in keywords.items():
        if name in ignored and (is_off or name not in OF_OVERLAP):
            continue
        if name not in MISSING:
            raise TypeError(f"{operation}() got an unexpected keyword argument {name!r}")
        asks_for_nothing = value is None or (isinstance(value, (int, float)) and not value)
        if not asks_for_nothing:
            missing(operation, name)


def absent(name: str, owner: str) -> Callable[..., NoReturn]:
    """A function, or a method, that is not there."""

    def method(*arguments: Any, **keywords: Any) -> NoReturn:
        missing(owner, name)

    method.__name__ = name
    method.__doc__ = "Not there: raises NotImplementedError."
    return method
