"""The families whose weights and config.json can be read and written, by the name of their architecture."""

from __future__ import annotations

from jaxtrain.checkpoint.hf.families import (
    deepseek_v3,
    gemma2,
    gemma3,
    gpt2,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)

# In the order in which a model is matched to them for writing: the plainest first.
TABLES = (llama, mistral, qwen2, qwen3, gemma2, gemma3, gpt2, mixtral, qwen3_moe, deepseek_v3, gpt_oss)
FAMILIES = {table.FAMILY.architecture: table.FAMILY for table in TABLES}
