"""For SGLANG_EXTERNAL_MODEL_PACKAGE: the engine then imports its V4.1 model modules and not all two hundred of them."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def or_end(name: str) -> Iterator[None]:
    """End the process if a model cannot be imported: the engine would go on with another model of that name."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(f"rehearsal: {name} cannot be imported: {type(error).__name__}: {error}") from error
