"""Small stand-ins around the real DSpark classes: what these need of a model and a worker, nothing that is patched."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

VOCAB, STRIDE = 32, 6


class Markov(torch.nn.Module):
    """A draft head that adds nothing to the base logits."""

    vocab_shard = None
    vocab_size = VOCAB
    supports_sharded_greedy = False

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def init_state(self, hidden):
        return None

    def step_bias(self, prev_tokens, *, hidden_states, state):
        return torch.zeros(len(prev_tokens), VOCAB), state

    def step_logits_dtype(self, dtype):
        return torch.float32

    def sample_block(self, base_logits, *, first_prev_tokens, hidden_states, sampler, collect_corrected=True):
        tokens = [sampler(base_logits[:, step], step) for step in range(base_logits.shape[1])]
        return torch.stack(tokens, dim=1), base_logits


def draft_model():
    head = SimpleNamespace(org_vocab_size=VOCAB, weight=torch.zeros(VOCAB, 4))
    return SimpleNamespace(markov_head=Markov(), sample_from_anchor=True, lm_head=head, confidence_head=None)


def sampling_info(temperatures, top_ks, top_ps=None):
    ks = torch.tensor(top_ks)
    greedy = ks <= 1
    return SimpleNamespace(
        temperatures=torch.tensor(temperatures),
        top_ks=ks,
        top_ps=torch.tensor(top_ps or [1.0] * len(top_ks)),
        is_all_greedy=bool(greedy.all()),
        is_any_greedy=bool(greedy.any()),
        need_top_k_sampling=bool((ks < 1 << 30).any()),
        need_top_p_sampling=top_ps is not None,
        need_min_p_sampling=False,
    )


def worker_init(module, attributes: dict, mode: str = "static", seed: int = 7):
    """Run what the adapters do after the worker was built, on a worker whose own constructor needs a GPU: the wrapped
    `__init__` with its innermost, stock function replaced. Returns the worker, or None when nothing is patched."""
    init = module.DSparkWorkerV2.__init__
    if not hasattr(init, "__wrapped__"):
        return None
    worker = module.DSparkWorkerV2.__new__(module.DSparkWorkerV2)
    planner = SimpleNamespace(mode_value=mode, is_verify_all=True)
    runner = SimpleNamespace(model=torch.nn.Module())
    target = SimpleNamespace(random_seed=seed, model_runner=runner)
    fields = {
        "_target_worker": target,
        "_hosts_draft": True,
        "_verify_planner": planner,
        "_verify_epilogue": None,
        "_draft_model": None,
        "device": "cpu",
        "gamma": STRIDE - 1,
        "verify_num_draft_tokens": STRIDE,
        "_tp_sync": SimpleNamespace(sync=lambda site, tensor: tensor),
    }

    def stock(self) -> None:
        self.__dict__.update(fields | attributes)

    swap_innermost(init, stock)
    # The engine's own configuration, as it is before any flag is given.
    publish(
        ServerArgs(model_path="dummy", tp_size=1, device="cpu"),
        role="test",
        ranks=SpawnRanks(world_rank=0, gpu_id=0),
    )
    init(worker)
    return worker


def swap_innermost(wrapper, function) -> None:
    """Put `function` where the innermost of our wrappers calls the engine's own: each calls the one below through its
    closure."""
    while "dsv41_dist/adapters" in wrapper.__wrapped__.__code__.co_filename:
        wrapper = wrapper.__wrapped__
    names = wrapper.__code__.co_freevars
    wrapper.__closure__[names.index("original")].cell_contents = function
