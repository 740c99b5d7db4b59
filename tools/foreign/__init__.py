"""The kernels that Ampere and Ada run, executed on a Hopper GPU: their PTX, assembled for it. For tests, not in the package."""
