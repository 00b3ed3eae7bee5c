"""The front gate: what a client asks becomes a grammar that is truly enforced, or a refusal by name."""
