"""Scripts that make what the package ships, and tools of its tests; not part of the package."""
