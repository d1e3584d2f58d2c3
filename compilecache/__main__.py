"""``python -m compilecache``."""

from compilecache.cli import main

if __name__ == "__main__":
    main()
