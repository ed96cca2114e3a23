"""A deliberately wrong adapter for the tests: flips one bit of one all-gather on every rank, once.

REHEARSAL_FLIP="ROWS NUMBER": the NUMBER-th gather of bf16 that gives ROWS rows, which are logits of a forward.
"""


def register() -> None:
    import functools
    import os

    import torch
    from sglang.srt.distributed import parallel_state

    rows, number = map(int, os.environ["REHEARSAL_FLIP"].split())
    stock = parallel_state.GroupCoordinator.all_gather
    calls = [0]

    @functools.wraps(stock)
    def all_gather(self, input_, *args, **kwargs):
        out = stock(self, input_, *args, **kwargs)
        if self.world_size > 1 and out.dtype == torch.bfloat16 and out.shape[0] == rows:
            calls[0] += 1
            if calls[0] == number:
                # The lowest bit of one value that is not the largest.
                out.view(torch.int16)[0, int(out[0].argmin())] ^= 1
        return out

    parallel_state.GroupCoordinator.all_gather = all_gather
