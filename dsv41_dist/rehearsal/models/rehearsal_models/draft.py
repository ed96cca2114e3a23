from rehearsal_models import or_end

with or_end(__name__):
    from sglang.srt.models.deepseek_v4_dspark import EntryClass

__all__ = ["EntryClass"]
