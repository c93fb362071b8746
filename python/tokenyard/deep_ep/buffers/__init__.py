"""The two interfaces of DeepEP."""

from .legacy import Buffer

__all__ = ["Buffer"]
