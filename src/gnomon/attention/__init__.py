"""Attention library for sparse MLA: geometry, cache layouts, key sets, plans, operators, providers.

Usable alone. Imports torch (and triton where installed), and of gnomon only `gnomon.errors`.
"""
