"""Structured output: from what a client asks to the tokens that it allows."""
