"""Batches of operations; the code is shared with the mock backend, which imports nothing of the workers."""

from __future__ import annotations

from sandfleet.batch import Batches, BatchRun

__all__ = ["BatchRun", "Batches"]
