"""Compile once, prove it, restore it: no thread of a training run ever compiles."""
