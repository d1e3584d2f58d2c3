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
    """Warms one shape, then trains on it."""
    model = SmallNet()
    # What one step is called with. A meta tensor is enough: only its shape and dtype count.
    example = {"images": torch.empty(8, 3, 16, 16, device="meta")}
    with ensure_warm(model, [example]) as warm:
        print(warm.report.table(), end="")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            images, labels = torch.randn(8, 3, 16, 16), torch.randint(4, (8,))
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"compiles while training: {warm.compiles_after_prime}")


if __name__ == "__main__":
    main()
