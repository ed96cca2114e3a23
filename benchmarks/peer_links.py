"""What the links of this machine give to plain copies (copy engines), as a ceiling: GB/s a direction, both ways too."""

import sys

import torch


def gbps(pairs, nbytes=256 << 20, times=10):
    """Copies from a to b for every pair at once: GB/s of one pair, by events on each source's stream."""
    sources = [torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{a}") for a, _ in pairs]
    targets = [torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{b}") for _, b in pairs]
    streams = [torch.cuda.Stream(device=f"cuda:{a}") for a, _ in pairs]
    marks = []
    for turn in range(2):
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        marks = []
        for (a, _), source, target, stream in zip(pairs, sources, targets, streams, strict=True):
            with torch.cuda.device(a), torch.cuda.stream(stream):
                begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
                begin.record(stream)
                for _ in range(times if turn else 2):
                    target.copy_(source, non_blocking=True)
                end.record(stream)
                marks.append((begin, end))
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    return min(nbytes * times / begin.elapsed_time(end) / 1e6 for begin, end in marks)


count = torch.cuda.device_count()
if count < 2:
    sys.exit("needs 2 GPUs")
print(f"copy engine 0 to 1: {gbps([(0, 1)]):.0f} GB/s; both ways: {gbps([(0, 1), (1, 0)]):.0f} GB/s a direction")
