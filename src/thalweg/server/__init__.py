"""OpenAI-compatible HTTP: one process answers, a child process runs the engine. Needs the `serve` extra."""
