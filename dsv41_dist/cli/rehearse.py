"""`rehearse`: boot the published engine with a tiny V4.1, stock and adapted, and compare what they answer."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from ..adapters import REGISTRY, Adapter, Guarantee
from ..comm.errors import ArgumentError
from ..comm.settings import CommSettings
from ..engine.gates import GateError, Gates
from ..engine.survey import cache_folder
from ..rehearsal.gate_sets import every_gate, left_out
from ..rehearsal.report import as_json, judge, text
from ..rehearsal.run import boot_engine, make_checkpoint
from ..rehearsal.settings import PACKAGE_ROOT, Boot, Stage, default_stages
from ..rehearsal.tiny_config import TinyConfig
from ..rehearsal.tiny_model import checkpoint_folder
from ..rehearsal.verdict import Outcome, compare
from .environment import environment

__all__ = ["engine_python", "engine_tree", "parse_gates", "rehearse"]

_ADVICE = "run launch/engine_env.sh once (launch/rehearse.sh does), or set DSV41_ENGINE_PYTHON"


def rehearse(
    gates: str = "",
    tp: str = "4",
    prompts: str | None = None,
    new_tokens: str = "6",
    seed: str = "1",
    draft: bool = True,
    order_free: bool = False,
    short: bool = False,
    must_fire: bool = False,
    http: bool = False,
    engine_version: str | None = None,
    device: str = "cpu",
    graphs: bool = False,
    engine_folder: str | None = None,
    logs: str | None = None,
    timeout: str = "900",
    json_out: bool = False,
) -> int:
    """Boot stock, and adapted if `gates` sets any; print the report; return 0 for READY, 1 for NOT READY.

    gates: "DSV41_X=1 DSV41_Y=...", or "all": those of every adapter that can be rehearsed; prompts: a JSON file with a
    list of lists of token ids; short: without the long prompts; draft: decode with DSpark and the checkpoint's draft,
    at TP2 or TP4; http: over the engine's HTTP server; engine_version: a release that launch/engine_env.sh unpacked,
    the installed one if None; device: cpu or cuda; graphs: on cuda, decode from CUDA graphs; engine_folder: an unpacked
    engine, as launch/pack_engine.sh makes; logs: a folder that keeps what each boot wrote; timeout: seconds for one.
    Raises ArgumentError for a bad argument.
    """
    start = time.monotonic()
    names = [adapter.name for adapter in REGISTRY]
    chosen = every_gate(names) if gates == "all" else parse_gates(gates)
    ranks = _number("--tp", tp, (1, 2, 4))
    tokens = _number("--new-tokens", new_tokens, range(1, 65))
    bound = _number("--timeout", timeout, range(30, 7201))
    if draft and ranks == 1:
        raise ArgumentError("--tp 1: the engine pads the draft's heads at TP2 and TP4 only; add --no-draft")
    stages = _stages(prompts, tokens, short, draft)
    owners = Gates.from_env(chosen).owners_on()
    missing = [name for name in owners if name not in names]
    if missing:
        raise ArgumentError(f"--gates: {', '.join(missing)} is not in this version; `adapters` lists what there is")
    if engine_version is not None and engine_folder is not None:
        raise ArgumentError("--engine-version and --engine-folder: allowed is one of them")
    tree = engine_tree(engine_version) if engine_folder is None else _folder(engine_folder)
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"--device {device!r}: allowed is cpu or cuda")
    if logs is not None and Path(logs).exists():
        raise ArgumentError(f"--logs {logs}: is there already; name a new folder")
    if graphs and device != "cuda":
        raise ArgumentError("--graphs: only with --device cuda")
    python = engine_python(tree)
    absent = _absent_packages(python, tree, ranks) if device == "cuda" else ()
    adapters = [adapter for adapter in REGISTRY if adapter.name in owners]
    guarantees = _guarantees(adapters, chosen)
    exact = Guarantee.EXACT_IN_DISTRIBUTION not in guarantees
    # A sum that an adapter reorders can only be judged where its order does not matter; and other drafts make other
    # batches, whose kernels sum in other orders.
    free = order_free or not guarantees <= {Guarantee.BIT_IDENTICAL}

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    folder = checkpoint_folder(cache_folder() / "rehearsal", _number("--seed", seed, range(1 << 31)))
    say(f"checkpoint: {folder}")
    try:
        make_checkpoint(python, folder, int(seed))
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        raise ArgumentError(f"{error}; XDG_CACHE_HOME names the folder for it") from None
    boot = Boot(
        checkpoint=str(folder),
        stages=stages,
        tp=ranks,
        speculative=draft,
        order_free=free,
        http=http,
        tree=tree,
        device=device,
        graphs=graphs,
        absent=absent,
    )
    outcomes: list[Outcome] = []
    for name, values in (("stock", {}), ("adapted", chosen)):
        if name == "adapted" and (not chosen or outcomes[0].problem):
            continue
        say(f"{name}: TP{ranks}, {ranks + 2} processes are starting (a minute or so) ...")
        kept = None if logs is None else Path(logs, name)
        outcomes.append(boot_engine(python, _with(boot, values), name, timeout_s=bound, folder=kept, say=say))
    ran = len(outcomes) == 2 and not any(outcome.problem for outcome in outcomes)
    comparison = compare(outcomes[0], outcomes[1], exact) if ran else None
    problems, notes = judge(outcomes, comparison, owners, must_fire, device, graphs)
    if gates == "all":
        notes += [f"{name} is left out: {why}" for name, why in left_out(names).items()]
    if chosen and not owners:
        (problems if must_fire else notes).append("the gates turn no adapter on; `adapters` lists those that do")
    if not chosen and not outcomes[0].problem:
        problems += compare(outcomes[0], outcomes[0]).problems  # the ranks among themselves
        notes.append("no gate is set: this was the stock engine alone")
    seconds = time.monotonic() - start
    what = " ".join(f"{name}={value}" for name, value in chosen.items()) or "no gates"
    mode = "".join([", DSpark" if draft else ", no draft", ", order-free sums" if boot.order_free else ""])
    where = "CPU processes" if device == "cpu" else f"GPUs{', decoding from CUDA graphs' if graphs else ', eager'}"
    engine = f"SGLang {outcomes[0].version or '?'}, TP{ranks} on {where}"
    header = f"dsv41_dist rehearse: {engine}{' over HTTP' if http else ''}, seed {seed}, {what}{mode}"
    if json_out:
        block = environment(ranks, "rehearse", device, CommSettings())
        print(json.dumps(as_json(outcomes, comparison, problems, notes, seconds, header, block), indent=1))
    else:
        print(text(outcomes, comparison, problems, notes, header, seconds))
    return 1 if problems else 0


def _guarantees(adapters: list[Adapter], gates: dict[str, str]) -> set[Guarantee]:
    """What the adapters promise under `gates`: some of them look at the environment."""
    before = {name: os.environ.get(name) for name in gates}
    os.environ.update(gates)
    try:
        return {adapter.guarantee for adapter in adapters}
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def parse_gates(text: str) -> dict[str, str]:
    """ "A=1 B=2" -> {"A": "1", "B": "2"}, checked as the engine's ranks will check them. Raises ArgumentError."""
    out: dict[str, str] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ArgumentError(f'--gates "{text}": {error}') from None
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ArgumentError(f"--gates {word!r}: allowed is NAME=VALUE, several separated by blanks")
        if name in out:
            raise ArgumentError(f"--gates: {name} is given twice, as {out[name]!r} and as {value!r}; leave one")
        out[name] = value
    try:
        Gates.from_env(out)
    except GateError as error:
        raise ArgumentError(f"--gates: {error}") from None
    return out


