"""The tiny checkpoint's shape, tokenizer and dense differentiable model."""
