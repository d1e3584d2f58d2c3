"""Warming without a trainer: a one-shot job for CI, and a pull for the start of a pod."""
