"""Which environment variables are ours. Imports nothing but `os`: it runs in every interpreter start."""

import os

PREFIXES = ("DSV41_", "SPARK_PREFILL_")


def any_set(env=None):
    """Whether any variable of ours is set to something: what decides that there is anything to arm."""
    env = os.environ if env is None else env
    return any(name.startswith(PREFIXES) and env[name].strip() for name in env)
