"""Demo models: SmolLM2, which answers in words, and small Qwen3s with random weights for tests and
benchmarks.

May import: errors and settings.
"""
