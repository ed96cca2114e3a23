"""The gated changes to the engine. REGISTRY is data: the adapters in install order."""

from .base import Adapter, Guarantee
from .block_verify import BlockVerify
from .draft_main_proj import DraftMainProj
from .draft_tau import DraftTau
from .folded_result_fence import FoldedResultFence
from .hc_fused import HcFusedAdapter
from .indexer_chunked import IndexerChunked
from .prefill_sp import PrefillSp
from .replicated_split import ReplicatedSplit
from .roce_gather import RoceGather
from .router_live import RouterLive
from .sm12x_dense_candidates import SM12xDenseCandidates
from .spark_prefill_dense import SparkPrefillDense
from .verify_cap import VerifyCap

__all__ = ["REGISTRY", "Adapter", "Guarantee"]

REGISTRY: tuple[Adapter, ...] = (
    DraftTau(),
    BlockVerify(),
    FoldedResultFence(),
    VerifyCap(),
    RouterLive(),
    ReplicatedSplit(),
    DraftMainProj(),
    RoceGather(),
    PrefillSp(),
    SM12xDenseCandidates(),
    IndexerChunked(),
    SparkPrefillDense(),
    HcFusedAdapter(),
)
