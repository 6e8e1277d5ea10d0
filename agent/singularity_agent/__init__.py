"""The library inside each rank; a later release fills it."""
