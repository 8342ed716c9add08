"""`python -m anamorph` does what `anamorph` does."""

from anamorph.cli import main

if __name__ == "__main__":
    main()
