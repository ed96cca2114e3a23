"""For SGLANG_EXTERNAL_MODEL_PACKAGE: the engine then imports its V4.1 model modules and not all two hundred of them."""
