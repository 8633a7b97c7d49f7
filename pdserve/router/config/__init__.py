"""The router's configuration: one module a subject, each key with its type, range and description.

May import: `api` (the endpoints), and the addresses of workers and pool nodes.
"""
