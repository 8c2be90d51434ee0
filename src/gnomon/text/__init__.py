"""Tokenizer, incremental detokenizer, chat encodings and output parsing, without torch."""
