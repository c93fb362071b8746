"""Replicas of experts: their weights to the slots of other ranks, the slots' gradients back, and ids of copies.

Watched by `python/tests/test_replicas.py`, `test_replicas_ends.py`, `test_replicas_schedule.py`, `test_physical_ids.py`
and `test_deep_ep_replicas.py`.
"""

from .calls import PendingReplicas, Replicas
from .physical import physical_ids

__all__ = ["PendingReplicas", "Replicas", "physical_ids"]
