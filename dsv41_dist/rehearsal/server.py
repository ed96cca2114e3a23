"""The two ways to the engine: the offline engine in this process, or its HTTP server and a client beside it.

Both hold requests back until all of a stage are with the scheduler: the batches, and with them every byte, are then the
same in every run. That goes straight to the scheduler: the manager's own pause would hold the requests before it.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import os
import socket
import sys
import threading
import traceback
import types
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

__all__ = ["Engine", "over_http", "with_engine"]

_ANSWER_S = 3600.0  # the runner's own bound is shorter


class Engine(Protocol):
    """What a stage needs. A request is a dict with `input_ids` and `sampling_params`; an answer is the engine's own."""

    async def hold(self) -> None: ...

    async def release(self) -> None: ...

    async def waiting(self) -> int: ...

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]: ...


def with_engine(arguments: dict[str, Any], work: Callable[[Engine], Awaitable[None]]) -> None:
    """Start the offline engine, run `work` with it, and shut it down."""
    import sglang

    engine = sglang.Engine(**arguments)
    manager = engine.tokenizer_manager

    class Offline:
        async def hold(self) -> None:
            await _hold(manager)

        async def release(self) -> None:
            await _release(manager)

        async def waiting(self) -> int:
            return len(manager.rid_to_state)

        async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
            answer: Any = await engine.async_generate(**request)
            return answer[0] if isinstance(answer, list) else answer

    engine.loop.run_until_complete(work(Offline()))
    engine.shutdown()


def over_http(arguments: dict[str, Any], work: Callable[[Engine], Awaitable[None]]) -> None:
    """Start the HTTP server, run `work` from a thread of this process over its own port, and end the process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # as `python -m sglang.launch_server` does, before it looks at the machine
    _without_soundfile()
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import ServerArgs

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def manager() -> Any:
        return http_server.get_global_state().tokenizer_manager

    async def hold() -> dict[str, int]:
        await _hold(manager())
        return {}

    async def release() -> dict[str, int]:
        await _release(manager())
        return {}

    async def waiting() -> dict[str, int]:
        return {"requests": len(manager().rid_to_state)}

    for route in (hold, release, waiting):
        http_server.app.add_api_route(f"/rehearsal/{route.__name__}", route, methods=["POST"])

    def client() -> None:
        status = 1
        try:
            asyncio.run(_client(f"http://127.0.0.1:{port}", work))
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)  # the runner ends the ranks, as they are

    def begin() -> None:
        threading.Thread(target=client, daemon=True).start()

    args = ServerArgs(**arguments, host="127.0.0.1", port=port)
    http_server.launch_server(args, launch_callback=begin)


def _without_soundfile() -> None:
    """The server imports it for audio, which nothing here uses: an empty module where it is not installed."""
    try:
        import soundfile  # noqa: F401
    except (ImportError, OSError):
        empty = types.ModuleType("soundfile")
        empty.__spec__ = importlib.machinery.ModuleSpec("soundfile", None)
        sys.modules["soundfile"] = empty


async def _client(url: str, work: Callable[[Engine], Awaitable[None]]) -> None:
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_S, trust_env=False) as session:

        async def post(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            answer = await session.post(path, json=body or {})
            if answer.status_code != 200:
                raise RuntimeError(f"POST {path}: {answer.status_code}: {answer.text[:500]}")
            found: Any = answer.json()
            return found[0] if isinstance(found, list) else found

        class Http:
            async def hold(self) -> None:
                await post("/rehearsal/hold")

            async def release(self) -> None:
                await post("/rehearsal/release")

            async def waiting(self) -> int:
                return (await post("/rehearsal/waiting"))["requests"]

            async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
                return await post("/generate", request)

        for _ in range(300):
            try:
                await session.post("/rehearsal/waiting", json={})
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.2)
        await work(Http())


async def _hold(manager: Any) -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    manager.auto_create_handle_loop()
    await manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="in_place"))


async def _release(manager: Any) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    await manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
