"""How a prompt's text becomes tokens: long texts beside the event loop, earlier answers with their tokens.

May import: `engine.turns`, `engine.http`, and what lies below.
"""
