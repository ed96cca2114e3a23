"""The environment variables of the communication layer, read once and checked. Knows the standard library only."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import SettingsError

__all__ = ["CommSettings"]


@dataclass(frozen=True)
class CommSettings:
    """Bounds in seconds, `heartbeat_s` a quarter of either at most; `check` is checked mode; `log_dir` receives one
    decision log per rank when set."""

    init_timeout_s: float = 300.0
    timeout_s: float = 100.0
    heartbeat_s: float = 0.25
    check: bool = False
    log_dir: str | None = None

    def __post_init__(self) -> None:
        if self.heartbeat_s > min(self.timeout_s, self.init_timeout_s) / 4:
            raise SettingsError(
                f"DSV41_COMM_HEARTBEAT_S={self.heartbeat_s:g}: allowed is a quarter of the shorter of "
                f"DSV41_COMM_TIMEOUT_S={self.timeout_s:g} and DSV41_COMM_INIT_TIMEOUT_S={self.init_timeout_s:g} at "
                "most: a missing rank is named by its beats"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> CommSettings:
        """Read DSV41_COMM_INIT_TIMEOUT_S, DSV41_COMM_TIMEOUT_S, DSV41_COMM_HEARTBEAT_S, DSV41_COMM_CHECK,
        DSV41_COMM_LOG.

        Raises SettingsError, naming the variable, the value and what is allowed. An empty value is the default; the
        heartbeat's is a quarter of a shorter bound than one second.
        """
        env = os.environ if env is None else env
        start = _seconds(env, "DSV41_COMM_INIT_TIMEOUT_S", cls.init_timeout_s, 0.1, 86400.0)
        steady = _seconds(env, "DSV41_COMM_TIMEOUT_S", cls.timeout_s, 0.1, 86400.0)
        beat = min(cls.heartbeat_s, start / 4, steady / 4)
        return cls(
            init_timeout_s=start,
            timeout_s=steady,
            heartbeat_s=_seconds(env, "DSV41_COMM_HEARTBEAT_S", beat, 0.05, 60.0),
            check=_flag(env, "DSV41_COMM_CHECK"),
            log_dir=env.get("DSV41_COMM_LOG", "").strip() or None,
        )

    def digest_fields(self) -> dict[str, object]:
        """What must be equal on every rank (the log folder may differ)."""
        return {
            "init_timeout_s": self.init_timeout_s,
            "timeout_s": self.timeout_s,
            "heartbeat_s": self.heartbeat_s,
            "check": self.check,
        }


def _seconds(env: Mapping[str, str], name: str, default: float, low: float, high: float) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise SettingsError(f"{name}={text!r}: allowed is a number of seconds from {low:g} to {high:g}")
    return value


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").strip().lower()
    if text in ("", "0", "off", "false"):
        return False
    if text in ("1", "on", "true"):
        return True
    raise SettingsError(f"{name}={text!r}: allowed is 1/on/true or 0/off/false")
