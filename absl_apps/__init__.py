"""Flag-driven programs built on gradaccum's public API."""
