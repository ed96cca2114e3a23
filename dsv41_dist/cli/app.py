"""The command line: `python -m dsv41_dist COMMAND`. Arguments are checked before any rank is started or joined."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from ..comm.errors import ArgumentError, SettingsError
from .adapters_cmd import adapters
from .bench_app import bench_app, rank_count
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

    place = choose_place(rank_count(ranks))
    CommSettings.from_env()
    where = choose_device(device)
    plan = PreflightPlan(place.launcher, where, choose_transport(transport, place.launcher, where), drill, json_out)
    raise typer.Exit(run(place, run_preflight, plan))


@app.command()
def rehearse(
    gates: Annotated[str, typer.Option(help='gates of the adapted boot: "DSV41_X=1 DSV41_Y=...", or all')] = "",
    tp: Annotated[str, typer.Option(help="tensor-parallel ranks: 1, 2 or 4")] = "4",
    prompts: Annotated[str | None, typer.Option(help="JSON file: a list of lists of token ids")] = None,
    new_tokens: Annotated[str, typer.Option(help="tokens generated per prompt")] = "6",
    seed: Annotated[str, typer.Option(help="seed of the tiny checkpoint's weights")] = "1",
    draft: Annotated[bool, typer.Option("--draft/--no-draft", help="decode with DSpark and the tiny draft")] = True,
    order_free: Annotated[bool, typer.Option("--order-free", help="sums whose bits do not depend on order")] = False,
    short: Annotated[bool, typer.Option("--short", help="without the long prompts")] = False,
    must_fire: Annotated[bool, typer.Option("--must-fire", help="an adapter that never fires is a failure")] = False,
    http: Annotated[bool, typer.Option("--http", help="by way of the engine's HTTP server")] = False,
    engine_version: Annotated[str | None, typer.Option(help="0.5.21, 0.5.22 or 0.5.23; default: as installed")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda for this machine's GPUs")] = "cpu",
    graphs: Annotated[bool, typer.Option("--graphs", help="on cuda: decode from CUDA graphs")] = False,
    engine_folder: Annotated[str | None, typer.Option(help="an engine unpacked by pack_engine.sh's unpack.sh")] = None,
    logs: Annotated[str | None, typer.Option(help="folder that keeps the engine's logs and the ranks' records")] = None,
    timeout: Annotated[str, typer.Option(help="seconds for one boot")] = "900",
    json_out: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Serve a tiny V4.1 with the published engine, stock and adapted, on CPU processes or GPUs. Exit 0 when READY."""
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
            http,
            engine_version,
            device,
            graphs,
            engine_folder,
            logs,
            timeout,
            json_out,
        )
    )


@app.command()
def logdiff(
    folder: Annotated[str, typer.Argument(help="the folder that DSV41_COMM_LOG named")],
    json_out: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print the first difference between ranks' decision logs. Exit 1 when there is one, 2 when logs are missing."""
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


# Loaded with the application: they are light, and none joins a group.
app.add_typer(bench_app, name="bench")
app.command()(doctor)
app.command()(adapters)


def main() -> None:
    """Run a command. Bad input is exit code 2 and one line on stderr, of each rank that has it: it may be only one."""
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
        if code == 130:  # newer typer turns the interrupt into an exit of its own
            print("interrupted", file=sys.stderr)
        raise SystemExit(code or 0)
    rank = next((os.environ[n] for n in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if n in os.environ), "0")
    print(f"rank {rank}: error: {text}" if rank.isdigit() and rank != "0" else f"error: {text}", file=sys.stderr)
    raise SystemExit(2)
