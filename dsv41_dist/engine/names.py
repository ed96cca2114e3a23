"""Which environment variables are ours. Imports nothing but `os`: it runs in every interpreter start."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIXES = ("DSV41_", "SPARK_PREFILL_")


def any_set(env: "Mapping[str, str] | None" = None) -> bool:
    """Whether any variable of ours is set to something: what decides that there is anything to arm."""
    env = os.environ if env is None else env
    return any(name.startswith(PREFIXES) and env[name].strip() for name in env)
