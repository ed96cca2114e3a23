"""roce_gather (DSV41_ROCE_GATHER, DSV41_ROCE_ALLREDUCE): small collectives of the TP group over a one-shot transport.

An all-gather whose shard is at most DSV41_ROCE_GATHER bytes goes over `roce` (between hosts) or `peer` (inside one
host), eager and captured alike, and a gather along another dimension than the first is written in place, without the
engine's reshape and copy. Published engines enable PyNccl only inside a capture, so patching `PyNcclCommunicator`
would leave eager calls behind: `GroupCoordinator._all_gather_into_tensor` is what both go through.
DSV41_ROCE_ALLREDUCE does the same for all-reduces that the engine would give to NCCL.
DSV41_ONESHOT chooses the transport: auto takes what the group can connect and says so when it is none; roce and peer
refuse to serve without it.

Guarantee: bit-identical (a gather is a copy). With DSV41_ROCE_ALLREDUCE: reordered sum, the same bits on every rank.
Every decision follows from op, dtype, size and layout, which are equal on all ranks; a failure after the first call
ends all ranks (checked before a step's results are used).
"""

from __future__ import annotations

import os
from typing import Any

from .base import Adapter, AdapterState, Guarantee, Patch, Target

__all__ = ["RoceGather"]

_PARALLEL, _SCHEDULER = "sglang.srt.distributed.parallel_state", "sglang.srt.managers.scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner"
_PYNCCL = "sglang.srt.distributed.device_communicators.pynccl"
_LABEL = "roce_gather"
_METHOD = "dsv41_oneshot"  # the name of our way in the engine's choice of all-reduce methods


