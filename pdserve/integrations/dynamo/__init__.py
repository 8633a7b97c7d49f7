"""NVIDIA Dynamo (1.6.1): its SGLang workers with pdserve's pool as their storage. See docs/dynamo.md."""
