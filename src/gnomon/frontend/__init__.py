"""Requests with text in, deltas with text out: `LLM`, its asyncio twin, stop strings."""
