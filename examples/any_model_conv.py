"""Warms a small convolutional net with one call, then trains it: no step compiles anything.

Run it twice: the first run compiles and publishes, the second restores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from compilecache import ensure_warm


class SmallNet(nn.Module):
    """Two convolutions with batch norm, and a classifier."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        )
        self.classifier = nn.Linear(8, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] → [B, classes]."""
        out: torch.Tensor = self.classifier(self.features(images).mean((2, 3)))
        return out


def main() -> None:
    """Warms two image sizes, then trains on both."""
    sizes = (16, 24)
    model = SmallNet()
    # What one step is called with. Meta tensors are enough: only shapes and dtypes count.
    examples = [{"images": torch.empty(8, 3, size, size, device="meta")} for size in sizes]
    with ensure_warm(model, examples) as warm:
        print(warm.report.table(), end="")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            size = sizes[step % len(sizes)]
            labels = torch.randint(4, (8,))
            loss = F.cross_entropy(model(torch.randn(8, 3, size, size)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"compiles while training: {warm.compiles_after_prime}")


if __name__ == "__main__":
    main()
