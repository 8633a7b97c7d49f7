"""What surrounds an answer of a worker on its way to the client: guard, record of the request, its rank,
marks, spans.

Pure ASGI; knows no SGLang. May import: `engine.drain`, `engine.metric_names`, tokens, tracing, errors.
"""
