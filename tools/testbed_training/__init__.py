"""Everything that makes the embedded testbed: its text, tokenizer, training and export. Never imported by mxq."""