def engine_python(tree: str = "") -> str:
    """The interpreter with the engine, or for the one in `tree`: DSV41_ENGINE_PYTHON, or launch/engine_env.sh's.

    Raises ArgumentError.
    """
    python = os.environ.get("DSV41_ENGINE_PYTHON") or str(cache_folder() / "engine-venv" / "bin" / "python")
    needs = ("sglang", "torch", "uvloop", "xgrammar")
    code = f"import importlib.util as u; print(*[n for n in {needs} if u.find_spec(n) is None])"
    try:
        done = _ask(python, code, (tree,), 60)
    except OSError as error:
        raise ArgumentError(f"no interpreter with the engine at {python} ({error}): {_ADVICE}") from None
    if done.returncode or done.stdout.strip():
        raise ArgumentError(f"{python} lacks {done.stdout.strip() or done.stderr.strip()[-200:]}: {_ADVICE}")
    return python


def _ask(python: str, code: str, folders: tuple[str, ...], timeout_s: int) -> subprocess.CompletedProcess[str]:
    """Run `code` with `folders` before what PYTHONPATH has already."""
    path = os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


def engine_tree(version: str | None) -> str:
    """The folder with that unpacked release; "" for the installed one. Raises ArgumentError."""
    if version is None:
        return ""
    folder = cache_folder() / "engines"
    there = sorted(path.name for path in folder.glob("*") if (path / ".complete").is_file())
    if version not in there:
        allowed = ", ".join(there) or "none yet: run launch/engine_env.sh --wheels"
        raise ArgumentError(f"--engine-version {version!r}: allowed is {allowed}")
    return str(folder / version)


