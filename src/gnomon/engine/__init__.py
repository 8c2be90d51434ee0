"""Requests as token ids in, token ids out: scheduler, batch, runner, sampler, engine process.

Text is unknown here; the scheduler and its values are plain Python without torch.
"""