class RoceGather(Adapter):
    name = "roce_gather"
    summary = "Small all-gathers (and all-reduces) of the TP group over a one-shot transport instead of NCCL."
    docs = "docs/roce.md"
    targets = (
        Target(_PARALLEL, "GroupCoordinator.all_gather"),
        Target(_PARALLEL, "GroupCoordinator._all_gather_into_tensor"),
        Target(_PARALLEL, "GroupCoordinator.all_gatherv"),
        Target(_PARALLEL, "GroupCoordinator._resolve_outplace_all_reduce_method"),
        Target(_PARALLEL, "GroupCoordinator._all_reduce_out_place"),
        Target(_PARALLEL, "GroupCoordinator.destroy"),
        # How calls get there, and what a method's name is used for.
        Target(_PARALLEL, "GroupCoordinator.all_reduce", patched=False),
        Target(_PARALLEL, "GroupCoordinator.all_gather_into_tensor", patched=False),
        Target(_PARALLEL, "GroupCoordinator.graph_capture", patched=False),
        Target(_PYNCCL, "PyNcclCommunicator.all_gather", patched=False),
        # When: the groups exist and have agreed, no weight is loaded and nothing captured.
        Target(_RUNNER, "ModelRunner.load_model"),
        Target(_SCHEDULER, "Scheduler.process_batch_result"),
    )

    def __init__(self) -> None:
        self._runtime: _Collectives | None = None

    @property
    def guarantee(self) -> Guarantee:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the environment has it: sums are reordered when they are routed."""
        # Not through Gates, which raises for a bad value: `adapters` lists what there is in any environment.
        routed = os.environ.get("DSV41_ROCE_ALLREDUCE", "").strip().strip("0")
        return Guarantee.REORDERED_SUM if routed else Guarantee.BIT_IDENTICAL

    def install(self, patch: Patch) -> None:
        from ..engine.gates import Gates

        if self._runtime is None:
            self._runtime = _Collectives(Gates.from_env(), patch.state)
        runtime = self._runtime
        makers = {
            "GroupCoordinator.all_gather": runtime.all_gather,
            "GroupCoordinator._all_gather_into_tensor": runtime.all_gather_into_tensor,
            "GroupCoordinator.all_gatherv": runtime.all_gatherv,
            "GroupCoordinator._resolve_outplace_all_reduce_method": runtime.resolve,
            "GroupCoordinator._all_reduce_out_place": runtime.all_reduce,
            "GroupCoordinator.destroy": runtime.destroy,
            "ModelRunner.load_model": runtime.load_model,
            "Scheduler.process_batch_result": runtime.process_batch_result,
        }
        for qualname in patch.qualnames:
            patch.wrap(qualname, makers[qualname])


class _Collectives:
    """The runtime: one for the process, for the one TP group."""

    def __init__(self, gates: Any, state: AdapterState) -> None:
        self.limits = {"all_gather": gates["DSV41_ROCE_GATHER"], "all_reduce": gates["DSV41_ROCE_ALLREDUCE"]}
        self.oneshot = gates["DSV41_ONESHOT"]
        self.state = state
        self.group: Any = None
        self.comm: Any = None
        self.transport = ""
        self.counts: dict[tuple[str, str], list[int]] = {}  # (op, way) -> calls, bytes
        self._formed = False

    # -- the group -----------------------------------------------------------------------------------------------------

    def load_model(self, original: Any) -> Any:
        def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            self.form()
            return original(runner, *args, **kwargs)

        return load_model

    def form(self) -> None:
        """Connect the transport, all ranks or none. Collective over the TP group; once per process."""
        from sglang.srt.distributed.parallel_state import get_tp_group

        from ..comm import Route, RouteTable
        from ..engine.refusal import refuse
        from ._split_group import shared

        if self._formed:
            return
        self._formed = True
        group = get_tp_group()
        if self.oneshot == "off" or group.world_size == 1:
            self._note("off: every call is stock")
            return
        if self.limits["all_reduce"] and getattr(group, "is_symmetric_memory_enabled", bool)():
            refuse(
                "roce_gather: DSV41_ROCE_ALLREDUCE is set and the engine runs with --enable-symm-mem, which gives "
                "every all-reduce to NCCL before this adapter is asked",
                "Unset one of the two on every rank.",
            )
        made = shared(group, self.state)
        if not made.transport:
            self._note(f"every call is stock: {made.reason}")
            return
        routes = tuple(Route(op, limit, made.transport) for op, limit in self.limits.items() if limit)
        self.comm = made.comm.routed(RouteTable("process_group", routes), label=_LABEL)
        self.group, self.transport = group, made.transport
        _export(self.counts)
        self._note()

    def destroy(self, original: Any) -> Any:
        def destroy(group: Any) -> Any:
            if group is self.group:
                from ._split_group import forget

                self.group = None
                forget(group)
            return original(group)

        return destroy

    def process_batch_result(self, original: Any) -> Any:
        def process_batch_result(scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
            if self.group is not None:
                # The engine waits for this event first thing; nothing may use the results of a replay that failed.
                done = getattr(result, "copy_done", None)
                if done is not None:
                    done.synchronize()
                self.comm.check()
            return original(scheduler, batch, result, *args, **kwargs)

        return process_batch_result

    # -- calls ---------------------------------------------------------------------------------------------------------

    def all_gather(self, original: Any) -> Any:
        from torch.compiler import is_compiling

        def all_gather(group: Any, input_: Any, dim: int = -1, output_tensor_list: Any = None) -> Any:
            # Under Dynamo the call becomes an opaque op, which comes to the choke point when it runs.
            if is_compiling() or not self._serves("all_gather", group):
                return original(group, input_, dim, output_tensor_list)
            dims = input_.dim()
            if not -dims <= dim < dims:
                return original(group, input_, dim, output_tensor_list)
            why = self.refusal("all_gather", input_, dim=dim % dims)
            if output_tensor_list is not None:
                why = "list of outputs"
            if why is None:
                self._count("all_gather", self.transport, input_)
                return self.comm.all_gather(input_, dim, label=_LABEL)
            if input_.is_cpu or output_tensor_list is not None:
                self._count("all_gather", why, input_)  # any other call is counted at the choke point
            return original(group, input_, dim, output_tensor_list)

        return all_gather

    def all_gather_into_tensor(self, original: Any) -> Any:
        def _all_gather_into_tensor(group: Any, output: Any, input: Any) -> Any:
            if not self._serves("all_gather", group):
                return original(group, output, input)
            why = self.refusal("all_gather", input, dim=0)
            if why is None and not output.is_contiguous():
                why = "not contiguous"
            if why is None and (output.numel() != input.numel() * group.world_size or output.dtype != input.dtype):
                why = "unequal"  # the engine's own check speaks
            if why is not None:
                self._count("all_gather", why, input)
                return original(group, output, input)
            self._count("all_gather", self.transport, input)
            self.comm.all_gather(input.view(-1), 0, out=output.view(-1), label=_LABEL)
            return None

        return _all_gather_into_tensor

    def all_gatherv(self, original: Any) -> Any:
        def all_gatherv(group: Any, input_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._serves("all_gather", group):
                for x in input_ if isinstance(input_, list) else [input_]:
                    self._count("all_gather", "uneven", x)
            return original(group, input_, *args, **kwargs)

        return all_gatherv

    def resolve(self, original: Any) -> Any:
        def _resolve_outplace_all_reduce_method(group: Any, input_: Any, *args: Any, **kwargs: Any) -> Any:
            method = original(group, input_, *args, **kwargs)
            # What another one-shot way of the engine takes, it keeps.
            if method not in (None, "pynccl") or not self._serves("all_reduce", group):
                return method
            why = self.refusal("all_reduce", input_, reduce_op="sum")
            if why is None:
                return _METHOD
            self._count("all_reduce", why, input_)
            return method

        return _resolve_outplace_all_reduce_method

    def all_reduce(self, original: Any) -> Any:
        def _all_reduce_out_place(group: Any, input_: Any, outplace_all_reduce_method: str) -> Any:
            method: Any = outplace_all_reduce_method
            if method == "auto" and self._serves("all_reduce", group):
                ours = self.refusal("all_reduce", input_, reduce_op="sum") is None
                method = group._resolve_outplace_all_reduce_method(input_) if ours else method
                method = method if method == _METHOD else "auto"
            if method == _METHOD:
                self._count("all_reduce", self.transport, input_)
                return self.comm.all_reduce(input_, label=_LABEL)
            return original(group, input_, method)

        return _all_reduce_out_place

    def _serves(self, op: str, group: Any) -> bool:
        return group is self.group and self.limits[op] > 0

    def refusal(self, op: str, x: Any, **facts: Any) -> str | None:
        """Why a call is left to the engine; from what is equal on every rank."""
        import torch

        from ..comm import SUM_DTYPES

        if x.nbytes > self.limits[op]:
            return "too large"
        if x.nbytes == 0:
            return "empty"
        if not x.is_contiguous():
            return "not contiguous"
        if x.dtype == torch.bool or x.is_complex() or (op == "all_reduce" and x.dtype not in SUM_DTYPES):
            return "dtype"
        return None if self.comm.route_name(op, x, **facts) == self.transport else f"not for {self.transport}"

    # -- the report ----------------------------------------------------------------------------------------------------

    def _count(self, op: str, way: str, x: Any) -> None:
        count = self.counts.setdefault((op, way), [0, 0])
        count[0] += 1
        count[1] += x.nbytes
        if way == self.transport:
            self.state.fire()
        if count[0] & (count[0] - 1) == 0:  # the report's line is rewritten at 1, 2, 4, 8, ... calls
            self._note()

    def _note(self, text: str = "") -> None:
        if not text:
            routes = ", ".join(f"{op} to {limit} bytes" for op, limit in self.limits.items() if limit)
            counts = ", ".join(
                f"{op} {'over' if way == self.transport else 'stock:'} {way} >= {calls} calls"
                for (op, way), (calls, _) in sorted(self.counts.items())
            )
            text = f"over {self.transport}: {routes}" + (f"; {counts} (a graph counts once)" if counts else "")
        self.state.notes[:] = [text]


def _export(counts: dict[tuple[str, str], list[int]]) -> None:
    """dsv41_collective_calls_total and dsv41_collective_bytes_total by op and way, where prometheus_client is there."""
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.core import CounterMetricFamily
    except ImportError:
        return

    class Collector:
        def collect(self) -> Any:
            for index, what in enumerate(("calls", "bytes")):
                family = CounterMetricFamily(
                    f"dsv41_collective_{what}", "Collectives of the TP group.", labels=["op", "way"]
                )
                for (op, way), values in sorted(counts.items()):
                    family.add_metric([op, way], values[index])
                yield family

    REGISTRY.register(Collector())
