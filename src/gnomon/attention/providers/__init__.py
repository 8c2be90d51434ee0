"""Providers: families of kernels behind the same operator contracts."""

from __future__ import annotations
