"""Models over the operations. `config` reads without torch, so this package imports nothing."""
