"""The actor runtime, and one synchronous core a subsystem."""
