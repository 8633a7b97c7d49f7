"""NVIDIA Dynamo (1.6.1): its SGLang workers with pdserve's pool as their storage (docs/other-engines.md)."""
