from sglang.srt.models.deepseek_v4_dspark import EntryClass

__all__ = ["EntryClass"]
