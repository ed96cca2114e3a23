"""The gated changes to the engine."""
