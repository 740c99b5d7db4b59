"""The @triton.jit pieces that kernels of several rooms share; imports triton, so nothing but kernels imports it."""
