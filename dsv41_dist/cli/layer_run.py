"""What the benchmarks of layers (`bench split`, `bench prefill`) share: options, a joined group, times, the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..comm.errors import ArgumentError
from ..comm.settings import CommSettings
from .bench import check_files, flipped_rank, integer
from .environment import environment
from .ops import DTYPES
from .session import Place, choose_device, choose_place, choose_transport, join

__all__ = ["LayerPlan", "LayerRun", "byte_differences", "integers", "plan_layers", "types"]


@dataclass(frozen=True)
class LayerPlan:
    """The options that every benchmark of layers has; checked before any rank is started or joined.

    `transport` beyond the base one; `required` when it was asked for by name. `graphs` 0 is eager.
    """

    launcher: str
    device: str
    transport: str
    required: bool
    iterations: int
    warmup: int
    check: bool
    graphs: int
    json_file: str | None
    plot_file: str | None
    flip: int | None


def plan_layers(
    *,
    ranks: int | None,
    transport: str,
    device: str,
    iterations: str,
    warmup: str,
    check: str,
    graphs: str | None,
    graphs_on_gpu: int,
    json_file: str | None,
    plot_file: str | None,
    flip: str | None,
) -> tuple[LayerPlan, Place]:
    """Check the shared options. Raises ArgumentError (exit 2) with one line; starts and joins nothing.

    transport auto: `peer` on GPUs where it connects on every rank, else the base one.
    graphs None: `graphs_on_gpu` on a GPU, 0 on a CPU.
    """
    place = choose_place(ranks)
    where = choose_device(device)
    carrier = choose_transport(transport, place.launcher, where)
    if transport == "auto" and where == "cuda" and flip is None:
        carrier = "peer"
    replays = (graphs_on_gpu if where == "cuda" else 0) if graphs is None else integer("-G", graphs, 0, 10**6)
    if replays and where != "cuda":
        raise ArgumentError(f"-G {graphs!r}: CUDA graphs need a GPU; allowed on this device is 0")
    check_files(json_file, plot_file)
    looks = integer("-c", check, 0, 1)
    plan = LayerPlan(
        launcher=place.launcher,
        device=where,
        transport=carrier,
        required=transport != "auto",
        iterations=integer("-n", iterations, 1, 10**6),
        warmup=integer("-w", warmup, 0, 10**6),
        check=bool(looks),
        graphs=replays,
        json_file=json_file,
        plot_file=plot_file,
        flip=flipped_rank(flip, place.size, looks),
    )
    return plan, place


def integers(argument: str, text: str, low: int, high: int) -> tuple[int, ...]:
    """1,6,16 -> (1, 6, 16), ascending and each once. Raises ArgumentError naming the argument."""
    return tuple(sorted({integer(argument, part, low, high) for part in text.split(",")}))


def types(text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """--dtype: a list of names, or all -> torch's names, each once. Raises ArgumentError."""
    found: list[str] = []
    for part in allowed if text == "all" else text.split(","):
        name = str(DTYPES.get(part, part)).removeprefix("torch.")
        if name not in allowed:
            raise ArgumentError(f"--dtype {part!r}: allowed is all, {', '.join(allowed)}")
        found.append(name)
    return tuple(dict.fromkeys(found))


def byte_differences(got: Any, want: Any) -> int:
    """How many elements of two tensors of one shape and dtype differ in a byte."""
    import torch

    size = got.element_size()
    differ = got.contiguous().view(-1).view(torch.uint8) != want.contiguous().view(-1).view(torch.uint8)
    return int(differ.view(-1, size).any(dim=1).sum())


