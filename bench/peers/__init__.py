"""Other people's synthesizers, each in a virtual environment of its own, driven by files."""
