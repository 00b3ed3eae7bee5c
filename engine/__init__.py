"""An LLM serving engine for the DeepSeek-V4 family, built as actors with declared state machines."""
