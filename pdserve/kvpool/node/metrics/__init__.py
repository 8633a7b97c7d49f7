"""The Prometheus metrics of a node: definitions, measurements, and the HTTP server.

May import `protocol`, and nothing else of the node.
"""
