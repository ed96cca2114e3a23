"""Makes the published engine importable where its compiled packages are not."""

import importlib.util

from tests.gpu.absent import install

if importlib.util.find_spec("sglang") is not None:
    install()
