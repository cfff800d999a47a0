"""Values that all of preheat shares: programs, keys, artifacts, architectures, settings and events."""
