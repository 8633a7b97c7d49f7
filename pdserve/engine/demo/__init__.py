"""The demo model: SmolLM2, which answers in words on a bare CPU.

May import: errors.
"""
