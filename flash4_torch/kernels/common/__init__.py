"""Device code that every kernel shares."""
