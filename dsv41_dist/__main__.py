"""`python -m dsv41_dist`."""

from .cli.app import main

if __name__ == "__main__":
    main()