def _folder(name: str) -> str:
    folder = Path(name).resolve()
    if not (folder / "sglang" / "__init__.py").is_file():
        raise ArgumentError(f"--engine-folder {name!r}: there is no sglang/ in it; launch/pack_engine.sh packs one")
    return str(folder)


def _absent_packages(python: str, tree: str, ranks: int) -> tuple[str, ...]:
    """The packages of compiled code that do not load for this interpreter. Raises ArgumentError for too few GPUs."""
    code = (
        "import torch\nfrom dsv41_dist.rehearsal.stand_ins.absent import lacking\n"
        "from dsv41_dist.rehearsal.stand_ins.on_gpu import PACKAGES\n"
        "print(torch.cuda.device_count(), *lacking(PACKAGES))"
    )
    done = _ask(python, code, (str(PACKAGE_ROOT), tree), 300)
    if done.returncode:
        raise ArgumentError(f"--device cuda: {python} failed: {done.stderr.strip()[-300:]}")
    gpus, *absent = done.stdout.split("\n")[-2].split()
    if int(gpus) < ranks:
        raise ArgumentError(f"--device cuda --tp {ranks}: this machine has {gpus} GPUs; set --tp to at most that")
    return tuple(absent)


def _with(boot: Boot, gates: dict[str, str]) -> Boot:
    return replace(boot, gates=gates)


def _stages(file: str | None, new_tokens: int, short: bool, draft: bool) -> tuple[Stage, ...]:
    config = TinyConfig()
    if file is None:
        return default_stages(new_tokens, config.vocab, long=not short, sampled=draft)
    try:
        prompts = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--prompts {file}: {error}") from None
    good = isinstance(prompts, list) and 0 < len(prompts) <= 16
    if not good or not all(isinstance(p, list) and 0 < len(p) <= 1500 for p in prompts):
        raise ArgumentError(f"--prompts {file}: allowed is 1 to 16 lists of 1 to 1500 token ids")
    if not all(type(token) is int and 0 <= token < config.vocab for prompt in prompts for token in prompt):
        raise ArgumentError(f"--prompts {file}: a token id is an integer from 0 to {config.vocab - 1}")
    return (Stage(Path(file).name, tuple(tuple(prompt) for prompt in prompts), new_tokens),)


def _number(option: str, value: str, allowed: range | tuple[int, ...]) -> int:
    try:
        number = int(value)
    except ValueError:
        number = None
    if number is None or number not in allowed:
        span = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
        raise ArgumentError(f"{option} {value!r}: allowed is {span}")
    return number
