"""Declared state machines: spec files to compiled tables, library machines, diagrams and searches."""
