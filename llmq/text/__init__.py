"""From text to token files: conversations, chat templates, tokenizers, and tasks of `llmq eval`.

Imports data, which has the token files, base, report, the cache folder of runtime, and from options
where models are. Start with `tokenize.py`; `inputs.py` says what a source of text is.
"""
