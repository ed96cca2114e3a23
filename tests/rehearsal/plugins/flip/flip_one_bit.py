"""A deliberately wrong adapter for the tests: flips one bit of one all-gather on every rank, once."""


def register() -> None:
    import torch
    from sglang.srt.distributed import parallel_state

    stock = parallel_state.GroupCoordinator.all_gather
    calls = [0]

    def all_gather(self, input_, *args, **kwargs):
        out = stock(self, input_, *args, **kwargs)
        # The logits gather of a decode step; the lowest bit of one value that is not the largest.
        if self.world_size > 1 and out.dtype == torch.bfloat16:
            calls[0] += 1
            if calls[0] == 12:
                out.view(torch.int16)[0, int(out[0].argmin())] ^= 1
        return out

    parallel_state.GroupCoordinator.all_gather = all_gather
