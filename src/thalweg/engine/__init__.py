"""The embedded engine: pools and pages, the step, sampling, generation."""
