"""Tools for the Triton kernels of `thalweg.ops`: the suite that compiles them for every architecture, without a GPU."""
