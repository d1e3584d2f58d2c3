"""Keeps a primed process primed: seal, gate, workers."""
