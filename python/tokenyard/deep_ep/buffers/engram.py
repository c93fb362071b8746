"""Entries that each rank reads from all ranks, of DeepEP 2.5: `EngramBuffer`."""

from collections.abc import Callable, Sequence
from typing import Any

from .. import _C
from .._arrays import Refusal, Tensor, has_array, invalid
from .._calls.tensors import expect_tensor
from .._dynamo import make_opaque
from .._ops.common import tensor_of
from .._ops.table import Entries, Shape
from .._torch import torch
from ..utils.math import align, ceil_div
from .base import BufferBase, barrier, get_physical_domain_size, ranks_of

# Million reads in a second that DeepEP expects of a NIC, over which it spreads them; and the depths of a queue pair.
_READS = 45 * 10
_DEPTHS = (1024, 32768)


class EngramBuffer(BufferBase):
    """Layers of entries, such as an embedding that is too large for one device. Each rank reads entries of any rank.

    To construct it is collective, and so are `set_config`, `write` and `barrier`. `group` is a process group of torch
    (or a tokenyard.World). Numbers of bytes and of queue pairs stay attributes: `set_config` sizes the memory.
    """

    def __init__(
        self,
        group: Any,
        num_gpu_bytes: int,
        num_rdma_storage_bytes: int | None = None,
        use_cpu_rdma_storage: bool = False,
        num_allocated_qps: int = 1,
        qp_depth: int = _DEPTHS[0],
        restrict_rd_atomic: bool = False,
        allow_hybrid_mode: bool = True,
        sl_idx: int | None = None,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        num_rdma_storage_size: int | None = None,
    ) -> None:
        if (num_rdma_storage_bytes is None) == (num_rdma_storage_size is None):
            raise TypeError(
                "EngramBuffer: expected num_rdma_storage_bytes, or num_rdma_storage_size, its old name; not both"
            )
        if num_rdma_storage_bytes is None:
            num_rdma_storage_bytes = num_rdma_storage_size
        sizes = ("num_gpu_bytes", "num_rdma_storage_bytes")
        counts = ("num_allocated_qps", "qp_depth", "sl_idx")
        self._meet(locals(), counts, sizes)
        self.num_gpu_bytes, self.num_rdma_storage_bytes = num_gpu_bytes, num_rdma_storage_bytes
        self.use_cpu_rdma_storage = use_cpu_rdma_storage
        self.num_allocated_qps, self.qp_depth = num_allocated_qps, qp_depth
        self.nccl_comm_handle = None
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(
            self.rank_idx, self.num_scaleup_ranks
        )
        self._entries = Entries(self._pool, "EngramBuffer.set_config")
        self._tokens = self._each = 0
        # Memory that fetches of each layer write. Ids of no entry leave it as it was.
        self._rooms: list[Any] = []

    @property
    def context(self) -> "BufferBase | None":
        """As `main_context`."""
        return self.main_context

    @staticmethod
    def get_storage_size_hint(
        group: Any,
        num_entries_per_layer: Sequence[int],
        hidden: int,
        num_max_tokens: int,
        num_entries_per_token: int,
        dtype: Any = torch.bfloat16,
        num_sf_packs: int = 0,
    ) -> tuple[int, int]:
        """Bytes that DeepEP would take: for what fetches give and scales, and for entries. Collective with scales."""
        unit, entry = _C.get_num_allocation_alignment(), hidden * dtype.itemsize
        layers, entries = len(num_entries_per_layer), sum(num_entries_per_layer)
        gpu = align(layers * num_max_tokens * num_entries_per_token * entry, unit)
        if num_sf_packs:
            domains, _ = get_physical_domain_size(group)
            gpu += align(entries * domains * num_sf_packs * 4, unit)
        return gpu, align(entries * entry, unit)

    @staticmethod
    def get_theoretical_config(
        group: Any,
        num_layers: int,
        num_max_tokens: int,
        num_entries_per_token: int,
        num_max_read_requests_per_qp: int = 16,
    ) -> tuple[int, int, bool]:
        """`(num_qps, qp_depth, restrict_rd_atomic)` that DeepEP would use. Nothing here depends on them."""
        peers, (depth, most) = ranks_of(group), _DEPTHS
        qps = max(1, ceil_div(ceil_div(_READS, num_max_read_requests_per_qp), peers))
        reads = num_layers * num_max_tokens * num_entries_per_token
        while depth < most and ceil_div(reads, qps * peers) > depth:
            depth *= 2
        if ceil_div(reads, qps * peers) <= depth:
            return qps, depth, False
        return ceil_div(reads, peers * most), most, True

    def set_config(
        self,
        num_entries_per_layer: Sequence[int],
        hidden: int,
        num_max_tokens: int,
        num_entries_per_token: int,
        dtype: Any = torch.bfloat16,
        num_sf_packs: int = 0,
    ) -> None:
        """Makes room for entries of each rank in up to 128 layers, and for fetches. Collective; equal on all ranks.

        - `dtype`: bfloat16, or float8_e4m3fn with `num_sf_packs` scales of 4 bytes for each entry.
        - `num_max_tokens * num_entries_per_token`: the most entries of a fetch from one layer.
        """
        shape, wrong = None, None
        try:
            shape = Shape.of(
                num_entries_per_layer,
                hidden,
                dtype,
                num_sf_packs,
                (num_max_tokens, num_entries_per_token),
            )
        except Refusal as refusal:
            wrong = f"EngramBuffer.set_config: {refusal}"
        opened = self._entries.open(shape, wrong)
        self._tokens, self._each = num_max_tokens, num_entries_per_token
        room = (opened.most, opened.hidden)
        self._rooms = [
            torch.zeros(room, dtype=dtype, device=self._pool.device) for _ in opened.entries
        ]

    def write(self, storages: Sequence[Tensor], sfs: Sequence[Tensor] | None = None) -> None:
        """Writes this rank's entries of all layers, `[n, H]` each, in place of those before. Collective.

        No rank may have a fetch that waits. `sfs`: for FP8 the scales of all ranks' entries in each layer, `[R * n, S]`
        of float32 or int32, equal on all ranks. They are held as they are.
        """
        self._entries.write("EngramBuffer.write", storages, sfs)

    def fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = True
    ) -> list[Callable[[], Any]]:
        """Reads entries of any rank: id `rank * n + entry` of each layer, `[L, T, G]` int32. This rank alone.

        Returns a hook for each layer, to call in any order. It waits, and gives `[T, G * H]`, which the next fetch
        overwrites; for FP8 `(data, scales [T, G * S])`, with strides `(1, T)`, T rounded up to 4, or row-major without
        `use_tma_aligned_col_major_sf`. Rows of ids that name no entry stay as they were.
        """
        operation = "EngramBuffer.fetch"
        shape, ids = self._entries.shape, tensor_of(indices)
        try:
            expect_tensor("indices", ids)
            layers = len(self._rooms)
            is_fit = ids.dim() == 3 and ids.shape[1] <= self._tokens
            if layers and not (is_fit and (ids.shape[0], ids.shape[2]) == (layers, self._each)):
                wanted = f"[{layers}, at most {self._tokens}, {self._each}]"
                raise Refusal(f"indices: found shape {list(ids.shape)}; expected {wanted}")
        except Refusal as refusal:
            raise invalid(operation, f"{operation}: {refusal}") from refusal
        columns = bool(use_tma_aligned_col_major_sf)
        if not self._rooms:
            # It says what is missing.
            self._entries.expect_open(operation)
        has_scales = shape is not None and shape.packs > 0
        hooks = []
        # Results are as the indices are.
        given = indices if has_array(indices) else ids
        for layer, room in enumerate(self._rooms):
            hook = self._entries.fetch(operation, layer, given[layer], columns, room)
            hooks.append(hook if has_scales else _data_of(hook))
        return hooks

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
    ) -> None:
        """As `EPBuffer.barrier`. Collective."""
        barrier(self, wait_comm_stream, with_cpu_sync, sequential)


def _data_of(hook: Callable[[], tuple[Any, Any]]) -> Callable[[], Any]:
    """The hook of entries without scales."""
    return lambda: hook()[0]


make_opaque(EngramBuffer, BufferBase)
