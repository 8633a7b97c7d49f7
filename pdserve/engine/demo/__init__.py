"""The demo model: a small Qwen3 with random weights and a tokenizer of its own, for trials and tests.

May import: errors and settings.
"""
