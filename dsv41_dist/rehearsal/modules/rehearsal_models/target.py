from sglang.srt.models.deepseek_v4 import EntryClass

__all__ = ["EntryClass"]
