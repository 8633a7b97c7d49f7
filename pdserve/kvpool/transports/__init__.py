"""Data paths between a client and a pool node."""
