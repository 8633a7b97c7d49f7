"""pdserve: many SGLang workers, one distributed KV cache."""

__version__ = "0.1.0"
