"""The command line: `python -m dsv41_dist COMMAND`. Arguments are checked before any rank is started or joined."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from ..comm.errors import ArgumentError, SettingsError
from .adapters_cmd import adapters
from .doctor import doctor

__all__ = ["app", "main"]

# Older typers raise click's exceptions, newer ones those of a click of their own: the one typer itself uses.
_CLICK_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Collectives, checks and adapters for serving DeepSeek-V4.1-Flash on a tensor-parallel group.",
)


@app.command()
def bench(
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP...",
            help="all_reduce, all_gather, all_gather_columns, reduce_scatter, broadcast, agree, seqpar",
        ),
    ] = None,
    min_bytes: Annotated[str, typer.Option("-b", "--minbytes", help="smallest size (8, 64K, 1M)")] = "1K",
    max_bytes: Annotated[str, typer.Option("-e", "--maxbytes", help="largest size")] = "1M",
    factor: Annotated[str, typer.Option("-f", "--stepfactor", help="factor between sizes")] = "4",
    iterations: Annotated[str, typer.Option("-n", "--iters", help="timed calls per size")] = "20",
    warmup: Annotated[str, typer.Option("-w", "--warmup_iters", help="untimed calls before")] = "5",
    dtype: Annotated[str, typer.Option("-d", "--datatype", "--dtype", help="a type, a list a,b, or all")] = "bfloat16",
    redop: Annotated[str, typer.Option("-o", "--op", "--redop", help="sum, prod, min, max, a list, or all")] = "sum",
    check: Annotated[str, typer.Option("-c", "--check", help="1: every element is checked; 0: none")] = "1",
    graphs: Annotated[
        str, typer.Option("-G", "--cudagraph", help="replays of a CUDA graph of -n calls; 0: none")
    ] = "0",
    tokens: Annotated[str | None, typer.Option(help="rows instead of sizes: 1,6,48,96")] = None,
    hidden: Annotated[str, typer.Option(help="columns of a row")] = "5120",
    transport: Annotated[str, typer.Option(help="auto, process_group, mpi, ...")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    ranks: Annotated[str | None, typer.Option(help="ranks to start here (4); not under torchrun or mpirun")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="write results to FILE ('-': stdout)")] = None,
    plot: Annotated[str | None, typer.Option(help="draw FILE.png or FILE.svg")] = None,
    baseline: Annotated[str | None, typer.Option(help="fail below 0.9 times the speed in this results FILE")] = None,
    routes: Annotated[bool, typer.Option("--routes", help="measure which transport is fastest at which size")] = False,
    flip_byte: Annotated[
        str | None, typer.Option(help="corrupt one byte of this rank's payload (tests the check)")
    ] = None,
) -> None:
    """Time collectives in isolation, checking every element. Exit 1 on any wrong one."""
    from .bench import plan_bench, plan_routes
    from .bench_run import run_bench
    from .routes import run_routes
    from .session import run

    if routes:
        table_plan, place = plan_routes(
            ranks=_ranks(ranks),
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            factor=factor,
            transport=transport,
            device=device,
            json_file=json_file,
        )
        raise typer.Exit(run(place, run_routes, table_plan))
    if not ops:
        raise ArgumentError("OP: none given; name at least one operation, such as all_reduce (see bench --help)")
    plan, place = plan_bench(
        ops,
        ranks=_ranks(ranks),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        factor=factor,
        iterations=iterations,
        warmup=warmup,
        dtype=dtype,
        redop=redop,
        check=check,
        graphs=graphs,
        tokens=tokens,
        hidden=hidden,
        transport=transport,
        device=device,
        json_file=json_file,
        plot_file=plot,
        baseline=baseline,
        flip=flip_byte,
    )
    raise typer.Exit(run(place, run_bench, plan))


@app.command()
def preflight(
    ranks: Annotated[str | None, typer.Option(help="ranks to start here (4); not under torchrun or mpirun")] = None,
    transport: Annotated[str, typer.Option(help="auto, process_group, mpi, ...")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    drill: Annotated[bool, typer.Option("--drill", help="also stop and kill a rank of a spare set")] = False,
    json_out: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Check a group before a long boot: ranks, collectives, agreement. READY (0) or NOT READY (1) with reasons."""
    from ..comm.settings import CommSettings
    from .preflight import PreflightPlan, run_preflight
    from .session import choose_device, choose_place, choose_transport, run

    place = choose_place(_ranks(ranks))
    CommSettings.from_env()
    where = choose_device(device)
    plan = PreflightPlan(place.launcher, where, choose_transport(transport, place.launcher, where), drill, json_out)
    raise typer.Exit(run(place, run_preflight, plan))


@app.command()
def rehearse(
    gates: Annotated[str, typer.Option(help='gates of the adapted boot: "DSV41_X=1 DSV41_Y=..."')] = "",
    tp: Annotated[str, typer.Option(help="tensor-parallel ranks: 1, 2 or 4")] = "4",
    prompts: Annotated[str | None, typer.Option(help="JSON file: a list of lists of token ids")] = None,
    new_tokens: Annotated[str, typer.Option(help="tokens generated per prompt")] = "6",
    seed: Annotated[str, typer.Option(help="seed of the tiny checkpoint's weights")] = "1",
    draft: Annotated[bool, typer.Option("--draft/--no-draft", help="decode with DSpark and the tiny draft")] = True,
    order_free: Annotated[bool, typer.Option("--order-free", help="sums whose bits do not depend on order")] = False,
    short: Annotated[bool, typer.Option("--short", help="without the long prompts")] = False,
    must_fire: Annotated[bool, typer.Option("--must-fire", help="an adapter that never fires is a failure")] = False,
    timeout: Annotated[str, typer.Option(help="seconds for one boot")] = "900",
    json_out: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Serve a tiny V4.1 with the published engine on CPU processes, stock and adapted. READY (0) or NOT READY (1)."""
    from .rehearse import rehearse as run_rehearsal

    raise typer.Exit(
        run_rehearsal(
            gates,
            tp,
            prompts,
            new_tokens,
            seed,
            draft,
            order_free,
            short,
            must_fire,
            timeout,
            json_out,
        )
    )


@app.command()
def logdiff(
    folder: Annotated[str, typer.Argument(help="the folder that DSV41_COMM_LOG named")],
    json_out: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print the first difference between the ranks' decision logs. Exit 1 when there is one."""
    from ..comm.observed import first_difference

    found = first_difference(folder)
    if json_out:
        print(json.dumps({"difference": found}))
    elif found is None:
        print("no difference between ranks")
    else:
        print(f"{found['group']}: ranks differ at decision {found['index']}")
        for rank, entry in found["said"].items():
            print(f"  rank {rank}: {'nothing (its log ends here)' if entry is None else json.dumps(entry)}")
    raise typer.Exit(1 if found else 0)


# Loaded with the application: they are light, and neither joins a group.
app.command()(doctor)
app.command()(adapters)


def _ranks(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"--ranks {text!r}: allowed is an integer from 1 to 16") from None


def main() -> None:
    """Run a command. Bad input is one line on stderr (of rank 0 under a launcher) and exit code 2."""
    import os

    try:
        code = app(standalone_mode=False, prog_name="python -m dsv41_dist")
    except (ArgumentError, SettingsError) as error:
        text = str(error)
    except _CLICK_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            raise SystemExit(2) from None
        text = error.format_message().replace("\n", " ")
    except typer.Exit as error:
        raise SystemExit(error.exit_code) from None
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    else:
        raise SystemExit(code or 0)
    rank = next((os.environ[n] for n in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if n in os.environ), "0")
    if not rank.isdigit() or rank == "0":
        print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)
