"""Pieces that kernels of several rooms share."""
