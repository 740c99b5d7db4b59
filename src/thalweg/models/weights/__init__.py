"""Checkpoint folders as tensors. headers, expected and names need no torch; checkpoint and quantization do."""
