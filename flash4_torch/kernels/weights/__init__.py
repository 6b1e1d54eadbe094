"""The attention weights themselves: one kernel for every architecture with TMA."""
