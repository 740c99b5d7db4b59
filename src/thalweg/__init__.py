"""Thalweg: long-context serving of sparse-attention models. Cost follows the tokens that are there."""

__version__ = "0.1.0"