class LayerRun:
    """A joined group and what is measured on it. Collective: every rank makes the same calls."""

    def __init__(self, rank: int, size: int, plan: LayerPlan) -> None:
        from ..comm import Communicator, TransportUnavailable

        self.plan, self.rank, self.world = plan, rank, size
        self.settings = CommSettings.from_env()
        base = "mpi" if plan.launcher == "mpirun" and plan.device == "cpu" else "process_group"
        self.ranks = ranks = join(plan.launcher, plan.device, base, self.settings)
        self.comm = Communicator.create(ranks, [plan.transport], settings=self.settings)
        if plan.required and plan.transport not in self.comm.transports:
            raise TransportUnavailable(plan.transport, "it did not connect on every rank (the warning above says why)")
        self._flips: list[Any] = []
        if plan.flip is not None:
            self._flips = _late_flips(self.comm, plan.flip)
        self.device = ranks.device
        self.rows: list[dict[str, Any]] = []
        self.wrong = 0

    @property
    def carrier(self) -> str:
        """The transport beyond the base one where it connected, else the base one."""
        return self.plan.transport if self.plan.transport in self.comm.transports else self.comm.table.fallback

    def carriers(self) -> dict[str, Any]:
        """Communicators to measure, by what carries their calls: where nobody named a transport and a faster one than
        the base connected, both."""
        from ..comm import Communicator

        found = {self.carrier: self.comm}
        if not self.plan.required and self.carrier != self.comm.table.fallback:
            base = Communicator.create(self.ranks, settings=self.settings)
            found = {self.comm.table.fallback: base, **found}
        return found

    @property
    def quiet(self) -> bool:
        return self.rank != 0 or self.plan.json_file == "-"

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def spoil(self) -> None:
        """From now on --flip-byte's rank sends a wrong byte: after the self-checks, which would not let it through."""
        for flip in self._flips:
            flip.armed = True

    def random(self, *shape: int, seed: int, dtype: str = "bfloat16") -> Any:
        """Normal numbers, the same on every rank that passes the same seed."""
        import torch

        gen = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=gen, device=self.device).to(DTYPES[dtype])

    def time(self, calls: Sequence[Callable[[], Any]]) -> tuple[dict[str, float | int], list[Any]]:
        """(what `summarise` gives over the ranks, what each call gave last), the calls taking turns."""
        from .timing import summarise, timed

        plan, last = self.plan, [None] * len(calls)
        turn = 0

        def call() -> None:
            nonlocal turn
            at = turn % len(calls)
            last[at] = calls[at]()
            turn += 1

        for _ in range(max(plan.warmup, len(calls))):
            call()
        rounds = -(-plan.iterations // len(calls)) * len(calls)  # whole rounds: every call runs last once
        turn = 0
        times, _ = timed(self.comm, call, rounds, plan.graphs)
        said = self.comm.agreement.gather([round(t, 3) for t in times], label="bench:times")
        return summarise(said), last

    def differing(self, got: Sequence[Any], want: Sequence[Any]) -> int | None:
        """Elements that differ in a byte, over all ranks; None without the check."""
        if not self.plan.check:
            return None
        mine = sum(byte_differences(a, b) for a, b in zip(got, want, strict=True))
        wrong = sum(self.comm.agreement.gather(mine, label="bench:wrong"))
        self.wrong += wrong
        return wrong

    def finish(self, more: dict[str, Any], draw: Callable[[dict[str, Any], str], None]) -> int:
        """Write and draw what was asked for, and close: 1 on every rank for anything wrong on one."""
        plan = self.plan
        if self.rank == 0:
            block = environment(self.world, plan.launcher, plan.device, self.settings)
            block["transports"] = sorted(self.comm.transports)
            results = {"env": block, "rows": self.rows, **more}
            if plan.json_file == "-":
                print(json.dumps(results, indent=1))
            elif plan.json_file:
                Path(plan.json_file).write_text(json.dumps(results, indent=1) + "\n")
            if plan.plot_file:
                draw(results, plan.plot_file)
            state = "not checked" if not plan.check else f"wrong {self.wrong} {'OK' if not self.wrong else 'FAILED'}"
            self.say(f"# world {self.world}: {len(self.rows)} lines, {state}")
        wrong = -self.comm.agreement.agree_min(-int(self.wrong > 0), label="bench:exit")
        self.comm.close()
        return wrong


def _late_flips(comm: Any, culprit: int) -> list[Any]:
    """Put a transport that can flip a byte in front of every one; it does so once it is armed."""
    from ..comm.transports.flipped import FlippedTransport

    class LateFlip(FlippedTransport):
        armed = False

        def _sent(self, x: Any) -> Any:
            return super()._sent(x) if self.armed else x

    comm.transports = {name: LateFlip(transport, culprit) for name, transport in comm.transports.items()}
    return list(comm.transports.values())
