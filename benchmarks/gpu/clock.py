"""Times and memory on one GPU; on the CPU, for a dry run, the calls are made and counted once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPLAYED = 24
"""At least so many calls stand in a graph that is timed."""


def device() -> str:
    """Where everything runs."""
    return 'cuda' if torch.cuda.is_available() else 'cpu'


def graph_seconds(calls: list[Callable[[], object]], repeats: int = 12) -> float:
    """Device time of a call: replays of a graph of many, taken in turn, the median over them.

    Args:
        calls (list[Callable]): The same on different memory, more together than the cache holds.
        repeats (int): Replays.
    """
    if device() == 'cpu':
        return _wall(calls[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    rounds = -(-REPLAYED // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * rounds:
            call()
    graph.replay()
    return _events(graph.replay, repeats) / (rounds * len(calls))


def event_seconds(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """Device time of a call with the host at its side, the median."""
    if device() == 'cpu':
        return _wall(calls[0])
    for call in calls:
        call()
    return statistics.median(_events(calls[i % len(calls)], 1) for i in range(repeats))


def host_seconds(call: Callable[[], object], number: int = 30) -> float:
    """What a call costs when many are issued after each other: the larger of host and device."""
    if device() == 'cpu':
        return _wall(call)
    call()
    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(number):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / number)
    return statistics.median(found)


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Most that is held beyond what was held before."""
    if device() == 'cpu':
        return None
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_seconds(nbytes: int) -> float:
    """Time of a device-to-device copy of so many bytes, out of the cache."""
    sets = max(1, min(16, 2**28 // max(nbytes, 1)))
    pairs = [torch.empty(2, nbytes, dtype=torch.uint8, device=device()) for _ in range(sets)]
    return graph_seconds([lambda x=x: x[1].copy_(x[0]) for x in pairs])


def _wall(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _events(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
