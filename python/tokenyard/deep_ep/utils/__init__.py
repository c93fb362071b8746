"""Helpers that scripts of DeepEP import."""

from .event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
