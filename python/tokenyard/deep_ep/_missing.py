"""Names that DeepEP or a fork of it has and this package has not. A test holds the list."""

from typing import NoReturn

from tokenyard import errors

# Names that callers can use, and why they are not there.
MISSING = {
    "use_nvfp4": "rows of NVFP4",
    "x_global_scale": "rows of NVFP4",
    "use_ue8m0_for_sf": "rows of NVFP4",
    "overlap": "signals between a GEMM and a combine",
    "packed_recv_count": "signals between a GEMM and a combine",
    "comp_signal": "signals between a GEMM and a combine",
    "block_m": "signals between a GEMM and a combine",
    "threshold": "signals between a GEMM and a combine",
    "src_signals": "signals between a GEMM and a combine",
    "src_signal_expect_value": "signals between a GEMM and a combine",
    "dispatch_wait_recv_cost_stats": "waiting times per source rank on this kernel set",
    "combine_wait_recv_cost_stats": "waiting times per source rank on this kernel set",
    "borrow_recv": "views of the memory that rows arrive in",
    "defer_epilogue": "calls whose event gives their results",
    "non_blocking": "calls that drop rows above a limit",
    "lb_allocation_plan_or_num_bytes": "redundant experts",
    "engram_write": "engram",
    "engram_fetch": "engram",
    "get_engram_storage_size_hint": "engram",
    "pp_set_config": "pipeline-parallel send and receive",
    "pp_send": "pipeline-parallel send and receive",
    "pp_recv": "pipeline-parallel send and receive",
    "get_pp_buffer_size_hint": "pipeline-parallel send and receive",
    "agrs_set_config": "all-gather and reduce-scatter",
    "agrs_get_inplace_tensor": "all-gather and reduce-scatter",
    "agrs_new_session": "all-gather and reduce-scatter",
    "create_agrs_session": "all-gather and reduce-scatter",
    "destroy_agrs_session": "all-gather and reduce-scatter",
    "get_agrs_buffer_size_hint": "all-gather and reduce-scatter",
    "get_agrs_num_max_session_bytes": "all-gather and reduce-scatter",
    "all_gather": "all-gather and reduce-scatter",
}


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


def refuse_missing(operation: str, keywords: dict[str, object], ignored: tuple[str, ...]) -> None:
    """Judges keywords that only forks have: those that ask for nothing pass."""
    for name, value in keywords.items():
        if name in ignored:
            continue
        if name not in MISSING:
            raise TypeError(f"{operation}() got an unexpected keyword argument {name!r}")
        asks_for_nothing = value is None or (isinstance(value, (int, float)) and not value)
        if not asks_for_nothing:
            missing(operation, name)


# They describe the signals of `overlap`.
_OF_OVERLAP = ("packed_recv_count", "comp_signal", "block_m", "threshold")


def ignored_keywords(keywords: dict[str, object]) -> tuple[str, ...]:
    """Keywords of a fork's low latency combine that mean nothing here, whatever their values: without `overlap`, all
    that describe it."""
    is_off = "overlap" in keywords and not keywords["overlap"]
    return ("num_sms", *_OF_OVERLAP) if is_off else ("num_sms",)
