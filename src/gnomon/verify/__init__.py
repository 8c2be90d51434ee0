"""The laws' runner: gnomon against transformers and against itself, on any machine and model."""
