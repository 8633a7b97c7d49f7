"""Storage tiers of a pool node."""
