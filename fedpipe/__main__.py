"""``python -m fedpipe``."""

from fedpipe.cli import main

if __name__ == "__main__":
    main()
