"""Eviction policies: pure, suggest only."""
