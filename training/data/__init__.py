"""Training text, written by this folder itself but for Python's own documentation."""

from __future__ import annotations
