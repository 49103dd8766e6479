"""`python -m hetsplit` is the command `hetsplit`."""

from hetsplit.cli import main

if __name__ == "__main__":
    main()
