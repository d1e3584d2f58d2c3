"""``python -m warmup``."""

from warmup.cli import main

if __name__ == "__main__":
    main()
