"""Operators: the entry that checks axes, the loops over chunks and segments, and their values."""

from __future__ import annotations
