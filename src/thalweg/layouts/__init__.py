"""Byte formats of the caches, one a file. `sizes` is arithmetic without torch, so this package imports nothing."""
