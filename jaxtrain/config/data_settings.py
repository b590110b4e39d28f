"""The settings of section `data`. Data; nothing heavy is imported."""

from __future__ import annotations

from jaxtrain.config.setting import NOTHING, ROWS, Setting, share

_SOURCE = {
    "paths": Setting(
        ("python_stdlib",),
        "Files, folders (searched recursively) or globs, local or s3://, gs://, https://; or python_stdlib: the source of "
        "Python's standard library. On the command line a,b; one that contains a comma in quotes within quotes: '\"a,b\",c'.",
        location=True,
    ),
    "pattern": Setting("*", "Glob for file names inside folders."),
    "format": Setting(
        "auto",
        "auto goes by each file's suffix. text: a file is a document; jsonl: each line is JSON (.gz and .zst are unpacked); "
        "shards: what jaxtrain.tokenize wrote; arrow: datasets' save_to_disk; megatron: .bin with .idx.",
        choices=("auto", "text", "jsonl", "parquet", "arrow", "array_record", "shards", "megatron"),
    ),
    "content": Setting(
        "text",
        "What a record holds. text: a document; chat: a conversation, trained on the assistant's turns; completion: a prompt "
        "and its completion, trained on the latter.",
        choices=("text", "chat", "completion"),
    ),
    "text_field": Setting("text", "Field of the text; empty: an ArrayRecord is the text itself."),
    "messages_field": Setting("messages", "Field of a conversation: a list of {role, content}."),
    "tools_field": Setting("tools", "Field of the tools that a conversation's template gets, if there are some."),
    "prompt_field": Setting("prompt", "Field of a prompt."),
    "completion_field": Setting("completion", "Field of its completion."),
}
_MIXED = {
    "weight": Setting(1.0, "Share of rows, relative to the other sources.", low=0.0),
    "weight_changes": Setting((), "STEP:WEIGHT, as ('10000:0.5', '20000:0'): from that step on another weight."),
    "max_epochs": Setting(0, "How often the source is read at most; 0: as long as the run lasts.", low=0),
}

DATA: dict[str, Setting] = {
    **_SOURCE,
    "sources": Setting(
        {},
        "Several sources by name, each with a weight and what differs from the settings above, as {'web': {'paths': "
        "('web/*.jsonl.zst',), 'weight': 3.0}, 'code': {...}}. Empty: one source, as the settings above have it.",
        entries=_SOURCE | _MIXED,
        location=True,
    ),
    "on_exhausted": Setting(
        "redistribute",
        "When a source has been read `max_epochs` times: the others share its weight, or it is refused at the start.",
        choices=("redistribute", "refuse"),
    ),
    "max_epochs": Setting(0, "How often the data are read at most; 0: as long as the run lasts.", low=0),
    "eval_paths": Setting((), "Held-out files or folders; empty: holdout_fraction of the documents of paths.", location=True),
    "eval_sources": Setting(
        {},
        "Held-out sets by name, each with its own loss, in place of eval_paths; entries as in sources.",
        entries=_SOURCE,
        location=True,
    ),
    "holdout_fraction": share("Share of documents, chosen by a hash of their text, kept from training.", 0.05),
    "tokenizer": Setting(
        "byte",
        "byte (ids 0..255 are bytes, 256 is BOS, 257 is EOS), or a tokenizer.json or its folder, a SentencePiece .model, a "
        ".tiktoken file; package:NAME/FILE is a file of an installed Python package.",
        location=True,
    ),
    "bos_token": Setting("", "Text of the token that begins a document; empty: the tokenizer's own."),
    "eos_token": Setting("", "Text of the token that ends a document; empty: the tokenizer's own."),
    "add_bos": Setting(False, "Begin each document with BOS. EOS ends each in any case."),
    "special_tokens_in_text": Setting(False, "Text in documents that spells a special token becomes that token."),
    "chat_template_file": Setting("", "A file with a Jinja template, in place of the tokenizer's own.", location=True),
    "train_turns": Setting("all", "Of conversations: which turns of the assistant are trained.", choices=("all", "last")),
    "on_bad_record": Setting(
        "raise",
        "A record that cannot be used (no UTF-8, broken JSON, a missing field, a damaged file): stop with its file and "
        "position, or leave it out, counted and listed in WORKDIR/skipped_records.jsonl.",
        choices=("raise", "skip"),
    ),
    "on_change": Setting(
        "refuse",
        "A run is continued with other data than it began with: refuse, naming the source, or continue with the new.",
        choices=("refuse", "continue"),
        changes=NOTHING,
    ),
    "packing": Setting(
        "concat",
        "Documents to rows. concat: end to end, cut where a row is full; best_fit: only documents longer than a row are "
        "cut, the others put together so that little is left empty; pad: each document has rows of its own.",
        choices=("concat", "best_fit", "pad"),
    ),
    "seq_len_tokens": Setting(256, "Positions per row.", low=2, changes=ROWS),
    "global_batch_rows": Setting(32, "Rows of one optimizer step over all devices and microbatches.", low=1, changes=ROWS),
    "seed": Setting(0, "Orders documents and rows, anew in each epoch.", low=0, high=2**63 - 1, changes=ROWS),
    "num_workers": Setting(0, "Loader processes; 0 reads in threads.", low=0, changes=NOTHING),
    "prefetch_batches": Setting(2, "Batches read ahead.", low=1, changes=NOTHING),
    "max_memory_gib": Setting(
        4.0,
        "Text that is not tokenized yet is tokenized at the start and kept in memory, up to this size.",
        above=0.0,
        changes=NOTHING,
    ),
    "cache_dir": Setting(
        "", "Folder for token shards from object storage; empty: a temporary one.", location=True, changes=NOTHING
    ),
    "cache_gib": Setting(32.0, "How much of cache_dir shards may fill; those used longest ago go.", above=0.0, changes=NOTHING),
}
