"""Meshes, collectives and sharding: the only package that imports torch.distributed."""
