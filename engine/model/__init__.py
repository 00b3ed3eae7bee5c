"""DeepSeek-V4 in plain torch, its checkpoints, tokenizer and chat encoding."""
