"""The draft models the engine can run: architecture name -> how one is loaded, found lazily."""
