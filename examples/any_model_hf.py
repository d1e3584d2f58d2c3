"""Warms a Hugging Face model built from its config (nothing is downloaded), then trains it.

Run it twice: the first run compiles and publishes, the second restores.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compilecache import ensure_warm

BATCH, LENGTH = 2, 64


def main() -> None:
    """Warms one shape, then trains on it."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    # The very arguments of the training loop below, by name: they decide what is traced.
    example = {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
    with ensure_warm(model, [example]) as warm:
        print(warm.report.table(), end="")
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            rows = torch.randint(config.vocab_size, (BATCH, LENGTH))
            mask = torch.ones_like(rows)
            # A clone: one tensor passed under two names is another graph than two tensors.
            model(input_ids=rows, attention_mask=mask, labels=rows.clone()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"compiles while training: {warm.compiles_after_prime}")


if __name__ == "__main__":
    main()
