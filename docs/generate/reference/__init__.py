"""Whole pages of `docs/reference`, made from configuration structs, metrics, commands and OpenAPI."""
