"""What `/metrics` says, in Prometheus' text format. Counters live in this process: an engine's restart keeps them."""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from thalweg.server.messages import EngineReport, Tokens
from thalweg.server.streams import Stream

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counted where messages from the engine arrive."""

    def __init__(self) -> None:
        disable_created_metrics()
        registry = self.registry = CollectorRegistry()
        self._finished = Counter("thalweg:sequences", "Sequences that ended, by how", ["finish"], registry=registry)
        self._prompt = Counter("thalweg:prompt_tokens", "Tokens of prompts that were read", registry=registry)
        self._cached = Counter("thalweg:cached_tokens", "Those that came from the prefix cache", registry=registry)
        self._generated = Counter("thalweg:generation_tokens", "Tokens written", registry=registry)
        self.engine_restarts = Counter("thalweg:engine_restarts", "Engine processes replaced", registry=registry)
        self._first = _histogram("thalweg:time_to_first_token_seconds", "Submission to first token", registry)
        self._between = _histogram("thalweg:inter_token_latency_seconds", "Token to token of a sequence", registry)
        self._whole = _histogram("thalweg:sequence_seconds", "Submission to last token", registry)

    def watch_engine(self, report: Callable[[], EngineReport | None]) -> None:
        """Adds gauges of the engine's newest report."""
        self.registry.register(_Engine(report))

    def tokens(self, tokens: Tokens, stream: Stream) -> None:
        """What a step gave one sequence of `stream`."""
        now = time.perf_counter()
        last = stream.last_token.get(tokens.id)
        if last is None:
            self._first.observe(now - stream.began)
            self._prompt.inc(tokens.prompt_tokens)
            self._cached.inc(tokens.cached_tokens)
        else:
            for _ in tokens.tokens:  # the tokens of one step share its time
                self._between.observe((now - last) / len(tokens.tokens))
        stream.last_token[tokens.id] = now
        self._generated.inc(len(tokens.tokens))
        if tokens.finish is not None:
            self._whole.observe(now - stream.began)
            self.finished(tokens.finish, 1)

    def finished(self, how: str, sequences: int) -> None:
        """how: stop, length, cancelled, refused or error."""
        self._finished.labels(how).inc(sequences)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)


class _Engine(Collector):
    def __init__(self, report: Callable[[], EngineReport | None]) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        report = self._report()
        if report is None:
            return
        for name, text, value in (
            ("running_requests", "Sequences with pages", report.running),
            ("waiting_requests", "Sequences that wait for pages", report.waiting),
            ("kv_pages_used", "Pages of 256 tokens that are taken", report.pages_used),
            ("kv_pages_cached", "Those that only the prefix cache holds", report.pages_cached),
            ("kv_pages", "Pages of 256 tokens", report.pages_total),
            ("window_pages_used", "Window pages that are taken", report.window_pages_used),
            ("window_pages", "Window pages", report.window_pages_total),
        ):
            yield GaugeMetricFamily(f"thalweg:{name}", text, value)
        retractions = CounterMetricFamily("thalweg:retractions", "Sequences that gave up their pages for others")
        retractions.add_metric([], report.retractions)
        yield retractions
        for phase, sums in (("prefill", report.prefill), ("decode", report.decode)):
            for name, total in (("steps", sums.steps), ("rows", sums.rows), ("step_seconds", sums.seconds)):
                yield CounterMetricFamily(f"thalweg:{phase}_{name}", f"Since the engine started: {name}", total)


def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, buckets=_SECONDS, registry=registry)
